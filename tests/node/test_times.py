"""What is measured of an answer, and what the nodes count."""

import threading
from dataclasses import astuple

import pytest

from faults.proxy import CutAfter, Flip, Proxy
from lynxkv.codec import CodecSpec, Tier
from lynxkv.errors import PeerLost
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams
from models import engine, prompt
from node.running import finish, interrupted, nothing_is_held, prefill_node, request

NAME = "mqa-80"


def test_times_are_in_the_order_in_which_things_happen():
    eng = engine(NAME)
    with prefill_node(eng, chunk=64, rate=300_000) as run, DecodeNode(eng) as node:
        _, outcome = finish(node.generate(run.address, request(600)))
    t = outcome.times
    assert outcome.drafted > 0
    assert 0 <= t.queued_s <= t.manifest_s <= t.anchor_s <= t.ttft_draft_s <= t.target_s <= t.ttft_verified_s <= t.end_s
    assert t.manifest_s <= t.ttft_prefill_s <= t.ttft_draft_s
    assert outcome.target == "residual"


def test_an_answer_that_never_drafts_has_its_first_own_token_once():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        wanted = Request(tuple(prompt(200)), SamplingParams(max_tokens=5, seed=1), spec=CodecSpec(raw=True))
        _, outcome = finish(node.generate(run.address, wanted))
    assert outcome.times.ttft_draft_s == outcome.times.ttft_verified_s
    assert outcome.target == "exact"


def test_an_answer_of_token_1_alone_has_no_token_of_its_own():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        wanted = Request(tuple(prompt(200)), SamplingParams(max_tokens=1, seed=1))
        _, outcome = finish(node.generate(run.address, wanted))
    assert outcome.times.ttft_draft_s is None
    assert outcome.times.ttft_verified_s is None
    assert outcome.times.ttft_prefill_s <= outcome.times.end_s


def test_what_was_never_written_has_no_time():
    eng = engine(NAME)
    with (
        prefill_node(eng, chunk=64) as run,
        Proxy(run.address, CutAfter(Tier.ANCHOR)) as proxy,
        DecodeNode(eng) as node,
    ):
        _, outcome = finish(node.generate(proxy.address, request(on_loss="recompute")))
    assert outcome.loss is not None
    assert outcome.times.anchor_s is None
    assert outcome.times.target_s is None
    assert outcome.times.ttft_verified_s is not None


def test_totals_count_bytes_by_tier_leases_by_their_end_and_resends():
    eng = engine(NAME)
    with prefill_node(eng, chunk=64) as run, DecodeNode(eng) as node:
        with Proxy(run.address, Flip(Tier.RESIDUAL, 1)) as proxy:
            _, outcome = finish(node.generate(proxy.address, request()))
            assert nothing_is_held(run, node)
        generation = node.generate(run.address, request())
        next(generation)
        generation.close()
        assert nothing_is_held(run, node)
        sent, received = run.call(run.node.totals), node.totals()
        assert sent.resends == 1
        assert sent.released["acknowledged"] >= 1  # the second may have come whole before it was closed
        assert sum(sent.released.values()) == 2
        assert set(sent.sent_bytes) == set(received.received_bytes) == {"anchor", "residual", "exact"}
        assert sent.sent_bytes["exact"] == 0
        for tier in ("anchor", "residual"):
            assert 0 < received.received_bytes[tier] <= sent.sent_bytes[tier]
        assert outcome.bytes["anchor"] <= received.received_bytes["anchor"]
        assert received.losses == {}


@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
def test_totals_count_losses_by_class(on_loss):
    eng = engine(NAME)
    with prefill_node(eng, chunk=64) as run, DecodeNode(eng) as node:
        for tier in (Tier.ANCHOR, Tier.RESIDUAL):
            with Proxy(run.address, CutAfter(tier)) as proxy:
                generation = node.generate(proxy.address, request(on_loss=on_loss))
                if on_loss == "fail":
                    assert isinstance(interrupted(generation)[1], PeerLost)
                else:
                    finish(generation)
        assert node.totals().losses == {"PeerLost": 2}
        assert nothing_is_held(run, node)


def test_holdings_can_be_read_from_any_thread_while_requests_run():
    eng, stop, seen = engine(NAME), threading.Event(), []
    with prefill_node(eng, chunk=64, rate=1_000_000) as run, DecodeNode(eng) as node:

        def look():
            while not stop.is_set():
                seen.append((astuple(node.holdings()), node.totals()))

        looking = threading.Thread(target=look)
        looking.start()
        for seed in range(4):
            finish(node.generate(run.address, request(seed=seed)))
        stop.set()
        looking.join()
        assert nothing_is_held(run, node)
    assert any(held[0] == 1 for held, _ in seen)
    received = [sum(totals.received_bytes.values()) for _, totals in seen]
    assert received == sorted(received)
