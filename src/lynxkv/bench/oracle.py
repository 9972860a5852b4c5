"""Plain decoding on a scheme's target, by a loop that shares nothing with the speculator.

It pulls the entry once more, decodes every segment at once to transformers' own ``DynamicCache``, and runs
one token at a time.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import uvloop
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from lynxkv.codec import CacheShape, CodecSpec, Kind, Segment, Span, Tier, decode
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.node.admission import sampling_to_wire, tokens_to_bytes
from lynxkv.speculation import Sampler, SamplingParams
from lynxkv.transport import connect
from lynxkv.wire import Admit, FirstToken, Hello, Manifest, Pull

_GREEDY = SamplingParams()


class _Keep:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.data: dict[int, NDArray[np.uint8]] = {}
        self.whole: Manifest | None = None
        self.first: FirstToken | None = None

    def manifest(self, manifest: Manifest) -> None:
        self.whole = manifest

    def buffer(self, segment: int, size: int) -> memoryview:
        self.data[segment] = np.empty(size, dtype=np.uint8)
        return self.data[segment].data

    def landed(self, segment: int) -> None: ...

    def first_token(self, event: FirstToken) -> None:
        self.first = event

    def tier_end(self, tier: Tier) -> None: ...

    def ended(self, error: Exception | None) -> None: ...


async def _fetch(
    engine: TransformersEngine, peer: tuple[str, int], tokens: Sequence[int], spec: CodecSpec, params: SamplingParams
) -> _Keep:
    keep, transfer = _Keep(), secrets.token_bytes(16)
    link = await connect(*peer, Hello(role="decode", name="oracle", fingerprint=engine.fingerprint))
    try:
        await link.admit(
            Admit(transfer=transfer, tokens=tokens_to_bytes(tokens), spec=spec, sampling=sampling_to_wire(params))
        )
        incoming = await link.pull(Pull(transfer=transfer), keep, stall_s=120)
        await incoming.wait()
        incoming.acknowledge()
    finally:
        await link.close()
    return keep


def target_cache(
    engine: TransformersEngine,
    shape: CacheShape,
    spec: CodecSpec,
    segments: Sequence[Segment],
    data: Mapping[int, NDArray[np.uint8]],
) -> DynamicCache:
    """Transformers' own cache, filled with every segment decoded at the spec's target."""
    rows = [
        [np.zeros((layer.kv_heads, layer.stop - layer.start, layer.dim(kind)), np.float32) for kind in Kind]
        for layer in shape.layers
    ]
    by_span: dict[Span, dict[Tier, NDArray[np.uint8]]] = {}
    for i, segment in enumerate(segments):
        by_span.setdefault(segment.span, {})[segment.tier] = data[i]
    for span, tiers in by_span.items():
        out = []
        for layer in range(span.first_layer, span.last_layer):
            start, held = shape.layers[layer].start, span.rows(shape, spec, layer)
            out.append(rows[layer][span.kind][:, held.start - start : held.stop - start])
        decode(shape, spec, span, tiers[Tier.ANCHOR], tiers.get(Tier.RESIDUAL), out)
    cache = DynamicCache(config=engine.model.config.get_text_config(decoder=True))
    dtype = engine.model.dtype
    for layer, (k, v) in zip(cache.layers, rows, strict=True):
        layer.update(torch.from_numpy(k)[None].to(dtype), torch.from_numpy(v)[None].to(dtype))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = shape.stop
    return cache


def plain_decode(
    engine: TransformersEngine, cache: DynamicCache, tokens: Sequence[int], first: int, params: SamplingParams
) -> tuple[list[int], str]:
    """Tokens and finish reason of decoding one token at a time after token 1.

    ``params`` need a seed. The sampler is the product's own, since its noise is part of what equality means;
    greedy decoding is an argmax here.
    """
    sampler = Sampler(params, tokens, engine.eos)
    greedy = params == replace(_GREEDY, seed=params.seed, max_tokens=params.max_tokens, stop=params.stop)
    answer = [first]
    while True:
        if not params.ignore_eos and answer[-1] in engine.eos:
            return answer, "stop"
        if len(answer) >= params.min_tokens and params.stop:
            text = engine.decode(answer)
            if any(stop in text for stop in params.stop):
                return answer, "stop"
        if len(answer) >= params.max_tokens:
            return answer, "length"
        with torch.inference_mode():
            ids = torch.tensor([[answer[-1]]])
            row = (
                engine.model(input_ids=ids, use_cache=True, **{engine.cache_argument: cache})
                .logits[0, -1]
                .float()
                .numpy()
            )
        answer.append(int(np.argmax(row)) if greedy else sampler.draw(row, answer).token)


def plain_answer(
    engine: TransformersEngine, peer: tuple[str, int], tokens: Sequence[int], spec: CodecSpec, params: SamplingParams
) -> tuple[list[int], str]:
    """Tokens and finish reason of plain decoding on the target KV that ``peer`` serves."""
    keep = uvloop.run(_fetch(engine, peer, tokens, spec, params))
    assert keep.whole is not None
    assert keep.first is not None
    cache = target_cache(engine, keep.whole.shape, keep.whole.spec, keep.whole.segments, keep.data)
    return plain_decode(engine, cache, tokens, keep.first.token, params)
