"""Encoding in Numba: the bytes of `lynxkv.codec.reference`, in one pass over the cache, a block at a time."""

from typing import Any

import numpy as np

from lynxkv.codec.numba_encode_rows import (
    copy_and_bound,
    extremes_k,
    extremes_v,
    fill,
    judge,
    pack_both,
    pack_nibbles,
    pack_planes,
    quantize_k,
    quantize_v,
    settle,
    split,
)
from lynxkv.codec.numba_rows import LANES, kernel


@kernel
def encode_heads(
    src: Any,
    head_stride: int,
    stride: int,
    heads: int,
    dim: int,
    per_channel: bool,
    rows: Any,
    bits: Any,
    cells: Any,
    anchor: Any,
    size: int,
    residual: Any,
    fine_size: int,
    k: Any,
) -> int:
    """Encode all heads of a layer.

    Parameters
    ----------
    src : array
        Only where it starts counts: row ``t`` of head ``h`` is ``h * head_stride + t * stride`` elements after.
    rows : tuple
        Raw rows before the blocks, sinks, blocks, raw rows after.
    bits : tuple
        Anchor bits, residual bits, steps, half a coarse step.
    cells, anchor : flat arrays
        The layer's anchor runs, of ``size`` bytes each, as elements and as bytes.
    k : uint8 or uint16 ndarray [8 * dim]
        Scratch; uint16 if anchor and residual have more than 8 bits together.

    Returns
    -------
    int
        NOT_FINITE and FLAGGED, if any element or group is.
    """
    head, sinks, blocks, tail = rows
    a, r, steps, half = bits
    itemsize = cells.itemsize
    groups = dim if per_channel else 64 * ((dim + 63) // 64)
    low, high = np.empty(groups, cells.dtype), np.empty(groups, cells.dtype)
    low_raw, high_raw = np.empty(LANES, cells.dtype), np.empty(LANES, cells.dtype)
    base, step, less = np.empty(groups, np.float32), np.empty(groups, np.float32), np.empty(groups, np.int32)
    coarse, fine = np.empty(8 * dim, np.uint8), np.empty(8 * dim, np.uint8)
    status = np.zeros(LANES, np.int32)
    greatest = (1 << (8 * itemsize - 1)) - 1
    fill(low_raw, 0, LANES, greatest)
    fill(high_raw, 0, LANES, -greatest - 1)
    for h in range(heads):
        at = h * head_stride
        to = h * size // itemsize
        for t in range(head + sinks):
            copy_and_bound(src, at + t * stride, dim, cells, to, low_raw, high_raw)
            to += dim
        for t in range(tail):
            copy_and_bound(src, at + (head + 64 * blocks + t) * stride, dim, cells, to, low_raw, high_raw)
            to += dim
        at += head * stride
        to *= itemsize
        fine_to = h * fine_size
        for block in range(blocks):
            void = sinks if block == 0 else 0
            fill(low, 0, groups, greatest)
            fill(high, 0, groups, -greatest - 1)
            empty = 0
            if per_channel:
                extremes_k(src, at, stride, dim, void, low, high)
                empty = groups if void == 64 else 0
            else:
                per_token = groups // 64
                for t in range(void, 64):
                    extremes_v(src, at + t * stride, dim, low, high, t * per_token)
                empty = void * per_token
            if empty:
                fill(low, 0, empty, 0)
                fill(high, 0, empty, 0)
            settle(low, high, groups, steps, half, cells, to // itemsize, base, step, less, status)
            to += 2 * groups * itemsize
            for octet in range(8):
                row = at + 8 * octet * stride
                if per_channel:
                    quantize_k(src, row, stride, dim, base, step, less, k)
                else:
                    quantize_v(src, row, stride, dim, base, step, less, k, octet * groups // 8)
                for i in range(min(void - 8 * octet, 8) * dim):
                    k[i] = 0
                if a == 4 and r == 4:
                    pack_both(k, dim, anchor, to + 4 * dim * octet, residual, fine_to + 4 * dim * octet)
                    continue
                split(k, 8 * dim, r, coarse, fine)
                pack_octet(coarse, a, dim, anchor, to, octet)
                if r:
                    pack_octet(fine, r, dim, residual, fine_to, octet)
            to += 8 * dim * a
            fine_to += 8 * dim * r
            at += 64 * stride
    judge(low_raw, high_raw, status)
    seen = 0
    for lane in range(LANES):
        seen |= status[lane]
    return seen


@kernel
def pack_octet(codes: Any, width: int, dim: int, out: Any, to: int, octet: int) -> None:
    """Codes ``[8, dim]`` of tokens ``8 * octet …`` to their bytes of a block at ``to``; see `reference.pack`."""
    if width == 4:
        pack_nibbles(codes, dim, out, to + 4 * dim * octet)
    elif width == 8:
        at = to + 8 * dim * octet
        for i in range(8 * dim):
            out[at + i] = codes[i]
    else:
        pack_planes(codes, width, dim, out, to + dim * octet)
