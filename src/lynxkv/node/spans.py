"""Between a session's KV rows and the codec's bytes, a span at a time."""

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec import CacheShape, CodecSpec, Span, Tier, decode, encode
from lynxkv.engine.base import KVSession

Buffer = NDArray[np.uint8]

CHUNK = 512
"""Tokens of a prefill chunk and of a segment, where nobody says otherwise."""


def encode_span(session: KVSession, shape: CacheShape, spec: CodecSpec, span: Span) -> dict[Tier, Buffer]:
    """Tiers of ``span``'s rows; NotFinite names layer, head and token."""
    arrays: list[NDArray[Any]] = []
    for layer in range(span.first_layer, span.last_layer):
        rows = span.rows(shape, spec, layer)
        arrays.append(session.read(layer, span.kind, rows.start, rows.stop))
    return encode(shape, spec, span, arrays)


def decode_span(
    session: KVSession, shape: CacheShape, spec: CodecSpec, span: Span, anchor: Buffer, residual: Buffer | None
) -> None:
    """Write ``span``'s rows into the session: at anchor precision, or with the residual at the target's."""
    with ExitStack() as stack:
        out = []
        for layer in range(span.first_layer, span.last_layer):
            rows = span.rows(shape, spec, layer)
            out.append(stack.enter_context(session.writing(layer, span.kind, rows.start, rows.stop)))
        decode(shape, spec, span, anchor, residual, out)
