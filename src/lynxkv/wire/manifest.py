"""The first thing of a transfer: what will come, in which order, and how it is checked."""

import hashlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from lynxkv.codec.layout import segment_bounds
from lynxkv.codec.plan import Segment
from lynxkv.codec.shape import CacheShape
from lynxkv.codec.spec import BLOCK, CodecSpec, Kind, Tier
from lynxkv.errors import ProtocolError
from lynxkv.wire.fingerprint import Fingerprint

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_DIM = 1 << 16
MAX_TOKENS = 1 << 24
MAX_SEGMENTS = 1 << 15
MAX_RUNS = 1 << 20
"""(segment, layer) pairs of a manifest: what its check may cost."""
MAX_SEGMENT_BYTES = 1 << 32

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, tag_field="event", tag="manifest"):
    """What a producer knows at admission; sent before anything else of a transfer.

    Parameters
    ----------
    transfer : bytes
        128-bit random id.
    generation : int
        ``epoch << 16 | attempt`` of the producer; every data frame repeats it. The server fills it in.
    tokens : int
        Tokens of the sequence; ``digest`` is :func:`token_digest` of their ids.
    segments : tuple of Segment
        Every segment of the entry in sending order; a segment's number is its place here.
    start, stop : int
        The token range that was pulled. The server fills it in.
    ready : bool
        Every segment was there when the manifest was sent (a cached prefix).
    first_token : bool
        A ``first_token`` event belongs to this transfer; it is not complete without.
    """

    transfer: TransferId
    fingerprint: Fingerprint
    tokens: Count
    digest: Annotated[bytes, Meta(max_length=64)]
    shape: CacheShape
    spec: CodecSpec
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SEGMENTS)]
    generation: Count = 0
    start: Count = 0
    stop: Count = 0
    ready: bool = False
    first_token: bool = False

    def select(self, start: int, stop: int | None, tiers: Iterable[Tier]) -> tuple[int, ...]:
        """Numbers, in sending order, of the segments of ``tiers`` that touch tokens ``[start, stop)``."""
        wanted = frozenset(tiers)
        end = self.shape.stop if stop is None else stop
        return tuple(
            i
            for i, s in enumerate(self.segments)
            if s.tier in wanted and s.span.start < end and s.span.stop > start and start < end
        )

    def clip(self, start: int, stop: int | None) -> tuple[int, int]:
        """The part of a pulled token range that the cache has; what ``start`` and ``stop`` must say then."""
        end = self.shape.stop if stop is None else min(stop, self.shape.stop)
        return min(start, end), end

    def bounds(self, segment: int) -> tuple[int, int]:
        """Least and most bytes of a segment, from the codec's geometry."""
        return segment_bounds(self.shape, self.spec, self.segments[segment])


def token_digest(tokens: bytes) -> bytes:
    """Digest (16 bytes, BLAKE2b) of token ids given as little-endian u32."""
    return hashlib.blake2b(tokens, digest_size=16).digest()


def describe(segment: Segment) -> str:
    """Name a segment for a message."""
    s = segment.span
    return (
        f"{segment.tier.name.lower()} {s.kind.name} layers {s.first_layer}..{s.last_layer} tokens {s.start}..{s.stop}"
    )


