"""Requests that are aborted, repeated, odd or many, between two nodes."""

import os
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from faults.proxy import Proxy, is_data
from lynxkv.bench.oracle import plain_answer
from lynxkv.codec import CacheShape, CodecSpec, LayerShape, Tier, plan
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.errors import Cancelled, LynxError, NotFinite, ProtocolError, RequestError, TransferRejected
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.node.refinement import SpanWriter
from lynxkv.node.spans import encode_prefill
from lynxkv.speculation import Drafted, SamplingParams, Verified
from models import CONFIGS, engine, prompt
from node.running import Asked, finish, prefill_node
from node.slow import SlowEngine

NAME = "mqa-80"


def request(tokens=300, **changes):
    params = SamplingParams(**{"max_tokens": 20, "temperature": 1.0, "seed": 3} | changes)
    return Request(tuple(prompt(tokens)), params, cap=8)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# Aborts.


@pytest.mark.parametrize("stage", ["never started", "waiting", "drafting", "verifying", "decoding"])
def test_an_abort_at_any_stage_leaves_nothing_held(stage):
    """Field reports 2 and 3."""
    eng = engine(NAME)
    with prefill_node(eng, chunk=128) as run, Proxy(run.address) as proxy:
        with DecodeNode(eng) as node:
            right = finish(node.generate(proxy.address, request()))[1].tokens
            assert run.idle()
            threads, files = threading.active_count(), descriptors()
            held = Tier.ANCHOR if stage == "waiting" else Tier.RESIDUAL
            gate = threading.Event()

            def hold(header, payload):
                if stage in ("waiting", "drafting") and is_data(header, held):
                    gate.wait(60)
                return payload

            proxy.damage = hold
            generation = node.generate(proxy.address, request())
            if stage == "waiting":
                next(generation)
            elif stage == "drafting":
                while not isinstance(next(generation), Drafted):
                    pass
            elif stage == "verifying":
                while next(generation).position == 0:
                    pass
            elif stage == "decoding":
                for event in generation:
                    if isinstance(event, Verified) and event.position > 10:
                        break
            generation.close()
            gate.set()
            assert run.idle()
            assert not run.call(lambda: run.node._held)
            assert (threading.active_count(), descriptors()) == (threads, files)
            assert finish(node.generate(proxy.address, request()))[1].tokens == right
            assert run.idle()
        run.until(lambda: run.node.server.counters().connections == 0)


def test_an_abort_while_the_prompt_is_being_prefilled_stops_the_prefill():
    """Field report 3."""
    slow = SlowEngine(engine(NAME), chunks=1)
    with prefill_node(slow, chunk=64) as run, DecodeNode(engine(NAME)) as node:
        asked = Asked(node.generate(run.address, request(1000)))
        assert slow.reached.wait(30)
        run.until(lambda: run.node.server.counters().deliveries == 1)
        node.close()
        with pytest.raises(Cancelled):
            asked.outcome()
        assert run.idle()
        slow.go.set()
        run.until(lambda: not len(run.node._prefilling))
        assert slow.chunks_done < 1000 // 64


def test_a_request_after_an_abort_in_the_residual_gets_its_own_answer():
    """Field report 2: late writes of the first land nowhere."""
    eng = engine(NAME)
    other = Request(tuple(prompt(290, seed=9)), request().params, cap=8)
    with prefill_node(eng, chunk=128, rate=400_000) as run, DecodeNode(eng) as node:
        for _ in range(3):
            generation = node.generate(run.address, request())
            while not isinstance(next(generation), Drafted):
                pass
            generation.close()
            tokens = finish(node.generate(run.address, other))[1].tokens
            assert tokens == plain_answer(eng, run.address, other.tokens, other.spec, other.params)[0]
        assert run.idle()


def test_a_closed_node_ends_its_requests_and_threads():
    """Field report 3."""
    before = threading.active_count()
    with prefill_node(engine(NAME), chunk=128, rate=20_000) as run:
        node = DecodeNode(engine(NAME))
        asked = Asked(node.generate(run.address, request()))
        run.until(lambda: run.node.server.counters().deliveries == 1)
        node.close()
        node.close()
        with pytest.raises(LynxError):
            asked.outcome()
        assert run.idle()
    assert threading.active_count() == before


# Ids, counts and order.


def test_an_id_used_twice_is_refused_and_the_first_goes_on(monkeypatch):
    """Field report 13."""
    slow = SlowEngine(engine(NAME), chunks=1)
    monkeypatch.setattr("lynxkv.node.decode.secrets.token_bytes", lambda _: b"the same id ever")
    with prefill_node(slow, chunk=128) as run, DecodeNode(engine(NAME)) as one, DecodeNode(engine(NAME)) as two:
        first = Asked(one.generate(run.address, request()))
        run.until(lambda: run.node.server.counters().deliveries == 1)
        with pytest.raises(TransferRejected, match="exists already"):
            finish(two.generate(run.address, request()))
        slow.go.set()
        assert first.outcome().finish == "length"
        assert run.idle()
        with pytest.raises(TransferRejected, match="has ended"):
            finish(two.generate(run.address, request()))
        assert run.idle()


