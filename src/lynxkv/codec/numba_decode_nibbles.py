"""Decoding 4-bit codes, the usual case: straight from bytes to values, with nothing stored in between."""
# ruff: noqa: ARG001 - Numba binds the arguments of an intrinsic by name; its typing function need not use them.

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from lynxkv.codec.numba_decode_rows import cells_by_pairs, emit
from lynxkv.codec.numba_lanes import (
    F32,
    I8,
    I16,
    I32,
    TABLE_INSTRUCTION,
    constant,
    dequantized,
    looked_up,
    narrow,
)
from lynxkv.codec.numba_rows import GROUP, INDEX, LANES, Rows, cache_dtype, intrinsic, intrinsic_of


@intrinsic
def decode_nibbles(
    _: Any, anchor: Any, at: Any, residual: Any, fine_at: Any, both: Any, dim: Any, per_channel: Any, low: Any,
    step: Any, cells: Any, out: Any, to: Any, stride: Any, g: Any, octets: Any,
) -> Any:  # fmt: skip
    """Values of ``8 * octets`` rows straight from 4-bit codes, with ``both`` from 4 bits of the residual too.

    ``dim`` is a multiple of 16; no group's last step needs its max. Groups are channels, as `pair` made them, or
    64 channels of a token, row 0's at ``g``.
    """

    def build(rows: Rows) -> None:
        b = rows.b
        for_k, with_fine = (b.trunc(rows.values[i], ir.IntType(1)) for i in (6, 4))
        with b.if_else(for_k) as branches:
            for branch, decode in zip(branches, (_k_rows, _v_rows), strict=True):
                with branch, b.if_else(with_fine) as (fine, coarse):
                    with fine:
                        decode(rows, cells, out, True)
                    with coarse:
                        decode(rows, cells, out, False)

    numbers = (INDEX,) * 4
    return intrinsic_of(
        build, anchor, INDEX, residual, INDEX, both, INDEX, per_channel, low, step, cells, out, *numbers
    )


def _k_rows(rows: Rows, cells: Any, out: Any, both: bool) -> None:
    """Groups are channels. Rows go out in order: stores that jump between rows cost more than reading groups again."""
    b, dim, octets = rows.b, rows.values[5], rows.values[14]
    half = b.sdiv(dim, ir.IntType(64)(2))

    def two(pair: Any) -> None:
        def strip(c: Any) -> None:
            even = b.sdiv(c, ir.IntType(64)(2))
            places = (even, rows.plus(half, even))
            groups = [tuple(rows.load_real(i, place, LANES // 2) for i in (7, 8)) for place in places]
            _two_rows(rows, cells, out, both, c, pair, (groups, groups))

        rows.count(0, dim, LANES, strip)

    rows.count(0, rows.times(octets, 4), 1, two)


def _v_rows(rows: Rows, cells: Any, out: Any, both: bool) -> None:
    """Groups are 64 channels of a token."""
    b, dim, first, octets = rows.b, rows.values[5], rows.values[13], rows.values[14]
    wholes, per_token = (b.sdiv(rows.plus(dim, more), ir.IntType(64)(GROUP)) for more in (0, GROUP - 1))
    by_table = not both and cells.dtype.bitwidth == 16 and TABLE_INSTRUCTION is not None

    def two(pair: Any) -> None:
        def part(group: Any, channels: list[Any]) -> None:
            slots = [rows.plus(first, rows.times(per_token, rows.plus(pair, pair, odd)), group) for odd in (0, 1)]
            if by_table:
                tables = [_table(rows, slot, cells) for slot in slots]
                for c in channels:
                    _two_rows_by_table(rows, cells, out, c, pair, tables)
                return
            groups = [[tuple(rows.spread(i, slot, F32, LANES // 2) for i in (7, 8))] * 2 for slot in slots]
            for c in channels:
                _two_rows(rows, cells, out, both, c, pair, groups)

        def whole(group: Any) -> None:
            start = rows.times(group, GROUP)
            part(group, [rows.plus(start, c) for c in range(0, GROUP, LANES)])

        rows.count(0, wholes, 1, whole)
        rows.count(rows.times(wholes, GROUP), dim, LANES, lambda c: part(wholes, [c]))

    rows.count(0, rows.times(octets, 4), 1, two)


def _table(rows: Rows, slot: Any, cells: Any) -> tuple[Any, Any]:
    """The 16 cells that a group can have: their low bytes, their high bytes."""
    b = rows.b
    low, step = (rows.spread(i, slot, F32, LANES) for i in (7, 8))
    steps = ir.Constant(ir.VectorType(I8, LANES), list(range(LANES)))
    made = narrow(b, dequantized(b, steps, low, step), cache_dtype(cells))
    return b.trunc(made, steps.type), b.trunc(b.lshr(made, constant(made.type, 8)), steps.type)


def _two_rows_by_table(rows: Rows, cells: Any, out: Any, c: Any, pair: Any, tables: list[tuple[Any, Any]]) -> None:
    """As `_two_rows`, of the anchor alone."""
    b = rows.b
    coarse = rows.load(0, rows.plus(rows.values[1], rows.times(rows.values[5], pair), c), LANES)
    codes = b.and_(coarse, constant(coarse.type, 15)), b.lshr(coarse, constant(coarse.type, 4))
    in_turn = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 + i % 2 * LANES for i in range(2 * LANES)])
    for odd in (0, 1):
        low, high = (looked_up(b, table, codes[odd]) for table in tables[odd])
        cell = b.bitcast(b.shuffle_vector(low, high, in_turn), ir.VectorType(I16, LANES))
        to = rows.plus(rows.values[11], rows.times(rows.values[12], rows.plus(pair, pair, odd)), c)
        emit(rows, cell, cells, out, 10, to)


def _two_rows(rows: Rows, cells: Any, out: Any, both: bool, c: Any, pair: Any, groups: Any) -> None:
    """Channels ``[c, c + 16)`` of rows ``2 * pair`` and the next, which share bytes.

    ``groups``: for each row min and step of the even and of the odd channels.
    """
    b, dim = rows.b, rows.values[5]
    place = rows.plus(rows.times(dim, pair), c)
    coarse = rows.load(0, rows.plus(rows.values[1], place), LANES)
    low_bits, shift = constant(coarse.type, 15), constant(coarse.type, 4)
    steps = [b.and_(coarse, low_bits), b.lshr(coarse, shift)]
    if both:
        fine = rows.load(2, rows.plus(rows.values[3], place), LANES)
        joined = (
            b.or_(b.shl(coarse, shift), b.and_(fine, low_bits)),
            b.or_(b.and_(coarse, constant(coarse.type, 240)), b.lshr(fine, shift)),
        )
        steps = [b.sub(code, constant(coarse.type, 8)) for code in joined]
    for odd in (0, 1):
        cell = cells_by_pairs(b, steps[odd], groups[odd], cache_dtype(cells))
        to = rows.plus(rows.values[11], rows.times(rows.values[12], rows.plus(pair, pair, odd)), c)
        emit(rows, cell, cells, out, 10, to)
