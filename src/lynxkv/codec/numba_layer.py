"""The codec in Numba: hands arrays to the compiled loops. One CPU thread, without the GIL."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec import numba_decode, numba_encode
from lynxkv.codec.cells import FLAG
from lynxkv.codec.layout import Run
from lynxkv.codec.numba_rows import FLAGGED, NOT_FINITE
from lynxkv.codec.spec import Kind

# Inside kernels the element's type says what it is; see numba_rows.
_LANE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
    "float32": np.dtype(np.float32),
}
_PATTERN: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_NOTHING = np.empty(0, np.uint8)


def encode_layer(
    run: Run, values: NDArray[Any], anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None
) -> tuple[bool, bool]:
    """`lynxkv.codec.reference.encode_layer`, the same bytes."""
    lane, itemsize = _LANE[run.dtype], run.itemsize
    src = values[0, 0].view(lane)
    src.flags.writeable = False
    coarse = anchor.reshape(-1)
    status = numba_encode.encode_heads(
        src,
        values.strides[0] // itemsize,
        values.strides[1] // itemsize,
        values.shape[0],
        run.dim,
        run.kind is Kind.K,
        (run.head, run.sinks, run.blocks, run.tail),
        _bits(run),
        coarse.view(lane),
        coarse,
        run.sizes[0],
        _NOTHING if residual is None else residual.reshape(-1),
        run.sizes[1],
        _fine_steps(run),
    )
    return not status & NOT_FINITE, bool(status & FLAGGED)


def decode_layer(
    run: Run, anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None, out: NDArray[Any], skip: int
) -> NDArray[np.int64]:
    """`lynxkv.codec.reference.decode_layer`, the same values."""
    lane, itemsize = _LANE[run.dtype], out.itemsize
    dst = out[0, 0].view(lane if itemsize == run.itemsize else np.float32)
    coarse = anchor.reshape(-1)
    if coarse.ctypes.data % run.itemsize:
        coarse = coarse.copy()
    coarse.flags.writeable = False
    fine = (_NOTHING if residual is None else residual).reshape(-1)
    fine.flags.writeable = False
    flagged = np.zeros(out.shape[0], np.int64)
    numba_decode.decode_heads(
        dst,
        out.strides[0] // itemsize,
        out.strides[1] // itemsize,
        run.dim,
        run.kind is Kind.K,
        (run.head, run.sinks, run.blocks, run.tail),
        _bits(run),
        coarse.view(lane),
        coarse.view(_PATTERN[run.itemsize]),
        coarse,
        run.sizes[0],
        fine,
        0 if residual is None else run.sizes[1],
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