def test_a_segment_that_comes_twice_is_a_protocol_error():
    """Field report 4."""
    eng, tokens, spec = engine(NAME), prompt(200), CodecSpec()
    shape = eng.shape(len(tokens))
    segments = plan(shape, spec)
    encoded = {}
    encode_prefill(eng, tokens, 512, shape, spec, segments, encoded.__setitem__)
    session = eng.open(len(tokens), 1)
    session.place(shape)
    writer = SpanWriter(session, shape, spec, segments)
    writer.put(0, encoded[0])
    with pytest.raises(ProtocolError, match="segment 0 came a second time"):
        writer.put(0, encoded[0])


def test_segments_may_come_in_any_order():
    """Field report 4: a residual before its anchor is kept and used when the anchor is there."""
    eng, tokens, spec = engine(NAME), prompt(300), CodecSpec()
    shape = eng.shape(len(tokens))
    segments = plan(shape, spec, segment_tokens=64)
    encoded = {}
    encode_prefill(eng, tokens, 64, shape, spec, segments, encoded.__setitem__)
    rows = []
    for order in (list(encoded), list(encoded)[::-1], list(np.random.default_rng(0).permutation(list(encoded)))):
        session = eng.open(len(tokens), 1)
        session.place(shape)
        writer = SpanWriter(session, shape, spec, segments)
        for index in order:
            writer.put(int(index), encoded[int(index)])
        assert writer.complete
        rows.append([b.clone() for layer in session._buffers.layers for b in (layer.keys, layer.values)])
    for other in rows[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rows[0], other, strict=True))


def test_a_transfer_is_few_segments():
    """Field report 15: a 16k-token prompt of a 64-layer model, and a tiny one."""
    big = CacheShape("bfloat16", tuple(LayerShape(8, 128, 128, 0, 16384) for _ in range(64)))
    segments = plan(big, CodecSpec())
    least = min(s.span.last_layer - s.span.first_layer for s in segments if s.span.last_layer < 64)
    assert len(segments) <= 16384 // 512 * 64 * 2
    assert least >= 2
    small = plan(engine(NAME).shape(300), CodecSpec())
    assert len(small) == 4


def test_a_big_transfer_does_not_starve_a_small_one():
    """Field report 18: two decode nodes on one slow link."""
    eng = engine("mha-96")
    with prefill_node(eng, chunk=512, rate=1_000_000) as run, DecodeNode(eng) as one, DecodeNode(eng) as two:
        big = Request(tuple(prompt(1900)), SamplingParams(max_tokens=3))
        small = Request(tuple(prompt(70)), SamplingParams(max_tokens=3))
        for wanted in (big, small):
            one.prepare(run.address, wanted.tokens, wanted.spec, deadline_s=60)
        moments = []
        asked = Asked(one.generate(run.address, big, moments.append))
        run.until(lambda: any(m.what == "segment" for m in list(moments)))
        outcome = finish(two.generate(run.address, small))[1]
        assert outcome.finish == "length"
        assert asked.is_alive()  # several seconds of the link are still to come
        assert asked.outcome().finish == "length"
        assert run.idle()


# Odd prompts and odd numbers.


@pytest.mark.parametrize("name", ["gqa-64", "sliding-mqa"])
def test_prompts_of_any_length_give_plain_decodings_answer(name):
    """Field report 6."""
    eng = engine(name)
    with prefill_node(eng, chunk=64) as run, DecodeNode(eng) as node:
        for tokens in (1, 15, 16, 17, 33, 63, 64, 65, 95, 96):
            params = SamplingParams(max_tokens=6, temperature=1.0, seed=tokens)
            wanted = Request(tuple(prompt(tokens)), params)
            outcome = finish(node.generate(run.address, wanted))[1]
            plain = plain_answer(eng, run.address, wanted.tokens, wanted.spec, params)
            assert (tokens, outcome.tokens, outcome.finish) == (tokens, *plain)
        assert run.idle()


def test_a_prompt_of_no_tokens_is_refused_on_both_sides():
    """Field report 6."""
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        with pytest.raises(RequestError, match="at least 1 token"):
            finish(node.generate(run.address, Request(())))
        with pytest.raises(RequestError, match="at least 1 token"):
            node.prepare(run.address, (), CodecSpec(), deadline_s=10)
        assert run.idle()


