"""The store of encoded KV: time to live, readers, one bound; and prompts that share an entry."""

import asyncio
import threading

import numpy as np
import pytest

from lynxkv.codec import CodecSpec, plan
from lynxkv.errors import Cancelled, CapacityExceeded, Overloaded, TransferError, TransferRejected
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.node.entries import Entry, EntryStore, Holdings, Listener
from lynxkv.speculation import SamplingParams
from models import engine, prompt
from node.running import Asked, finish, prefill_node
from node.slow import SlowEngine

LOGITS = np.zeros(4, np.float32)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def entry(name, tokens=200):
    eng = engine("mqa-80")
    shape = eng.shape(tokens)
    return Entry(name.encode(), b"", shape, CodecSpec(), plan(shape, CodecSpec()))


SIZE = entry("any").reserved


@pytest.fixture
def clock():
    return Clock()


def store_of(entries, clock, ttl_s=10.0):
    return EntryStore(entries * SIZE, ttl_s, clock)


def add(store, item, deadline_s=0.0):
    return asyncio.run(store.add(item, deadline_s))


def complete(store, name):
    """An entry that is held, complete and not read."""
    item = entry(name)
    add(store, item)
    item.finish(LOGITS)
    store.release(item)
    return item


def test_an_entry_is_found_until_its_time_to_live_after_its_last_use_is_over(clock):
    store = store_of(4, clock)
    item = complete(store, "a")
    clock.now = 9.0
    assert store.get(item.key) is item
    store.release(item)
    clock.now = 18.0
    assert store.get(item.key) is item
    store.release(item)
    clock.now = 28.0
    assert store.get(item.key) is None
    assert store.check_integrity().bytes == 0


def test_an_entry_that_is_read_outlives_its_time(clock):
    store = store_of(4, clock)
    item = complete(store, "a")
    store.get(item.key)
    clock.now = 100.0
    store.expire()
    assert store.check_integrity() == Holdings(entries=1, bytes=SIZE, readers=1)


def test_room_is_taken_from_the_least_recently_used(clock):
    store = store_of(2, clock)
    old, new = complete(store, "old"), complete(store, "new")
    clock.now = 1.0
    store.release(store.get(old.key))
    third = entry("third")
    assert add(store, third) == (third, True)
    assert store.get(new.key) is None
    assert store.get(old.key) is old


def test_the_memory_bound_is_never_exceeded(clock):
    store = store_of(3, clock)
    for i in range(20):
        complete(store, f"e{i}")
        assert store.check_integrity().bytes <= 3 * SIZE
    assert store.check_integrity().entries == 3


def test_what_can_never_fit_is_refused_at_once(clock):
    store = EntryStore(SIZE - 1, 10.0, clock)
    with pytest.raises(CapacityExceeded, match=f"{SIZE} bytes cannot fit in {SIZE - 1}"):
        add(store, entry("a"), 60.0)


def test_full_memory_is_waited_for_until_a_reader_leaves():
    store = EntryStore(SIZE, 10.0)
    first, second = entry("first"), entry("second")

    async def run():
        await store.add(first, 0.0)
        waiting = asyncio.ensure_future(store.add(second, 60.0))
        while not store._waiting:
            await asyncio.sleep(0)
        assert not waiting.done()
        threading.Thread(target=store.release, args=(first,)).start()
        return await waiting

    assert asyncio.run(run()) == (second, True)
    assert store.get(first.key) is None


def test_room_that_does_not_come_in_time_is_refused_for_now(clock):
    store = store_of(1, clock)
    add(store, entry("first"))
    with pytest.raises(Overloaded, match=f"{SIZE} of {SIZE} are in use"):
        add(store, entry("second"), 0.0)
    assert store.check_integrity().entries == 1


def test_a_wait_for_room_that_is_cancelled_holds_nothing():
    store = EntryStore(SIZE, 10.0)
    first, second = entry("first"), entry("second")

    async def run():
        await store.add(first, 0.0)
        waiting = asyncio.ensure_future(store.add(second, 60.0))
        while not store._waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    store.release(first)
    assert second.readers == 0
    assert not store._waiting
    assert store.get(second.key) is None


