"""Links that corrupt, cut, stall and crawl between two nodes.

The field's list of 18 (what users of such systems report), and where each item is tested:

==  =========================================================  ==============================================
1   stale pull or another prompt's KV answers                  test_faults_of_peers: another_prompts_kv…
2   an abort frees memory, a late write lands in the next      test_faults_of_requests: a_request_after_an_abort…,
                                                               transport: an_abort_frees_the_lease…
3   a dead peer leaks, waits without deadline                  test_faults_of_processes, this file: a_link_that…
4   late, duplicate, partial completions                       transport: any_sequence_of_events…,
                                                               test_faults_of_requests: a_segment_that_comes_twice…
5   decode refuses and prefill is not told                     test_faults_of_peers: the_prefill_side_is_told…
6   the partial last page is dropped                           test_faults_of_requests: prompts_of_any_length…,
                                                               node: no_token_of_a_prompt_is_dropped…
7   page size, heads or parallelism differ                     test_faults_of_peers: a_model_that_differs…
8   a sliding window taken from the group                      node: test_equality (sliding-mqa, full and sliding
                                                               layers mixed), test_faults_of_peers: windows
9   dtype or RoPE differ                                       test_faults_of_peers: a_model_that_differs…
10  outliers overflow scales silently                          test_faults_of_requests: outliers…
11  head_dim not divisible by the group                        node: test_equality (mqa-80, mha-96), codec: cases
12  corrupt data accepted                                      this file: corrupt…
13  an id twice, n > 1                                         test_faults_of_requests: an_id_used_twice…,
                                                               node: samples_of_one_prompt…, requests_for_one_prompt…
14  EOS or a stop string inside an accepted window leaks       test_faults_of_requests: an_end_token_among_drafts…
15  tens of thousands of descriptors a transfer                test_faults_of_requests: a_transfer_is_few_segments…
16  lossy by default and nobody is told                        test_faults_of_requests: what_was_sent_is_reported…
17  a restarted peer meets stale state                         test_faults_of_processes: a_restarted_node…
18  one big transfer starves small ones                        test_faults_of_requests: a_big_transfer…
==  =========================================================  ==============================================
"""

import threading

import pytest

from faults.proxy import CutAfter, Flip, Proxy, is_data
from lynxkv.codec import Tier
from lynxkv.errors import CorruptData, DeadlineExceeded, PeerLost
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams, Verified
from models import engine, prompt
from node.running import Asked, finish, interrupted, prefill_node

NAME = "mqa-80"
TIERS = (Tier.ANCHOR, Tier.RESIDUAL)


