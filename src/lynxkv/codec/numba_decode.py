"""Decoding in Numba: the values of `lynxkv.codec.reference`, a block at a time."""

from typing import Any

import numpy as np

from lynxkv.codec.numba_decode_nibbles import decode_nibbles
from lynxkv.codec.numba_decode_rows import (
    INEXACT,
    add_codes,
    add_nibbles,
    copy_row,
    dequantize_k,
    dequantize_k_exact,
    dequantize_v,
    dequantize_v_exact,
    pair,
    prepare,
    set_codes,
    set_nibbles,
    unpack_planes,
)
from lynxkv.codec.numba_rows import FLAGGED, LANES, kernel


@kernel
def decode_heads(
    out: Any,
    head_stride: int,
    stride: int,
    dim: int,
    per_channel: bool,
    rows: Any,
    bits: Any,
    cells: Any,
    patterns: Any,
    anchor: Any,
    size: int,
    residual: Any,
    fine_size: int,
    flag: int,
    skip: int,
    k: Any,
    flagged: Any,
) -> None:
    """Decode all heads of a layer.

    Parameters
    ----------
    out : array
        Only where it starts counts: row ``t`` of head ``h`` is ``h * head_stride + t * stride`` elements after.
    rows, bits : tuple
        As in `lynxkv.codec.numba_encode.encode_heads`.
    cells, patterns, anchor : flat arrays
        The layer's anchor runs, of ``size`` bytes each, as elements, as their bit patterns and as bytes.
    fine_size : int
        Bytes of a residual run; 0 decodes at the anchor's precision.
    skip : int
        Rows before it are left alone.
    k : uint8 or uint16 ndarray [8 * dim]
        Scratch; uint16 if anchor and residual have more than 8 bits together.
    flagged : int64 ndarray [heads]
        Gets each head's number of flagged elements.
    """
    head, sinks, blocks, tail = rows
    a, r, steps, half = bits
    if not fine_size:
        # Whole coarse steps: a power of two moves from k to the step, which changes no rounding.
        steps >>= r
    direct = a == 4 and (r == 4 or not fine_size) and dim % LANES == 0
    itemsize = cells.itemsize
    groups = dim if per_channel else 64 * ((dim + 63) // 64)
    low, step = np.empty(groups, np.float32), np.empty(groups, np.float32)
    low_pairs, step_pairs = np.empty(dim, np.float32), np.empty(dim, np.float32)
    lows, widths = (low_pairs, step_pairs) if per_channel else (low, step)
    codes, full = np.empty(8 * dim, np.uint8), np.empty(8 * dim, k.dtype)
    status = np.zeros(LANES, np.int32)
    for h in range(len(flagged)):
        own = h * head_stride
        raw = h * size // itemsize
        after = head + 64 * blocks
        for t in range(skip, head + sinks):
            copy_row(cells, raw + t * dim, dim, out, own + t * stride)
        for t in range(max(skip - after, 0), tail):
            copy_row(cells, raw + (head + sinks + t) * dim, dim, out, own + (after + t) * stride)
        at = h * size + (head + sinks + tail) * dim * itemsize
        fine_at = h * fine_size
        for block in range(blocks):
            row = head + 64 * block
            void = sinks if block == 0 else 0
            prepare(cells, at // itemsize, groups, steps, low, step, status)
            high = at // itemsize + groups
            seen = 0
            for lane in range(LANES):
                seen |= status[lane]
                status[lane] = 0
            exact = not seen & INEXACT
            by_pairs = per_channel and exact and dim % 2 == 0
            if by_pairs:
                pair(low, dim, low_pairs)
                pair(step, dim, step_pairs)
            if seen & FLAGGED:
                flagged[h] += flagged_elements(patterns, at // itemsize, groups, dim, per_channel, void, flag)
            at += 2 * groups * itemsize
            begin = max(skip - row, void)
            whole = (begin + 7) // 8 if direct and exact else 8
            if whole < 8:
                decode_nibbles(
                    anchor, at + 4 * dim * whole, residual, fine_at + 4 * dim * whole, fine_size > 0, dim, per_channel,
                    lows, widths, cells, out, own + (row + 8 * whole) * stride, stride, whole * groups // 8, 8 - whole,
                )  # fmt: skip
            for octet in range(begin // 8, whole):
                if a == 4:
                    set_nibbles(anchor, at + 4 * dim * octet, dim, k)
                else:
                    unpack_octet(anchor, at, a, dim, octet, codes)
                    set_codes(codes, 8 * dim, k)
                fine_steps = k
                if fine_size:
                    fine_steps = full
                    if r == 4:
                        add_nibbles(residual, fine_at + 4 * dim * octet, dim, k, full, r, half)
                    else:
                        unpack_octet(residual, fine_at, r, dim, octet, codes)
                        add_codes(codes, 8 * dim, k, full, r, half)
                to = own + (row + 8 * octet) * stride
                first = max(begin - 8 * octet, 0)
                g = octet * groups // 8
                if by_pairs:
                    dequantize_k_exact(
                        fine_steps, first, dim, steps, low_pairs, step_pairs, cells, high, out, to, stride
                    )
                elif per_channel:
                    dequantize_k(fine_steps, first, dim, steps, low, step, cells, high, out, to, stride)
                elif exact:
                    dequantize_v_exact(fine_steps, first, dim, steps, low, step, cells, high, out, to, stride, g)
                else:
                    dequantize_v(fine_steps, first, dim, steps, low, step, cells, high, out, to, stride, g)
            at += 8 * dim * a
            fine_at += 8 * dim * r


@kernel
def unpack_octet(data: Any, at: int, width: int, dim: int, octet: int, codes: Any) -> None:
    """The inverse of `lynxkv.codec.numba_encode.pack_octet`, but for nibbles."""
    if width == 8:
        start = at + 8 * dim * octet
        for i in range(8 * dim):
            codes[i] = data[start + i]
    else:
        for i in range(8 * dim):
            codes[i] = 0
        unpack_planes(data, at + dim * octet, width, dim, codes)


@kernel
def flagged_elements(cells: Any, at: int, groups: int, dim: int, per_channel: bool, sinks: int, flag: int) -> int:
    """Elements of the flagged groups of a block whose metadata is at ``at``."""
    count = 0
    per_token = (dim + 63) // 64
    for g in range(groups):
        if cells[at + g] != flag:
            continue
        if per_channel:
            count += 64 - sinks
        elif g // per_token >= sinks:
            count += min(64, dim - g % per_token * 64)
    return count
