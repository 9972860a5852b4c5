"""Where the bytes of a segment lie: a directory, then one run of bytes for every (layer, KV head)."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec.plan import Segment, Span
from lynxkv.codec.shape import DTYPE_BYTES, CacheShape, LayerShape, Rows
from lynxkv.codec.spec import BLOCK, Bits, CodecSpec, Kind, Tier
from lynxkv.errors import SpecError

ENTRY = np.dtype([("size", "<u8"), ("digest", "<u8")])
"""One entry of a segment's directory: the run's bytes and their seeded xxh3_64."""


@dataclass(frozen=True, slots=True)
class Run:
    """The geometry of one head's bytes in a span; all heads of a layer have the same.

    The anchor's run is ``raw rows | block | block | … | raw values of flagged groups``, the residual's
    ``block | block | …``. An anchor block is ``min of every group | max of every group | codes``, a
    residual block is codes only.

    Parameters
    ----------
    kind : Kind
        K: a group is one channel over the block's 64 tokens; V: one token over up to 64 channels.
    dtype : str
        The cache's element type.
    dim : int
        Channels of a head.
    rows : Rows
        The span's part of the layer's rows.
    sinks : int
        Rows at the start of the first block that are raw and belong to no group.
    bits : Bits
        Width of the codes.
    """

    kind: Kind
    dtype: str
    dim: int
    rows: Rows
    sinks: int
    bits: Bits

    itemsize: int = field(init=False)
    """Bytes of one element."""
    blocks: int = field(init=False)
    """Coded blocks."""
    groups: int = field(init=False)
    """Groups of a block: ``dim`` for K; for V 64 tokens times ceil(dim / 64), token by token."""
    raw_bytes: int = field(init=False)
    """Bytes of the raw rows."""
    meta_bytes: int = field(init=False)
    """Bytes of a block's minima and maxima."""
    block_bytes: int = field(init=False)
    """Bytes of an anchor block."""
    sizes: tuple[int, int] = field(init=False)
    """Bytes of the anchor's and the residual's run when no group is flagged."""

    def __post_init__(self) -> None:
        itemsize = DTYPE_BYTES[self.dtype]
        blocks = (self.rows.tail - self.rows.coded) // BLOCK
        groups = self.dim if self.kind is Kind.K else BLOCK * -(-self.dim // BLOCK)
        raw_bytes = self.raw_rows * self.dim * itemsize
        meta_bytes = 2 * groups * itemsize
        block_bytes = meta_bytes + BLOCK // 8 * self.dim * self.bits.anchor
        residual_bytes = blocks * BLOCK // 8 * self.dim * self.bits.residual
        for name, value in (
            ("itemsize", itemsize),
            ("blocks", blocks),
            ("groups", groups),
            ("raw_bytes", raw_bytes),
            ("meta_bytes", meta_bytes),
            ("block_bytes", block_bytes),
            ("sizes", (raw_bytes + blocks * block_bytes, residual_bytes)),
        ):
            object.__setattr__(self, name, value)

    @property
    def head(self) -> int:
        """Raw rows before the first block."""
        return self.rows.coded - self.rows.start

    @property
    def tail(self) -> int:
        """Raw rows after the last block."""
        return self.rows.stop - self.rows.tail

    @property
    def raw_rows(self) -> int:
        """Rows kept verbatim: before the blocks, sinks, after the blocks; in that order."""
        return self.head + self.sinks + self.tail

    @property
    def flaggable_bytes(self) -> int:
        """Bytes that follow the anchor's blocks if every group is flagged."""
        return max(0, self.blocks * BLOCK - self.sinks) * self.dim * self.itemsize

    def size(self, tier: Tier) -> int:
        """Bytes of the run in ``tier`` when no group is flagged."""
        return self.sizes[tier]


class LayerRuns(NamedTuple):
    """One layer's runs: all have geometry ``run``, one for each of ``heads`` KV heads."""

    layer: int
    heads: int
    run: Run


class Geometry(NamedTuple):
    """All runs of a span, and for each tier where they lie in a segment without flagged groups."""

    runs: tuple[LayerRuns, ...]
    total: int
    sizes: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    edges: tuple[list[int], list[int]]


def geometry(shape: CacheShape, spec: CodecSpec, span: Span) -> Geometry:
    """The runs of every layer of ``span``, in order.

    Raises
    ------
    SpecError
        If ``span`` does not fit ``shape`` or cuts a block.
    """
    if not (0 <= span.first_layer < span.last_layer <= len(shape.layers) and 0 <= span.start <= span.stop):
        raise SpecError(
            f"a span's layers must lie in [0, {len(shape.layers)}) and its positions ascend; got layers "
            f"[{span.first_layer}, {span.last_layer}) positions [{span.start}, {span.stop})"
        )
    return _geometry(shape.dtype, shape.layers[span.first_layer : span.last_layer], spec, span)


@lru_cache(maxsize=4096)
def _geometry(dtype: str, layers: tuple[LayerShape, ...], spec: CodecSpec, span: Span) -> Geometry:
    runs = tuple(
        LayerRuns(layer, held.kv_heads, _run(dtype, held, spec, span, layer))
        for layer, held in enumerate(layers, span.first_layer)
    )
    count = sum(r.heads for r in runs)
    sizes = [[r.run.size(tier) for r in runs for _ in range(r.heads)] for tier in (Tier.ANCHOR, Tier.RESIDUAL)]
    start = count * ENTRY.itemsize
    return Geometry(
        runs,
        count,
        (np.array(sizes[0], np.uint64), np.array(sizes[1], np.uint64)),
        (list(accumulate(sizes[0], initial=start)), list(accumulate(sizes[1], initial=start))),
    )


def _run(dtype: str, held: LayerShape, spec: CodecSpec, span: Span, layer: int) -> Run:
    rows = span.clip(held.rows(spec))
    blocks = rows.tail > rows.coded
    if blocks and (rows.coded % BLOCK or rows.tail % BLOCK):
        raise SpecError(f"a span must start and stop on the grid of {BLOCK}, got [{span.start}, {span.stop})")
    sinks = spec.sinks if blocks and rows.coded == 0 else 0
    return Run(span.kind, dtype, held.dim(span.kind), rows, sinks, spec.bits(layer, span.kind))


def refuse_exact(tier: Tier) -> None:
    """Raise SpecError for the tier the format has room for but no kernel codes yet."""
    if tier is Tier.EXACT:
        raise SpecError("the exact tier is not built yet; use a CodecSpec with exact=False")


def segment_bounds(shape: CacheShape, spec: CodecSpec, segment: Segment) -> tuple[int, int]:
    """Least and most bytes of ``segment``: no group flagged, every group flagged."""
    refuse_exact(segment.tier)
    laid = geometry(shape, spec, segment.span)
    least = laid.edges[segment.tier][-1]
    if segment.tier is Tier.RESIDUAL:
        return least, least
    return least, least + sum(heads * run.flaggable_bytes for _, heads, run in laid.runs)


def directory(data: NDArray[np.uint8], runs: int) -> NDArray[np.void]:
    """The directory at the start of a segment: a structured view of ``data``."""
    return data[: runs * ENTRY.itemsize].view(ENTRY)
