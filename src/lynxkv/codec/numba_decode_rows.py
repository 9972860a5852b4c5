"""The steps of decoding a block, as Numba intrinsics on rows of flat arrays."""
# ruff: noqa: ARG001 - Numba binds the arguments of an intrinsic by name; its typing function need not use them.

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from lynxkv.codec.cells import FLAG
from lynxkv.codec.numba_lanes import (
    F32,
    I8,
    I16,
    I32,
    constant,
    dequantized,
    narrow,
    rounded_bfloat16,
    shaped,
    widen,
)
from lynxkv.codec.numba_rows import CODE_LANES, FLAGGED, INDEX, LANES, Rows, cache_dtype, intrinsic, intrinsic_of

INEXACT = 4
"""In a status: the last step of some group does not come out as its max by itself, but must be set to it."""


@intrinsic
def copy_row(_: Any, cells: Any, at: Any, dim: Any, out: Any, to: Any) -> Any:
    """Copy a row, widened if ``out`` is float32 and the cache is not."""

    def build(rows: Rows) -> None:
        at, dim, to = rows.values[1], rows.values[2], rows.values[4]
        rows.strips(
            dim,
            LANES,
            lambda c, lanes: emit(rows, rows.load(0, rows.plus(at, c), lanes), cells, out, 3, rows.plus(to, c)),
        )

    return intrinsic_of(build, cells, INDEX, INDEX, out, INDEX)


@intrinsic
def prepare(_: Any, cells: Any, at: Any, groups: Any, steps: Any, low: Any, step: Any, status: Any) -> Any:
    """Min and step of a block's groups, whose metadata is at ``at``; FLAGGED, INEXACT join ``status``."""
    dtype = cache_dtype(cells)

    def build(rows: Rows) -> None:
        b = rows.b
        at, groups = rows.values[1], rows.values[2]

        def strip(g: Any, lanes: int) -> None:
            low, high = rows.load(0, rows.plus(at, g), lanes), rows.load(0, rows.plus(at, groups, g), lanes)
            lowest, highest = widen(b, low, dtype), widen(b, high, dtype)
            whole = shaped(low.type, I32)
            steps = b.sitofp(rows.number(3, whole), lowest.type)
            step = b.fdiv(b.fsub(highest, lowest), steps)
            rows.store(lowest, 4, g)
            rows.store(step, 5, g)
            none = constant(whole, 0)
            flagged = b.icmp_signed("==", low, constant(low.type, FLAG[dtype]))
            last = narrow(b, b.fadd(lowest, b.fmul(steps, step)), dtype)
            seen = b.or_(
                b.select(flagged, constant(whole, FLAGGED), none),
                b.select(b.icmp_signed("==", last, high), none, constant(whole, INEXACT)),
            )
            rows.store(b.or_(seen, rows.load(6, rows.plus(0), lanes)), 6, rows.plus(0))

        rows.strips(groups, LANES, strip)

    return intrinsic_of(build, cells, INDEX, INDEX, INDEX, low, step, status)


@intrinsic
def set_nibbles(_: Any, data: Any, at: Any, dim: Any, k: Any) -> Any:
    """The 4-bit codes of 8 rows, the inverse of `pack_nibbles`, to ``k``."""

    def build(rows: Rows) -> None:
        _nibbles(rows, lambda code, to: rows.store(_as(rows, code, 3), 3, to))

    return intrinsic_of(build, data, INDEX, INDEX, k)


@intrinsic
def add_nibbles(_: Any, data: Any, at: Any, dim: Any, k: Any, full: Any, shift: Any, half: Any) -> Any:
    """``(k << shift) + code - half``, modulo its width, of the 4-bit codes of 8 rows to ``full``."""

    def build(rows: Rows) -> None:
        _nibbles(rows, lambda code, to: _add(rows, code, 3, to))

    return intrinsic_of(build, data, INDEX, INDEX, k, full, INDEX, INDEX)


@intrinsic
def unpack_planes(_: Any, data: Any, at: Any, width: Any, dim: Any, codes: Any) -> Any:
    """The inverse of `pack_planes`; ``codes`` are zero before."""

    def build(rows: Rows) -> None:
        b = rows.b
        at, width, dim = rows.values[1:4]

        def plane(p: Any) -> None:
            def strip(c: Any, lanes: int) -> None:
                packed = rows.load(0, rows.plus(at, rows.times(rows.times(p, dim), 8), c), lanes)
                place, to = rows.spread_value(p, packed.type), c
                for token in range(8):
                    own = b.and_(b.lshr(packed, constant(packed.type, token)), constant(packed.type, 1))
                    rows.store(b.or_(rows.load(4, to, lanes), b.shl(own, place)), 4, to)
                    to = rows.plus(to, dim)

            rows.strips(dim, CODE_LANES, strip)

        rows.count(0, width, 1, plane)

    return intrinsic_of(build, data, INDEX, INDEX, INDEX, codes)


