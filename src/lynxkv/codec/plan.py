"""Cuts a KV cache into segments and puts them in sending order."""

from collections.abc import Iterator
from dataclasses import dataclass

from lynxkv.codec.shape import CacheShape, Rows
from lynxkv.codec.spec import BLOCK, CodecSpec, Kind, Tier
from lynxkv.errors import SpecError


@dataclass(frozen=True, slots=True)
class Span:
    """What is encoded at once: one kind, layers ``[first_layer, last_layer)``, positions ``[start, stop)``.

    ``start`` and ``stop`` lie on the block grid, or at an end of the sequence.
    """

    kind: Kind
    first_layer: int
    last_layer: int
    start: int
    stop: int

    def rows(self, shape: CacheShape, spec: CodecSpec, layer: int) -> Rows:
        """The span's part of ``layer``'s rows; empty (``start == stop``) where the layer holds none of it."""
        return self.clip(shape.layers[layer].rows(spec))

    def clip(self, rows: Rows) -> Rows:
        """The part of a layer's rows that lies in the span."""
        return Rows(*(min(max(edge, self.start), self.stop) for edge in rows))


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous bytes: one tier of one span."""

    tier: Tier
    span: Span


def plan(
    shape: CacheShape, spec: CodecSpec, *, segment_tokens: int = 512, segment_bytes: int = 1 << 20
) -> tuple[Segment, ...]:
    """All segments of a cache, in sending order: tier, then token range, then K before V, then layers.

    The anchor goes token range by token range, so that it streams while prefill runs. Later tiers send
    K of the whole sequence before any V: K's residual is worth far more.

    Parameters
    ----------
    segment_tokens : int
        Tokens of a segment, a multiple of 64.
    segment_bytes : int
        Layers are put together until a segment's anchor has at least about this many bytes.
    """
    if segment_tokens < BLOCK or segment_tokens % BLOCK:
        raise SpecError(f"segment_tokens must be a multiple of {BLOCK}, got {segment_tokens}")
    anchor = [
        s for a in range(0, shape.stop, segment_tokens) for s in _spans(shape, spec, a, segment_tokens, segment_bytes)
    ]
    segments = [Segment(Tier.ANCHOR, s) for s in anchor]
    for tier in (Tier.RESIDUAL, Tier.EXACT):
        if tier <= spec.target:
            for kind in Kind:
                segments += [Segment(tier, s) for s in anchor if s.kind is kind and _has(shape, spec, s, tier)]
    return tuple(segments)


def _spans(shape: CacheShape, spec: CodecSpec, start: int, tokens: int, least: int) -> Iterator[Span]:
    stop = min(start + tokens, shape.stop)
    for kind in Kind:
        first, size = 0, 0
        for i, layer in enumerate(shape.layers):
            width = layer.kv_heads * layer.dim(kind)
            bits = 8 * shape.itemsize if spec.raw else spec.bits(i, kind).anchor
            held = max(0, min(layer.stop, stop) - max(layer.start, start))
            size += width * held * bits
            if size >= 8 * least:
                yield Span(kind, first, i + 1, start, stop)
                first, size = i + 1, 0
        if size:
            yield Span(kind, first, len(shape.layers), start, stop)


def _has(shape: CacheShape, spec: CodecSpec, span: Span, tier: Tier) -> bool:
    """Whether ``span`` has any byte of ``tier``: a coded row in a layer with bits for it."""
    return any(
        rows.tail > rows.coded and (tier is Tier.EXACT or spec.bits(layer, span.kind).residual)
        for layer in range(span.first_layer, span.last_layer)
        for rows in [span.rows(shape, spec, layer)]
    )
