"""Between a session's KV rows and the codec's bytes, a span at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec import BLOCK, CacheShape, CodecSpec, Kind, Segment, Span, Tier, decode, encode, plan
from lynxkv.engine.base import Engine, KVSession, Rows
from lynxkv.speculation import Logits

Buffer = NDArray[np.uint8]
Step = tuple[int, KVSession, Logits]
"""After a chunk of a prefill: tokens done, the session, logits of the next token."""

CHUNK = 512
"""Tokens of a prefill chunk and of a segment, where nobody says otherwise."""


def encode_span(session: Rows, shape: CacheShape, spec: CodecSpec, span: Span) -> dict[Tier, Buffer]:
    """Tiers of ``span``'s rows; NotFinite names layer, head and token."""
    arrays: list[NDArray[Any]] = []
    for layer in range(span.first_layer, span.last_layer):
        rows = span.rows(shape, spec, layer)
        arrays.append(session.read(layer, span.kind, rows.start, rows.stop))
    return encode(shape, spec, span, arrays)


def decode_span(
    session: Rows, shape: CacheShape, spec: CodecSpec, span: Span, anchor: Buffer, residual: Buffer | None
) -> None:
    """Write ``span``'s rows into the session: at anchor precision, or with the residual at the target's."""
    with ExitStack() as stack:
        out = []
        for layer in range(span.first_layer, span.last_layer):
            rows = span.rows(shape, spec, layer)
            out.append(stack.enter_context(session.writing(layer, span.kind, rows.start, rows.stop)))
        decode(shape, spec, span, anchor, residual, out)


def encode_session(
    session: KVSession, shape: CacheShape, spec: CodecSpec, segments: Sequence[Segment]
) -> Iterator[tuple[int, Buffer]]:
    """Every segment's number and bytes, from a session that holds all rows."""
    index = _numbers(segments)
    for span in _anchor_spans(segments):
        for tier, data in encode_span(session, shape, spec, span).items():
            yield index[(tier, span)], data


def encode_prefill(
    engine: Engine,
    tokens: Sequence[int],
    chunk: int,
    shape: CacheShape,
    spec: CodecSpec,
    segments: Sequence[Segment],
    put: Callable[[int, Buffer], None],
    *,
    paced: Callable[[Iterator[Step]], Iterator[Step]] = iter,
) -> Logits:
    """Prefill, and ``put`` every segment's number and bytes as soon as its rows are there; the logits of token 1.

    ``paced`` gives back the engine's chunks, each when it may be computed. The session is closed in the end.
    """
    index = _numbers(segments)
    spans = _anchor_spans(segments)
    last: tuple[KVSession, Logits] | None = None
    try:
        for done, session, logits in paced(engine.prefill(tokens, chunk)):
            last = session, logits
            while spans and spans[0].stop <= done:
                span = spans.pop(0)
                for tier, data in encode_span(session, shape, spec, span).items():
                    put(index[(tier, span)], data)
    finally:
        if last is not None:
            last[0].close()
    if last is None:
        raise AssertionError("a prompt has at least one token")
    return last[1]


def warm(engine: Engine, spec: CodecSpec) -> None:
    """Encode and decode a small cache of zeros, which compiles the codec's kernels for this model and spec."""
    tokens = 3 * BLOCK
    shape = engine.shape(tokens)
    session = engine.open(tokens, 1)
    session.place(shape)
    for i, layer in enumerate(shape.layers):
        for kind in Kind:
            with session.writing(i, kind, layer.start, layer.stop) as rows:
                rows.fill(0)
    segments = plan(shape, spec)
    tiers: dict[Span, dict[Tier, Buffer]] = {}
    for index, data in encode_session(session, shape, spec, segments):
        tiers.setdefault(segments[index].span, {})[segments[index].tier] = data
    for span, held in tiers.items():
        for residual in (None, held.get(Tier.RESIDUAL)):
            decode_span(session, shape, spec, span, held[Tier.ANCHOR], residual)


def _anchor_spans(segments: Sequence[Segment]) -> list[Span]:
    """Every span once, in sending order of the anchor."""
    return [segment.span for segment in segments if segment.tier is Tier.ANCHOR]


def _numbers(segments: Sequence[Segment]) -> dict[tuple[Tier, Span], int]:
    return {(segment.tier, segment.span): i for i, segment in enumerate(segments)}
