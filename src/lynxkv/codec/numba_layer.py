"""The codec in Numba: prepares flat arrays for the compiled loops. One CPU thread, without the GIL."""

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from lynxkv.codec import numba_decode, numba_encode
from lynxkv.codec.cells import FLAG
from lynxkv.codec.layout import Run
from lynxkv.codec.numba_rows import FLAGGED, INFINITY, LANES, NOT_FINITE
from lynxkv.codec.spec import Kind, Tier

# Inside kernels the element's type says what it is; see numba_lanes.
_LANE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
    "float32": np.dtype(np.float32),
}
_NOTHING = np.empty(0, np.uint8)


def encode_layer(
    run: Run, values: NDArray[Any], anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None
) -> tuple[bool, bool]:
    """`lynxkv.codec.reference.encode_layer`, the same bytes."""
    src, origin, head_stride, stride = _flat(values.view(_LANE[run.dtype]), writeable=False)
    fine = _NOTHING if residual is None else residual.reshape(-1)
    integer = np.int32 if run.itemsize == 4 else np.int16
    limits = np.iinfo(integer)
    keys, raw_keys = np.empty((2, run.groups), integer), np.empty((2, LANES), integer)
    status = np.zeros(LANES, np.int32)
    coarse = anchor.reshape(-1)
    numba_encode.encode_heads(
        src,
        origin,
        head_stride,
        stride,
        values.shape[0],
        run.dim,
        run.kind is Kind.K,
        (run.head, run.sinks, run.blocks, run.tail),
        _bits(run),
        coarse.view(_LANE[run.dtype]),
        coarse,
        run.size(Tier.ANCHOR),
        fine,
        run.size(Tier.RESIDUAL),
        keys,
        raw_keys,
        (limits.max, limits.min),
        _fine_steps(run),
        status,
    )
    infinity = INFINITY[run.dtype]
    seen = int(np.bitwise_or.reduce(status))
    low, high = int(raw_keys[0].min()), int(raw_keys[1].max())
    finite = not seen & NOT_FINITE and (run.raw_rows == 0 or (low >= -infinity and high < infinity))
    return finite, bool(seen & FLAGGED)


def decode_layer(
    run: Run, anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None, out: NDArray[Any], skip: int
) -> NDArray[np.int64]:
    """`lynxkv.codec.reference.decode_layer`, the same values."""
    lane = _LANE[run.dtype] if out.itemsize == run.itemsize else np.dtype(np.float32)
    dst, origin, head_stride, stride = _flat(out.view(lane), writeable=True)
    coarse = anchor.reshape(-1)
    if coarse.ctypes.data % run.itemsize:
        coarse = coarse.copy()
    fine = _NOTHING if residual is None else residual.reshape(-1)
    coarse = coarse.view()
    fine = fine.view()
    coarse.flags.writeable = fine.flags.writeable = False
    flagged = np.zeros(out.shape[0], np.int64)
    numba_decode.decode_heads(
        dst,
        origin,
        head_stride,
        stride,
        run.dim,
        run.kind is Kind.K,
        (run.head, run.sinks, run.blocks, run.tail),
        _bits(run),
        coarse.view(_LANE[run.dtype]),
        coarse.view(np.uint32 if run.itemsize == 4 else np.uint16),
        coarse,
        run.size(Tier.ANCHOR),
        fine,
        run.size(Tier.RESIDUAL) if residual is not None else 0,
        run.groups,
        FLAG[run.dtype],
        skip,
        _fine_steps(run),
        flagged,
    )
    return flagged


def _bits(run: Run) -> tuple[int, int, int, int]:
    bits = run.bits
    return bits.anchor, bits.residual, bits.steps, (1 << bits.residual) >> 1


def _fine_steps(run: Run) -> NDArray[Any]:
    """Scratch for 8 rows of fine steps, in the least type that holds them."""
    return np.empty(8 * run.dim, np.uint8 if run.bits.anchor + run.bits.residual <= 8 else np.uint16)


def _flat(array: NDArray[Any], *, writeable: bool) -> tuple[NDArray[Any], int, int, int]:
    """``[heads, rows, dim]`` as a flat array over all its memory, where the first element is, and two strides."""
    heads, rows, _ = (stride // array.itemsize for stride in array.strides)
    reach = [(n - 1) * stride for n, stride in zip(array.shape, (heads, rows, 1), strict=True)]
    origin = -sum(min(r, 0) for r in reach)
    lowest = array[tuple(slice(-1, None) if r < 0 else slice(0, 1) for r in reach)]
    flat = as_strided(lowest, (sum(abs(r) for r in reach) + 1,), (array.itemsize,), writeable=writeable)
    return flat, origin, heads, rows