def test_bytes_beyond_a_reservation_take_idle_room_and_are_refused_without_any(clock):
    store = store_of(2, clock)
    complete(store, "idle")
    item = entry("grown")
    add(store, item)
    store.grow(item, 1)
    assert store.check_integrity() == Holdings(1, SIZE + 1, 1)
    with pytest.raises(CapacityExceeded, match="memory bound"):
        store.grow(item, SIZE)
    assert store.check_integrity() == Holdings(1, SIZE + 1, 1)


def test_two_of_one_key_are_one_entry_with_two_readers(clock):
    store = store_of(4, clock)
    first, twin = entry("same"), entry("same")
    assert add(store, first) == (first, True)
    assert add(store, twin) == (first, False)
    assert first.readers == 2


def test_a_failed_entry_is_not_found_and_gives_its_room_back(clock):
    store = store_of(1, clock)
    item = entry("a")
    add(store, item)
    item.fail(TransferError("broken"))
    assert store.get(item.key) is None
    store.release(item)
    assert store.check_integrity().entries == 0


def test_a_failed_entry_makes_way_for_another_try_while_it_is_still_read(clock):
    store = store_of(2, clock)
    broken, again = entry("a"), entry("a")
    add(store, broken)
    broken.fail(TransferError("broken"))
    assert add(store, again) == (again, True)
    store.release(broken)
    assert store.get(again.key) is again


def test_an_entry_is_abandoned_only_when_nobody_reads_it(clock):
    store = store_of(1, clock)
    item = entry("a")
    add(store, item)
    assert not store.abandon(item)
    store.release(item)
    assert store.abandon(item)
    assert store.check_integrity().entries == 0


def test_whoever_listens_late_hears_everything_once_and_in_order():
    item = entry("a")
    heard = []
    listener = Listener(
        lambda i, encoded: heard.append((i, encoded.data.tobytes())),
        lambda logits: heard.append("finished"),
        lambda error: heard.append(error),
    )
    item.put(1, np.frombuffer(b"one", np.uint8))
    item.listen(listener)
    item.put(0, np.frombuffer(b"zero", np.uint8))
    item.finish(LOGITS)
    assert heard == [(1, b"one"), (0, b"zero"), "finished"]


def test_a_failure_reaches_those_who_listen_and_those_who_come_late():
    item, heard, error = entry("a"), [], TransferError("broken")
    listener = Listener(lambda *_: heard.append("segment"), lambda _: heard.append("finished"), heard.append)
    item.listen(listener)
    item.fail(error)
    item.listen(listener)
    assert heard == [error, error]


# Through a prefill node.


def test_requests_for_one_prompt_at_once_share_an_entry_and_one_prefill():
    """Field report 13: n > 1, an id each."""
    eng = SlowEngine(engine("mqa-80"), chunks=1)
    tokens = tuple(prompt(300))
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine("mqa-80")) as one, DecodeNode(engine("mqa-80")) as two:
        asked = [
            Asked(
                node.generate(
                    run.address,
                    Request(tokens, SamplingParams(max_tokens=12, temperature=1.0, seed=1, sample=sample)),
                )
            )
            for sample, node in enumerate((one, two, one, two))
        ]
        run.until(lambda: run.node.server.counters().deliveries == 4)
        eng.go.set()
        outcomes = [each.outcome() for each in asked]
        assert eng.prefills == 1
        assert len({tuple(o.tokens) for o in outcomes}) == 4
        assert run.idle()
        assert run.node.store.check_integrity().entries == 1


def test_a_prompt_asked_for_again_is_not_prefilled_again():
    eng = SlowEngine(engine("mqa-80"))
    request = Request(tuple(prompt(300)), SamplingParams(max_tokens=6))
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine("mqa-80")) as node:
        first = finish(node.generate(run.address, request))[1]
        second = finish(node.generate(run.address, request))[1]
    assert eng.prefills == 1
    assert first.tokens == second.tokens