def with_weights(change, name="gqa-64", **options):
    """An engine over a model of its own whose weights ``change`` has altered."""
    torch.manual_seed(0)
    broken = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        change(broken.model.layers)
    return TransformersEngine(broken, None, **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", [CodecSpec(), CodecSpec(raw=True)])
def test_weights_that_are_not_finite_end_in_an_error_that_names_the_layer(bad, spec):
    """Field report 10; on_loss does not hide it."""

    def spoil(layers):
        layers[1].self_attn.k_proj.weight[70, :] = bad

    eng = with_weights(spoil)
    wanted = Request(tuple(prompt(300)), SamplingParams(max_tokens=4), spec=spec, on_loss="recompute")
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        with pytest.raises(NotFinite, match="K of layer 1 head 1"):
            finish(node.generate(run.address, wanted))
        assert run.idle()
        assert run.node.store.check_integrity().entries == 0


def test_logits_that_are_not_finite_are_an_error_and_no_token():
    """Field report 1: the KV is right, the last layer is not."""

    def spoil(layers):
        layers[-1].mlp.down_proj.weight[3, :] = float("nan")

    eng = with_weights(spoil)
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        for temperature in (0.0, 1.0):
            with pytest.raises(NotFinite):
                finish(node.generate(run.address, request(temperature=temperature)))
        assert run.idle()


@pytest.mark.parametrize(("kv_dtype", "factor"), [("float32", 1e30), ("bfloat16", 1e30), ("float16", 2e4)])
def test_outliers_at_the_edge_of_the_dtype_give_plain_decodings_answer(kv_dtype, factor):
    """Field report 10: a channel of V so large that scales in half precision would overflow."""

    def enlarge(layers):
        layers[0].self_attn.v_proj.weight[5, :] = 0.0
        layers[0].self_attn.v_proj.weight[5, 0] = factor
        layers[0].self_attn.o_proj.weight[:, 5] = 0.0  # the model itself must not overflow
        layers[0].self_attn.o_proj.weight[:, 69] = 0.0

    eng = with_weights(enlarge, kv_dtype=kv_dtype)
    wanted = request(300)
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        outcome = finish(node.generate(run.address, wanted))[1]
        assert (outcome.tokens, outcome.finish) == plain_answer(
            eng, run.address, wanted.tokens, wanted.spec, wanted.params
        )
        assert run.idle()


def test_values_beyond_half_precision_end_in_an_error_that_names_the_layer():
    """Field report 10: overflow to Inf in the cast is told, not sent."""

    def enlarge(layers):
        layers[1].self_attn.v_proj.weight[5, :] *= 1e6

    eng = with_weights(enlarge, kv_dtype="float16")
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        with pytest.raises(NotFinite, match="layer 1"):
            finish(node.generate(run.address, request()))
        assert run.idle()


def test_an_end_token_among_drafts_ends_the_answer_and_leaks_nothing():
    """Field report 14."""
    eng = TransformersEngine(engine(NAME).model, None)
    with prefill_node(eng, chunk=128, rate=300_000) as run, DecodeNode(eng) as node:
        for seed in range(20):
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, logprobs=2)
            wanted = Request(tuple(prompt(300)), params)
            whole = finish(node.generate(run.address, wanted))[1]
            if whole.accepted >= 8:
                break
        end = next(t for i, t in enumerate(whole.tokens) if i >= 5 and t not in whole.tokens[:i])
        length = whole.tokens.index(end) + 1
        assert length <= whole.accepted
        eng.eos = frozenset([end])
        events, outcome = finish(node.generate(run.address, wanted))
        verified = [event for event in events if isinstance(event, Verified)]
        assert outcome.tokens == whole.tokens[:length]
        assert outcome.finish == "stop"
        assert [v.draw.token for v in verified] == outcome.tokens
        assert all(len(v.draw.top) == 2 for v in verified)
        assert [v.finish for v in verified] == [None] * (length - 1) + ["stop"]
        assert run.idle()


def test_what_was_sent_is_reported_and_the_lossless_spec_is_lossless():
    """Field report 16: bits are a request's choice, and their bytes are told."""
    eng, tokens = engine("gqa-64"), tuple(prompt(300))
    params = SamplingParams(max_tokens=10)
    with prefill_node(eng, chunk=512) as run, DecodeNode(eng) as node:
        raw = finish(node.generate(run.address, Request(tokens, params, spec=CodecSpec(raw=True))))[1]
        lynx = finish(node.generate(run.address, Request(tokens, params)))[1]
        assert run.idle()
    rows = 2 * sum(g.kv_heads * (g.k_dim + g.v_dim) for g in eng.layers) * len(tokens)
    assert rows <= raw.bytes["anchor"] < rows * 1.02
    assert raw.bytes["residual"] == 0
    assert lynx.bytes["residual"] > 0
    assert sum(lynx.bytes.values()) < 0.75 * rows
    assert raw.wire_bytes >= raw.bytes["anchor"]