def request(on_loss="fail", tokens=300, deadline_s=60.0):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    return Request(tuple(prompt(tokens)), params, on_loss=on_loss, cap=8, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def run():
    """A prefill node; nothing may be held after a test."""
    with prefill_node(engine(NAME), chunk=128) as running:
        yield running


@pytest.fixture(scope="module")
def right(run):
    """The uninterrupted answer."""
    with DecodeNode(engine(NAME)) as node:
        return finish(node.generate(run.address, request()))[1].tokens


def through(run, damage, wanted, stall_s=20.0):
    """The outcome over a damaged link; nothing is held at the prefill node afterwards."""
    with Proxy(run.address, damage) as proxy, DecodeNode(engine(NAME), stall_s=stall_s) as node:
        try:
            return finish(node.generate(proxy.address, wanted))[1]
        finally:
            assert run.idle()


@pytest.mark.parametrize("tier", TIERS)
def test_a_segment_that_is_corrupt_once_is_sent_again_and_the_answer_is_right(run, right, tier):
    """Field report 12."""
    damage = Flip(tier, 1)
    outcome = through(run, damage, request())
    assert damage.left == 0
    assert outcome.tokens == right
    assert outcome.loss is None


@pytest.mark.parametrize("tier", TIERS)
def test_a_segment_that_is_corrupt_twice_fails_by_name(run, tier):
    """Field report 12."""
    with pytest.raises(CorruptData, match=f"{tier.name.lower()}.*corrupt twice"):
        through(run, Flip(tier, 2), request())


@pytest.mark.parametrize("tier", TIERS)
def test_a_segment_that_is_corrupt_twice_is_recomputed_and_the_answer_is_right(run, right, tier):
    """Field report 12."""
    outcome = through(run, Flip(tier, 2), request("recompute"))
    assert outcome.tokens == right
    assert "corrupt twice" in outcome.loss


@pytest.mark.parametrize("tokens", [40, 100, 128, 300])
def test_a_prompt_of_any_length_can_be_recomputed_with_the_same_answer(run, tokens):
    """A prompt shorter than the producer's chunk shows less than the chunk in its segments."""
    whole = through(run, lambda _, payload: payload, request(tokens=tokens))
    lost = through(run, CutAfter(Tier.ANCHOR, 1), request("recompute", tokens=tokens))
    assert lost.loss is not None
    assert lost.tokens == whole.tokens


@pytest.mark.parametrize("tier", TIERS)
def test_a_link_that_is_cut_fails_by_name_and_no_draft_passes_for_verified(run, right, tier):
    """Field report 3."""
    with Proxy(run.address, CutAfter(tier, 1)) as proxy, DecodeNode(engine(NAME)) as node:
        events, error = interrupted(node.generate(proxy.address, request()))
        assert run.idle()
    assert isinstance(error, PeerLost)
    verified = [event.draw.token for event in events if isinstance(event, Verified)]
    assert verified == right[: len(verified)]
    assert len(verified) <= 1


@pytest.mark.parametrize("tier", TIERS)
def test_a_link_that_is_cut_is_recomputed_and_the_answer_is_right(run, right, tier):
    """Field report 3."""
    outcome = through(run, CutAfter(tier, 1), request("recompute"))
    assert outcome.tokens == right
    assert "ended" in outcome.loss


def test_a_node_connects_again_after_its_link_was_cut(run, right):
    """Field reports 3 and 17."""
    with Proxy(run.address, CutAfter(Tier.RESIDUAL)) as proxy, DecodeNode(engine(NAME)) as node:
        with pytest.raises(PeerLost):
            finish(node.generate(proxy.address, request()))
        proxy.damage = lambda _, payload: payload
        assert finish(node.generate(proxy.address, request()))[1].tokens == right
        assert run.idle()


@pytest.mark.parametrize("tier", TIERS)
def test_a_link_that_stalls_fails_at_its_stall_deadline(run, tier):
    """Field report 3."""
    with Proxy(run.address) as proxy, DecodeNode(engine(NAME), stall_s=0.5) as node:

        def stall(header, payload):
            if is_data(header, tier):
                proxy.flow.clear()
            proxy.flow.wait()
            return payload

        proxy.damage = stall
        with pytest.raises(DeadlineExceeded, match=r"nothing arrived for 0\.5 s"):
            finish(node.generate(proxy.address, request()))
        proxy.flow.set()
        assert run.idle()


def test_a_link_that_stalls_is_recomputed_and_the_answer_is_right(run, right):
    """Field report 3."""
    with Proxy(run.address) as proxy, DecodeNode(engine(NAME), stall_s=0.5) as node:

        def stall(header, payload):
            if is_data(header, Tier.RESIDUAL):
                proxy.flow.clear()
            proxy.flow.wait()
            return payload

        proxy.damage = stall
        outcome = finish(node.generate(proxy.address, request("recompute")))[1]
        proxy.flow.set()
        assert run.idle()
    assert outcome.tokens == right
    assert "nothing arrived" in outcome.loss


def test_a_server_that_never_greets_fails_at_the_connection_deadline():
    """Field report 3."""
    with (
        prefill_node(engine(NAME)) as run,
        Proxy(run.address) as proxy,
        DecodeNode(engine(NAME), connect_s=0.5) as node,
    ):
        proxy.flow.clear()
        with pytest.raises(DeadlineExceeded, match=r"no connection .* within 0\.5 s"):
            finish(node.generate(proxy.address, request()))


def test_a_request_whose_time_is_over_fails_while_bytes_still_arrive():
    """Field report 3: a link that crawls is no reason to wait for ever."""
    with prefill_node(engine(NAME), chunk=128, rate=20_000) as run, DecodeNode(engine(NAME)) as node:
        node.prepare(run.address, request().tokens, request().spec, deadline_s=60)
        with pytest.raises(DeadlineExceeded, match="before the request's deadline"):
            finish(node.generate(run.address, request(deadline_s=1.0)))
        assert run.idle()


def test_a_slow_link_gives_the_right_answer(right):
    with prefill_node(engine(NAME), chunk=128, rate=150_000) as run, DecodeNode(engine(NAME)) as node:
        outcome = finish(node.generate(run.address, request()))[1]
        assert run.idle()
    assert outcome.tokens == right
    assert outcome.drafted == 8


def test_a_cut_link_ends_every_request_on_it_and_leases_nobody_pulled_expire():
    """Field report 3: several transfers share a link."""
    with (
        prefill_node(engine(NAME), chunk=128, lease_s=1.0) as run,
        Proxy(run.address) as proxy,
        DecodeNode(engine(NAME)) as node,
    ):
        gate = threading.Event()

        def hold(header, payload):
            if is_data(header, Tier.ANCHOR):
                gate.wait(60)
            return payload

        proxy.damage = hold
        asked = [Asked(node.generate(proxy.address, request(tokens=300 + i))) for i in range(3)]
        run.until(lambda: run.node.server.counters().leases == 3)
        proxy.cut()
        gate.set()
        for each in asked:
            with pytest.raises(PeerLost):
                each.outcome()
        assert run.idle()