def test_an_entry_encoded_from_a_held_raw_one_has_the_bytes_of_a_direct_encode():
    eng = SlowEngine(engine("gqa-64"))
    tokens = prompt(300)
    held = {}
    for raw_first in (False, True):
        with prefill_node(eng, chunk=64) as run, DecodeNode(engine("gqa-64")) as node:
            if raw_first:
                node.prepare(run.address, tokens, CodecSpec(raw=True), deadline_s=60)
            node.prepare(run.address, tokens, CodecSpec(), deadline_s=60)
            (item,) = [e for e in run.node.store._entries.values() if e.spec == CodecSpec()]
            held[raw_first] = [item.buffer(i).tobytes() for i in range(len(item.segments))]
            assert run.idle()
    assert eng.prefills == 2
    assert held[True] == held[False]


def test_a_prefill_nobody_waits_for_stops_before_its_end():
    eng = SlowEngine(engine("mqa-80"), chunks=2)
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine("mqa-80")) as node:
        asked = Asked(node.generate(run.address, Request(tuple(prompt(1000)), SamplingParams(max_tokens=6))))
        assert eng.reached.wait(30)
        run.until(lambda: run.node.server.counters().deliveries == 1)
        node.close()
        with pytest.raises(Cancelled):
            asked.outcome()
        assert run.idle()
        eng.go.set()
        run.until(lambda: not len(run.node._prefilling))
        assert eng.chunks_done < 1000 // 64
        assert run.node.store.check_integrity().entries == 0


def test_an_entry_whose_first_reader_left_serves_the_second():
    """Field report 4: what one request ends must not take from another."""
    eng = SlowEngine(engine("mqa-80"), chunks=2)
    request = Request(tuple(prompt(500)), SamplingParams(max_tokens=6))
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine("mqa-80")) as one, DecodeNode(engine("mqa-80")) as two:
        first = Asked(one.generate(run.address, request))
        run.until(lambda: run.node.server.counters().deliveries == 1)
        second = Asked(two.generate(run.address, request))
        run.until(lambda: run.node.server.counters().deliveries == 2)
        one.close()
        with pytest.raises(Cancelled):
            first.outcome()
        run.until(lambda: run.node.server.counters().deliveries == 1)
        eng.go.set()
        assert second.outcome().finish == "length"
        assert run.idle()


def test_an_admission_that_is_refused_leaves_the_entry_to_those_who_share_it():
    """A cancel that comes before the announcement; another asks for the same prompt meanwhile."""
    eng = SlowEngine(engine("mqa-80"))
    tokens = tuple(prompt(300))
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine("mqa-80")) as node:
        announce = run.node._announce

        def refuse_once(_, item):
            run.node._announce = announce
            run.node.store.get(item.key)  # another reader of the same entry, between its making and this refusal
            raise TransferRejected("cancelled before it was announced")

        run.node._announce = refuse_once
        with pytest.raises(TransferRejected, match="cancelled before"):
            finish(node.generate(run.address, Request(tokens, SamplingParams(max_tokens=6))))
        run.until(lambda: not len(run.node._prefilling))
        (item,) = run.node.store._entries.values()
        assert item.complete
        run.node.store.release(item)
        assert finish(node.generate(run.address, Request(tokens, SamplingParams(max_tokens=6))))[1].finish == "length"
        assert eng.prefills == 1


def test_a_lease_nobody_pulls_expires_while_prefills_go_on():
    """Field report 3: only leases that wait for the producer are renewed by its work."""
    eng = SlowEngine(engine("mqa-80"))
    held, busy = prompt(100), tuple(prompt(1900))
    with prefill_node(eng, chunk=64, lease_s=0.4) as run, DecodeNode(engine("mqa-80")) as node:
        node.prepare(run.address, held, CodecSpec(), deadline_s=60)
        assert run.idle()
        leases, never = [], threading.Event()

        def pace():
            never.wait(0.1)  # several chunks a lease
            leases.append(run.node.server.counters().leases)

        eng.between = pace
        run.admit(held)  # complete at once, never pulled
        finish(node.generate(run.address, Request(busy, SamplingParams(max_tokens=2))))
        assert leases[0] == 2
        assert leases[-1] == 1


