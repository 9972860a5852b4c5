"""KV tensors to segments: anchor and residual in one pass."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec.cells import CELL, is_finite
from lynxkv.codec.flagged import flagged_cells
from lynxkv.codec.kernels import kernels_named
from lynxkv.codec.layout import ENTRY, Geometry, LayerRuns, geometry, refuse_exact
from lynxkv.codec.plan import Span
from lynxkv.codec.segment import as_bytes, write_directory
from lynxkv.codec.shape import CacheShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import NotFinite, SpecError


def encode(
    shape: CacheShape,
    spec: CodecSpec,
    span: Span,
    arrays: Sequence[NDArray[Any]],
    *,
    out: Mapping[Tier, Any] | None = None,
    kernels: str | None = None,
) -> dict[Tier, NDArray[np.uint8]]:
    """Encode one span into the segments of its tiers.

    Parameters
    ----------
    arrays : sequence of ndarray [kv_heads, rows, dim]
        For every layer of the span, the rows it holds there; uint16 bit patterns for bfloat16, float16 or float32.
        The last axis is contiguous, the others may have any strides.
    out : mapping of Tier to writable buffer, optional
        Where to write a tier: at least the least bytes of its `segment_bounds`, 8-byte aligned. The result is then
        a part of it, unless a group is flagged.
    kernels : {"numba", "reference"}, optional
        Which implementation; both give the same bytes.

    Returns
    -------
    dict of Tier to uint8 ndarray
        The segments; a tier of which the span has no bytes is absent.

    Raises
    ------
    NotFinite
        On NaN or infinity, naming layer, kind, head and absolute token.
    SpecError
        If arrays do not fit shape and span, or ``spec.exact`` is set.
    """
    if spec.exact:
        refuse_exact(Tier.EXACT)
    laid = geometry(shape, spec, span)
    runs = laid.runs
    check_arrays(runs, arrays, CELL[shape.dtype])
    tiers = {
        tier: _buffer(tier, laid, out)
        for tier in (Tier.ANCHOR, Tier.RESIDUAL)
        if laid.edges[tier][0] < laid.edges[tier][-1]
    }
    implementation = kernels_named(kernels)
    at = dict.fromkeys(tiers, laid.total * ENTRY.itemsize)
    flagged: list[bool] = []
    for (layer, heads, run), values in zip(runs, arrays, strict=True):
        views: dict[Tier, NDArray[np.uint8]] = {}
        for tier, data in tiers.items():
            size = run.size(tier)
            if size:
                views[tier] = data[at[tier] : at[tier] + heads * size].reshape(heads, size)
                at[tier] += heads * size
        flagged.append(False)
        if views:
            finite, flagged[-1] = implementation.encode_layer(run, values, views[Tier.ANCHOR], views.get(Tier.RESIDUAL))
            if not finite:
                _raise_not_finite(layer, run.kind.name, run.rows.start, values, shape.dtype)
    for tier, data in tiers.items():
        sizes = None
        if tier is Tier.ANCHOR and any(flagged):
            tiers[tier], sizes = _with_flagged(laid, flagged, data, arrays)
        write_directory(tier, laid, tiers[tier], sizes)
    return tiers


def check_arrays(runs: Sequence[LayerRuns], arrays: Sequence[NDArray[Any]], *dtypes: np.dtype[Any]) -> None:
    """Raise SpecError unless ``arrays`` are the rows of ``runs`` in one of ``dtypes``."""
    if len(arrays) != len(runs):
        raise SpecError(f"one array a layer expected, {len(runs)} in all; got {len(arrays)}")
    for (layer, heads, run), array in zip(runs, arrays, strict=True):
        expected = (heads, run.rows.stop - run.rows.start, run.dim)
        if array.shape != expected or array.dtype not in dtypes:
            raise SpecError(
                f"{run.kind.name} of layer {layer}: {' or '.join(map(str, dtypes))} {list(expected)} expected, "
                f"got {array.dtype} {list(array.shape)}"
            )
        if array.size and (array.strides[2] != array.itemsize or not array.flags.aligned):
            raise SpecError(f"{run.kind.name} of layer {layer}: the last axis must be contiguous and aligned")
        if array.size and any(stride % array.itemsize for stride in array.strides):
            raise SpecError(f"{run.kind.name} of layer {layer}: strides must be whole elements, got {array.strides}")


def _buffer(tier: Tier, laid: Geometry, out: Mapping[Tier, Any] | None) -> NDArray[np.uint8]:
    size = laid.edges[tier][-1]
    if out is None or tier not in out:
        return np.empty(size, np.uint8)
    given = as_bytes(out[tier])
    if len(given) < size or not given.flags.writeable or given.ctypes.data % 8:
        raise SpecError(
            f"out for the {tier.name.lower()}: {size} writable bytes, aligned to 8, expected; got {len(given)}"
        )
    return given[:size]


def _with_flagged(
    laid: Geometry, flagged: list[bool], data: NDArray[np.uint8], arrays: Sequence[NDArray[Any]]
) -> tuple[NDArray[np.uint8], list[int]]:
    """The anchor again, with the raw values of flagged groups after their runs; rare, so it may copy."""
    start = laid.total * ENTRY.itemsize
    parts, sizes = [data[:start]], []
    for (_, heads, run), has, values in zip(laid.runs, flagged, arrays, strict=True):
        for head in range(heads):
            own = data[start : start + run.size(Tier.ANCHOR)]
            start += len(own)
            extra = flagged_cells(run, own, values[head]) if has else own[:0]
            parts += [own, extra]
            sizes.append(len(own) + len(extra))
    return np.concatenate(parts), sizes


def _raise_not_finite(layer: int, kind: str, start: int, values: NDArray[Any], dtype: str) -> None:
    for head, cells in enumerate(values):
        bad = ~is_finite(cells, dtype).all(axis=1)
        if bad.any():
            token = int(bad.argmax())
            raise NotFinite(
                f"{kind} of layer {layer} head {head} token {start + token}: finite values expected, got NaN or "
                "infinity; the model overflowed its dtype here, so this KV must not be sent"
            )
    raise AssertionError("a kernel reported a value that is not finite, but all are")
