"""What a decode node holds: the KV buffers, the compressed bytes, one layer's scratch."""

import tracemalloc

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lynxkv.codec import CodecSpec, Tier, plan
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.node.refinement import SpanWriter
from lynxkv.node.spans import encode_prefill
from lynxkv.speculation import SamplingParams
from models import _llama, engine, prompt
from node.running import finish, prefill_node

TOKENS, ANSWER, CAP = 2000, 16, 16
SLACK = 3 << 20
"""The loop, frames in the kernel's hands on both sides, Python's own objects, logits."""


def deep():
    """Many layers, so that two layers' scratch would show."""
    torch.manual_seed(0)
    config = _llama(hidden_size=64, num_hidden_layers=24, num_key_value_heads=4, max_position_embeddings=4096)
    return TransformersEngine(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), None)


def test_a_decode_node_holds_kv_compressed_bytes_and_one_layers_scratch():
    eng = deep()
    opened = []
    open_session = eng.open

    def noting(*arguments):
        session = open_session(*arguments)
        opened.append(session.nbytes)
        return session

    eng.open = noting
    tokens = tuple(prompt(TOKENS))
    request = Request(tokens, SamplingParams(max_tokens=ANSWER), cap=CAP)
    with prefill_node(eng, chunk=512) as run, DecodeNode(eng) as node:
        finish(node.generate(run.address, request))  # everything is compiled, connected and prefilled once
        opened.clear()
        tracemalloc.start()
        _, outcome = finish(node.generate(run.address, request))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    geometry = eng.layers[0]
    row = geometry.kv_heads * geometry.k_dim
    (kv,) = opened
    assert kv == 24 * 2 * row * (TOKENS + ANSWER) * 4
    compressed = sum(outcome.bytes.values())
    scratch = row * TOKENS * 4
    assert compressed > 20 << 20
    assert peak < compressed + scratch + SLACK < compressed + kv // 10


def test_compressed_bytes_are_freed_as_residuals_are_written():
    eng, tokens, spec = engine("gqa-64"), prompt(600), CodecSpec()
    shape = eng.shape(len(tokens))
    segments = plan(shape, spec, segment_tokens=128, segment_bytes=1)
    encoded = {}
    encode_prefill(eng, tokens, 128, shape, spec, segments, encoded.__setitem__)
    session = eng.open(len(tokens), 1)
    session.place(shape)
    writer = SpanWriter(session, shape, spec, segments)
    anchors = [i for i, s in enumerate(segments) if s.tier is Tier.ANCHOR]
    residuals = [i for i, s in enumerate(segments) if s.tier is Tier.RESIDUAL]
    for i in anchors:
        writer.put(i, encoded[i])
    refined = {segments[i].span for i in residuals}
    assert writer.held_bytes == sum(encoded[i].nbytes for i in anchors if segments[i].span in refined)
    for i in residuals:
        before = writer.held_bytes
        anchor = next(a for a in anchors if segments[a].span == segments[i].span)
        writer.put(i, encoded[i])
        assert writer.held_bytes == before - encoded[anchor].nbytes
    assert writer.complete
    assert writer.held_bytes == 0


def test_a_segment_is_written_into_the_very_rows_decoding_reads():
    eng = engine("gqa-64")
    session = eng.open(200, 1)
    session.place(eng.shape(200))
    shape = eng.shape(200)
    kind = plan(shape, CodecSpec())[0].span.kind
    with session.writing(0, kind, 10, 20) as rows:
        rows.fill(3.0)
    assert np.array_equal(session._buffers.layers[0].keys[0, :, 10:20].numpy(), rows)
    assert np.shares_memory(session._buffers.layers[0].keys.numpy(), rows)