@intrinsic
def set_codes(_: Any, codes: Any, size: Any, k: Any) -> Any:
    """Codes to ``k``, which may be wider."""

    def build(rows: Rows) -> None:
        def strip(i: Any, lanes: int) -> None:
            rows.store(_as(rows, rows.load(0, i, lanes), 2), 2, i)

        rows.strips(rows.values[1], CODE_LANES, strip)

    return intrinsic_of(build, codes, INDEX, k)


@intrinsic
def add_codes(_: Any, codes: Any, size: Any, k: Any, full: Any, shift: Any, half: Any) -> Any:
    """``(k << shift) + code - half``, modulo its width, to ``full``."""

    def build(rows: Rows) -> None:
        def strip(i: Any, lanes: int) -> None:
            _add(rows, rows.load(0, i, lanes), 2, i)

        rows.strips(rows.values[1], CODE_LANES, strip)

    return intrinsic_of(build, codes, INDEX, k, full, INDEX, INDEX)


@intrinsic
def pair(_: Any, plain: Any, size: Any, paired: Any) -> Any:
    """The even elements of ``plain`` to the first half of ``paired``, the odd ones to the second; ``size`` is even."""

    def build(rows: Rows) -> None:
        b = rows.b
        size = rows.values[1]
        half = b.sdiv(size, ir.IntType(64)(2))

        def strip(i: Any, lanes: int) -> None:
            both = rows.load_real(0, rows.times(i, 2), 2 * lanes)
            for odd, to in ((0, i), (1, rows.plus(half, i))):
                places = ir.Constant(ir.VectorType(I32, lanes), [2 * lane + odd for lane in range(lanes)])
                rows.store(b.shuffle_vector(both, ir.Constant(both.type, ir.Undefined), places), 2, to)

        rows.strips(half, LANES // 2, strip)

    return intrinsic_of(build, plain, INDEX, paired)


def _dequantize_k(exact: bool) -> Any:
    @intrinsic
    def dequantize(
        _: Any, k: Any, first: Any, dim: Any, steps: Any, low: Any, step: Any, cells: Any, high: Any, out: Any, to: Any,
        stride: Any,
    ) -> Any:  # fmt: skip
        """Values of rows ``[first, 8)`` of fine steps ``k`` whose groups are channels; maxima are ``cells[high …]``."""

        def build(rows: Rows) -> None:
            first, dim, high, to, stride = (rows.values[i] for i in (1, 2, 7, 9, 10))

            def token(t: Any) -> None:
                def strip(c: Any, lanes: int) -> None:
                    at, own = rows.plus(rows.times(t, dim), c), rows.plus(to, rows.times(t, stride), c)
                    if exact and lanes > 1:
                        even = rows.b.sdiv(c, ir.IntType(64)(2))
                        odd = rows.plus(even, rows.b.sdiv(dim, ir.IntType(64)(2)))
                        halves = [
                            (rows.load_real(4, i, lanes // 2), rows.load_real(5, i, lanes // 2)) for i in (even, odd)
                        ]
                        cell = cells_by_pairs(rows.b, rows.load(0, at, lanes), halves, cache_dtype(cells))
                        emit(rows, cell, cells, out, 8, own)
                        return
                    low, step = (_one(rows, i, c, dim) if exact else rows.load_real(i, c, lanes) for i in (4, 5))
                    most = None if exact else rows.load(6, rows.plus(high, c), lanes)
                    emit(rows, _cell(rows, at, low, step, most, cells), cells, out, 8, own)

                rows.strips(dim, 2 * LANES, strip)

            rows.count(first, 8, 1, token)

        return intrinsic_of(build, k, INDEX, INDEX, INDEX, low, step, cells, INDEX, out, INDEX, INDEX)

    return dequantize


def _dequantize_v(exact: bool) -> Any:
    @intrinsic
    def dequantize(
        _: Any, k: Any, first: Any, dim: Any, steps: Any, low: Any, step: Any, cells: Any, high: Any, out: Any, to: Any,
        stride: Any, g: Any,
    ) -> Any:  # fmt: skip
        """Values of rows ``[first, 8)`` of ``k`` whose groups, row 0's at ``g``, are 64 channels of a token."""

        def build(rows: Rows) -> None:
            first, dim, high, to, stride, g = (rows.values[i] for i in (1, 2, 7, 9, 10, 11))
            per_token = rows.b.sdiv(rows.plus(dim, 63), ir.IntType(64)(64))

            def token(t: Any) -> None:
                def part(c: Any, group: Any, lanes: int) -> None:
                    slot = rows.plus(g, rows.times(t, per_token), group)
                    at, own = rows.plus(rows.times(t, dim), c), rows.plus(to, rows.times(t, stride), c)
                    if exact and lanes > 1:
                        half = rows.spread(4, slot, F32, lanes // 2), rows.spread(5, slot, F32, lanes // 2)
                        cell = cells_by_pairs(rows.b, rows.load(0, at, lanes), [half, half], cache_dtype(cells))
                        emit(rows, cell, cells, out, 8, own)
                        return
                    low, step = (rows.spread(i, slot, F32, lanes) for i in (4, 5))
                    most = None if exact else rows.spread(6, rows.plus(high, slot), rows.element(6), lanes)
                    emit(rows, _cell(rows, at, low, step, most, cells), cells, out, 8, own)

                rows.groups(dim, part)

            rows.count(first, 8, 1, token)

        return intrinsic_of(build, k, INDEX, INDEX, INDEX, low, step, cells, INDEX, out, INDEX, INDEX, INDEX)

    return dequantize


dequantize_k, dequantize_k_exact = _dequantize_k(False), _dequantize_k(True)
dequantize_v, dequantize_v_exact = _dequantize_v(False), _dequantize_v(True)


def _cell(rows: Rows, at: Any, low: Any, step: Any, high: Any, cells: Any) -> Any:
    """Cells of the fine steps ``k[at]``; at the last step the group's max, unless that is what comes out anyway."""
    k = rows.load(0, at, low.type.count)
    rounded = narrow(rows.b, dequantized(rows.b, k, low, step), cache_dtype(cells))
    if high is None:
        return rounded
    return rows.b.select(rows.b.icmp_signed("==", k, rows.number(3, k.type)), high, rounded)


def _one(rows: Rows, array: int, c: Any, dim: Any) -> Any:
    """Element ``c`` of what `pair` made of ``dim`` elements."""
    b, two = rows.b, ir.IntType(64)(2)
    index = rows.plus(b.sdiv(c, two), b.mul(b.srem(c, two), b.sdiv(dim, two)))
    return rows.load_real(array, index, 1)


def cells_by_pairs(b: Any, steps: Any, halves: Sequence[tuple[Any, Any]], dtype: str) -> Any:
    """Cells of a vector of fine steps, even and odd ones apart, which spares the shuffles of narrowing.

    ``halves`` are min and step of the even and of the odd ones.
    """
    width, lanes = steps.type.element.width, steps.type.count
    both = b.bitcast(steps, ir.VectorType(ir.IntType(2 * width), lanes // 2))
    wide = ir.VectorType(I32, lanes // 2)
    both = both if both.type == wide else b.zext(both, wide)
    parts = b.and_(both, constant(wide, (1 << width) - 1)), b.lshr(both, constant(wide, width))
    even, odd = (b.fadd(low, b.fmul(b.sitofp(k, low.type), step)) for k, (low, step) in zip(parts, halves, strict=True))
    if dtype == "bfloat16":
        high = b.and_(rounded_bfloat16(b, odd), constant(wide, 0xFFFF0000))
        low = b.lshr(rounded_bfloat16(b, even), constant(wide, 16))
        return b.bitcast(b.or_(low, high), ir.VectorType(I16, lanes))
    order = [lane // 2 + lane % 2 * (lanes // 2) for lane in range(lanes)]
    value = b.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, lanes), order))
    return narrow(b, value, dtype)


def emit(rows: Rows, cell: Any, cells: Any, out: Any, array: int, to: Any) -> None:
    """Store a vector of cells, widened if ``out`` is wider."""
    if cells.dtype != out.dtype:
        cell = rows.b.bitcast(widen(rows.b, cell, cache_dtype(cells)), shaped(cell.type, I32))
    rows.store(cell, array, to)


def _nibbles(rows: Rows, put: Callable[[Any, Any], None]) -> None:
    """``put(codes, place)`` for the codes of bytes ``[4, dim]`` at argument 1, the inverse of `pack_nibbles`."""
    b = rows.b
    at, dim = rows.values[1], rows.values[2]

    def pair(t: Any) -> None:
        even = rows.times(t, rows.times(dim, 2))

        def strip(c: Any, lanes: int) -> None:
            byte = rows.load(0, rows.plus(at, rows.times(t, dim), c), lanes)
            put(b.and_(byte, constant(byte.type, 15)), rows.plus(even, c))
            put(b.lshr(byte, constant(byte.type, 4)), rows.plus(even, dim, c))

        rows.strips(dim, CODE_LANES, strip)

    rows.count(0, 4, 1, pair)


def _as(rows: Rows, code: Any, array: int) -> Any:
    """Codes as wide as the elements of an array."""
    element = rows.element(array)
    return code if element == I8 else rows.b.zext(code, shaped(code.type, element))


def _add(rows: Rows, code: Any, k: int, to: Any) -> None:
    """Join codes to the arguments from ``k`` on: coarse codes, where to, shift, half."""
    b = rows.b
    wide = _as(rows, code, k)
    coarse = b.shl(rows.load(k, to, code.type.count), rows.number(k + 2, wide.type))
    rows.store(b.add(coarse, b.sub(wide, rows.number(k + 3, wide.type))), k + 1, to)
