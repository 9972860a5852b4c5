"""A decode node's memory is bounded: requests wait for it in order, and are refused beyond a bound."""

import pytest

from lynxkv.errors import Cancelled, DeadlineExceeded, Overloaded
from lynxkv.node.decode import DecodeNode
from models import engine
from node.running import Asked, finish, interrupted, nothing_is_held, prefill_node, request

NAME = "mqa-80"


def size_of(eng, wanted):
    """Bytes the node reserves for one request."""
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        generation = node.generate(run.address, wanted)
        next(generation)
        size = node.holdings().memory_bytes
        generation.close()
        return size


def test_a_request_waits_for_memory_and_is_then_served():
    eng = engine(NAME)
    size = size_of(eng, request())
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng, memory_bytes=size * 3 // 2) as node:
        first = node.generate(run.address, request())
        next(first)
        second = Asked(node.generate(run.address, request(seed=1)))
        run.until(lambda: node.holdings().waiting == 1)
        held = node.holdings()
        assert (held.running, held.memory_bytes) == (1, size)
        finish(first)
        outcome = second.outcome()
        assert outcome.finish == "length"
        assert outcome.times.queued_s > 0
        assert nothing_is_held(run, node)


def test_a_request_that_never_fits_and_one_too_many_are_refused():
    eng = engine(NAME)
    size = size_of(eng, request())
    with prefill_node(eng, chunk=128) as run:
        with DecodeNode(eng, memory_bytes=size - 1) as node:
            _, error = interrupted(node.generate(run.address, request()))
            assert f"{size} bytes cannot fit in {size - 1}" in str(error)
        with DecodeNode(eng, memory_bytes=size, max_queue=0) as node:
            first = node.generate(run.address, request())
            next(first)
            _, error = interrupted(node.generate(run.address, request()))
            assert isinstance(error, Overloaded)
            finish(first)
            assert nothing_is_held(run, node)


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_wait_for_memory_ends_by_a_cancel_the_deadline_and_the_nodes_end(how):
    eng = engine(NAME)
    size = size_of(eng, request())
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng, memory_bytes=size) as node:
        first = node.generate(run.address, request())
        next(first)
        waiting = node.generate(run.address, request(deadline_s=0.05 if how == "deadline" else 60))
        asked = Asked(waiting)
        if how == "cancel":
            run.until(lambda: node.holdings().waiting == 1)
            waiting.cancel("enough")
        elif how == "close":
            run.until(lambda: node.holdings().waiting == 1)
            node.close()
        with pytest.raises(DeadlineExceeded if how == "deadline" else Cancelled):
            asked.outcome()
        first.close()
        assert nothing_is_held(run, node)


def test_what_is_held_is_within_what_was_reserved_all_the_time():
    eng, most = engine("gqa-64"), []
    with prefill_node(eng, chunk=64) as run, DecodeNode(eng, memory_bytes=1 << 30) as node:

        def look(_):
            held = node.holdings()
            most.append((held.kv_bytes, held.staged_bytes))
            assert held.kv_bytes + held.staged_bytes <= held.memory_bytes

        finish(node.generate(run.address, request(1000), look))
        assert nothing_is_held(run, node)
    assert max(staged for _, staged in most) > 0
    assert max(kv for kv, _ in most) > 0


def test_many_requests_on_little_memory_are_all_served():
    eng = engine(NAME)
    size = size_of(eng, request(200))
    with prefill_node(eng, chunk=64) as run, DecodeNode(eng, memory_bytes=size * 5 // 2) as node:
        alone = [finish(node.generate(run.address, request(200, seed=i)))[1].tokens for i in range(6)]
        asked = [Asked(node.generate(run.address, request(200, seed=i))) for i in range(6)]
        assert [each.outcome().tokens for each in asked] == alone
        assert nothing_is_held(run, node)