def check_manifest(manifest: Manifest) -> None:
    """Raise :class:`ProtocolError` unless the manifest is sane and covers its cache exactly once.

    Everything a hostile peer can put in is bounded: counts first, then every segment's geometry, then that no
    two segments overlap and that no row of a tier up to the target is missing.
    """
    m = manifest
    _require(len(m.shape.layers) <= MAX_LAYERS, "layers", MAX_LAYERS, len(m.shape.layers))
    _require(len(m.spec.overrides) <= len(m.shape.layers), "overrides", len(m.shape.layers), len(m.spec.overrides))
    _require(len(m.segments) <= MAX_SEGMENTS, "segments (use a larger chunk)", MAX_SEGMENTS, len(m.segments))
    _require(m.tokens <= MAX_TOKENS, "tokens", MAX_TOKENS, m.tokens)
    _require(m.shape.stop <= m.tokens, "positions in the cache", m.tokens, m.shape.stop)
    _require(m.start <= m.stop <= m.shape.stop, "stop", m.shape.stop, m.stop)
    _require(m.generation < 1 << 64, "generation", (1 << 64) - 1, m.generation)
    for layer in m.shape.layers:
        _require(layer.kv_heads <= MAX_HEADS, "kv_heads", MAX_HEADS, layer.kv_heads)
        _require(max(layer.k_dim, layer.v_dim) <= MAX_DIM, "head_dim", MAX_DIM, max(layer.k_dim, layer.v_dim))
    if any(o.layer >= len(m.shape.layers) for o in m.spec.overrides):
        raise ProtocolError("manifest: spec.overrides names a layer the cache does not have")
    runs = 0
    for i, segment in enumerate(m.segments):
        s = segment.span
        runs += s.last_layer - s.first_layer
        sane = (
            0 <= s.first_layer < s.last_layer <= len(m.shape.layers)
            and 0 <= s.start < s.stop <= m.shape.stop
            and s.start % BLOCK == 0
            and (s.stop % BLOCK == 0 or s.stop == m.shape.stop)
            and segment.tier <= m.spec.target
        )
        if not sane:
            raise ProtocolError(f"manifest: segment {i} ({describe(segment)}) does not fit the cache it belongs to")
    _require(runs <= MAX_RUNS, "runs of all segments", MAX_RUNS, runs)
    _check_cover(m)


def _require(holds: bool, what: str, most: int, got: int) -> None:
    if not holds:
        raise ProtocolError(f"manifest: at most {most} {what} expected, got {got}")


def _check_cover(m: Manifest) -> None:
    """No overlap, and every row of every tier up to the target: per (tier, kind, layer), by sorted intervals."""
    table = np.array(
        [(s.tier, s.span.kind, s.span.first_layer, s.span.last_layer, s.span.start, s.span.stop) for s in m.segments],
        dtype=np.int64,
    ).reshape(-1, 6)
    height = table[:, 3] - table[:, 2]
    row = np.repeat(np.arange(len(table)), height)
    layer = table[row, 2] + np.arange(len(row)) - np.repeat(np.cumsum(height) - height, height)
    tier, kind, start, stop = (table[row, c] for c in (0, 1, 4, 5))
    layers = len(m.shape.layers)
    place = (tier * len(Kind) + kind) * layers + layer
    order = np.lexsort((start, place))
    place, start, stop = place[order], start[order], stop[order]
    if np.any((place[1:] == place[:-1]) & (start[1:] < stop[:-1])):
        raise ProtocolError("manifest: two segments hold the same rows")
    need = _needed(m)
    held = np.clip(stop, need[place, 0], need[place, 1]) - np.clip(start, need[place, 0], need[place, 1])
    sums = np.zeros(len(need), dtype=np.int64)
    np.add.at(sums, place, held)
    short = np.flatnonzero(sums < need[:, 1] - need[:, 0])
    if short.size:
        which, at = divmod(int(short[0]), layers)
        where = f"{Tier(which // len(Kind)).name.lower()} {Kind(which % len(Kind)).name} of layer {at}"
        raise ProtocolError(f"manifest: no segment holds some rows of {where}")


def _needed(m: Manifest) -> npt.NDArray[np.int64]:
    """Rows ``[start, stop)`` that must be there: ``[tiers * kinds * layers, 2]``."""
    need = np.zeros((len(Tier), len(Kind), len(m.shape.layers), 2), dtype=np.int64)
    changed = {o.layer: o for o in m.spec.overrides}
    for i, layer in enumerate(m.shape.layers):
        rows = layer.rows(m.spec)
        own = changed.get(i, m.spec)
        for kind in Kind:
            if not layer.dim(kind):
                continue
            need[Tier.ANCHOR, kind, i] = rows.start, rows.stop
            if (own.k if kind is Kind.K else own.v).residual and m.spec.target >= Tier.RESIDUAL:
                need[Tier.RESIDUAL, kind, i] = rows.coded, rows.tail
            if m.spec.target >= Tier.EXACT:
                need[Tier.EXACT, kind, i] = rows.coded, rows.tail
    return need.reshape(-1, 2)
