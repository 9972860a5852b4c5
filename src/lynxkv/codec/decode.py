"""Segments back to KV tensors, at anchor precision or with the residual."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec.cells import CELL
from lynxkv.codec.encode import check_arrays
from lynxkv.codec.flagged import restore_flagged
from lynxkv.codec.kernels import Kernels, kernels_named
from lynxkv.codec.layout import LayerRuns, geometry
from lynxkv.codec.plan import Span
from lynxkv.codec.segment import as_bytes, locate, name
from lynxkv.codec.shape import CacheShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import CorruptData, SpecError


def decode(
    shape: CacheShape,
    spec: CodecSpec,
    span: Span,
    anchor: Any,
    residual: Any,
    out: Sequence[NDArray[Any]],
    *,
    first: int = 0,
    kernels: str | None = None,
) -> None:
    """Decode one span's segments into ``out``.

    Sizes are verified, so corrupt bytes never reach outside the buffers; whether they are the producer's is for
    `check` to say.

    Parameters
    ----------
    anchor : buffer
        The anchor segment.
    residual : buffer or None
        The residual segment; None decodes at the anchor's precision.
    out : sequence of writable ndarray [kv_heads, rows, dim]
        For every layer of the span, the rows it holds there: in the cache's dtype, or float32, which then holds
        the value rounded to the cache's dtype. The last axis is contiguous, the others may have any strides.
    first : int
        Rows at absolute positions before it are left alone.
    kernels : {"numba", "reference"}, optional
        Which implementation; both give the same values.

    Raises
    ------
    CorruptData
        If the bytes cannot be segments of this span.
    SpecError
        If ``out`` does not fit shape and span.
    """
    laid = geometry(shape, spec, span)
    runs = laid.runs
    check_arrays(runs, out, CELL[shape.dtype], CELL["float32"])
    if not all(array.flags.writeable for array in out):
        raise SpecError("out must be writable, got a read-only array")
    coarse = as_bytes(anchor)
    coarse_edges = locate(Tier.ANCHOR, laid, coarse)
    fine = None if residual is None else as_bytes(residual)
    fine_edges = [] if fine is None else locate(Tier.RESIDUAL, laid, fine)
    implementation = kernels_named(kernels)
    at = 0
    for layer_run, array in zip(runs, out, strict=True):
        skip = min(max(first - layer_run.run.rows.start, 0), array.shape[1])
        if array.size and skip < array.shape[1]:
            fine_part = None if fine is None or not layer_run.run.size(Tier.RESIDUAL) else fine[fine_edges[at] :]
            _decode_layer(implementation, layer_run, coarse, coarse_edges[at:], fine_part, array, skip)
        at += layer_run.heads


def _decode_layer(
    kernels: Kernels,
    layer_run: LayerRuns,
    coarse: NDArray[np.uint8],
    edges: list[int],
    fine: NDArray[np.uint8] | None,
    out: NDArray[Any],
    skip: int,
) -> None:
    """Decode a layer whose anchor runs lie between ``edges`` and whose residual runs are at the start of ``fine``."""
    layer, heads, run = layer_run
    size, fine_size = run.size(Tier.ANCHOR), run.size(Tier.RESIDUAL)
    # All heads in one call if their runs are equally long, else one by one.
    step = heads if edges[heads] - edges[0] == heads * size else 1
    for head in range(0, heads, step):
        own = coarse[edges[head] : edges[head] + step * size].reshape(step, size)
        own_fine = None
        if fine is not None:
            own_fine = fine[head * fine_size : (head + step) * fine_size].reshape(step, fine_size)
        flagged = kernels.decode_layer(run, own, own_fine, out[head : head + step], skip)
        if step == heads and not flagged.any():
            return
        for i, count in enumerate(flagged.tolist(), head):
            extra = edges[i + 1] - edges[i] - size
            if count * run.itemsize != extra:
                raise CorruptData(
                    f"{name(Tier.ANCHOR, run, layer, i)}: {count * run.itemsize} bytes of flagged groups expected, "
                    f"got {extra}; ask for the segment again"
                )
            if count:
                restore_flagged(run, coarse[edges[i] : edges[i + 1]], out[i], skip)