def test_an_entry_is_freed_when_its_time_is_over_without_any_request():
    with prefill_node(engine("mqa-80"), chunk=64, ttl_s=0.2) as run, DecodeNode(engine("mqa-80")) as node:
        node.prepare(run.address, prompt(300), CodecSpec(), deadline_s=60)
        run.until(lambda: run.node.store.check_integrity().entries == 0)


def test_a_full_node_makes_a_request_wait_and_then_serves_it():
    """Field report 18: full memory is back-pressure."""
    eng = SlowEngine(engine("mqa-80"), chunks=2)
    first, second = tuple(prompt(300, 1)), tuple(prompt(300, 2))
    with (
        prefill_node(eng, chunk=64, memory_bytes=200_000) as run,
        DecodeNode(engine("mqa-80")) as one,
        DecodeNode(engine("mqa-80")) as two,
    ):
        params = SamplingParams(max_tokens=4)
        asked = [Asked(one.generate(run.address, Request(first, params)))]
        assert eng.reached.wait(30)
        asked.append(Asked(two.generate(run.address, Request(second, params))))
        run.until(lambda: bool(run.node.store._waiting))
        assert run.node.server.counters().admitting == 1
        eng.go.set()
        assert [each.outcome().finish for each in asked] == ["length", "length"]
        assert run.idle()


def test_a_prompt_whose_kv_can_never_fit_is_refused_with_both_sizes():
    with prefill_node(engine("mqa-80"), chunk=64, memory_bytes=1000) as run, DecodeNode(engine("mqa-80")) as node:
        with pytest.raises(CapacityExceeded, match="cannot fit in 1000"):
            finish(node.generate(run.address, Request(tuple(prompt(300)), SamplingParams(max_tokens=4))))
        assert run.idle()


def test_prefills_beyond_the_queue_are_refused():
    eng = SlowEngine(engine("mqa-80"), chunks=1)
    with prefill_node(eng, chunk=64, max_running=1, max_queue=1) as run, DecodeNode(engine("mqa-80")) as node:
        run.admit(prompt(300, 1))
        run.admit(prompt(300, 2))
        assert eng.reached.wait(30)
        with pytest.raises(Overloaded, match="at most 2 prompts"):
            finish(node.generate(run.address, Request(tuple(prompt(300, 3)), SamplingParams(max_tokens=4))))
        eng.go.set()


def test_a_node_that_stops_does_not_wait_for_admissions_that_wait_for_room():
    eng = SlowEngine(engine("mqa-80"), chunks=1)
    with DecodeNode(engine("mqa-80")) as node:
        with prefill_node(eng, chunk=64, memory_bytes=200_000, room_s=600) as run:
            run.admit(prompt(300, 1))
            asked = Asked(node.generate(run.address, Request(tuple(prompt(300, 2)), SamplingParams(max_tokens=4))))
            run.until(lambda: bool(run.node.store._waiting))
            eng.go.set()
        with pytest.raises(TransferError):
            asked.outcome()


def test_admissions_nobody_pulls_end_and_are_not_prefilled():
    """Field report 2: a peer that went away after it asked."""
    eng = SlowEngine(engine("mqa-80"), chunks=1)
    with prefill_node(eng, chunk=64, lease_s=0.4, max_running=1) as run:
        for seed in range(3):
            run.admit(prompt(300, seed=seed))
        run.until(lambda: run.node.server.counters().leases == 0)
        eng.go.set()
        assert run.idle()
        run.until(lambda: not len(run.node._prefilling))
        assert eng.prefills == 1
