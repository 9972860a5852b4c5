"""The steps of encoding a block, as Numba intrinsics on rows of flat arrays."""
# ruff: noqa: ARG001 - Numba binds the arguments of an intrinsic by name; its typing function need not use them.

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from lynxkv.codec.cells import FLAG
from lynxkv.codec.numba_lanes import (
    F32,
    I8,
    I32,
    MAGIC_BITS,
    TINY,
    constant,
    least,
    most,
    order,
    quantized,
    shaped,
    widen,
)
from lynxkv.codec.numba_rows import (
    CODE_LANES,
    FLAGGED,
    INDEX,
    INFINITY,
    LANES,
    NOT_FINITE,
    Rows,
    cache_dtype,
    intrinsic,
    intrinsic_of,
)


@intrinsic
def fill(_: Any, array: Any, first: Any, stop: Any, value: Any) -> Any:
    """The integer ``value`` as the bits of elements ``[first, stop)``."""

    def build(rows: Rows) -> None:
        first, stop = rows.values[1], rows.values[2]

        def strip(i: Any, lanes: int) -> None:
            rows.store(rows.number(3, ir.VectorType(rows.element(0), lanes)), 0, rows.plus(first, i))

        rows.strips(rows.b.sub(stop, first), LANES, strip)

    return intrinsic_of(build, array, INDEX, INDEX, INDEX)


@intrinsic
def judge(_: Any, low: Any, high: Any, status: Any) -> Any:
    """NOT_FINITE joins the lanes of ``status`` where order keys ``low`` or ``high`` are those of no finite number."""
    dtype = cache_dtype(low)

    def build(rows: Rows) -> None:
        b, zero = rows.b, rows.plus(0)
        bad = _not_finite(rows, rows.load(0, zero, LANES), rows.load(1, zero, LANES), dtype)
        whole = ir.VectorType(I32, LANES)
        seen = b.select(bad, constant(whole, NOT_FINITE), constant(whole, 0))
        rows.store(b.or_(seen, rows.load(2, zero, LANES)), 2, zero)

    return intrinsic_of(build, low, high, status)


@intrinsic
def copy_and_bound(_: Any, src: Any, at: Any, dim: Any, cells: Any, to: Any, low: Any, high: Any) -> Any:
    """Copy a row verbatim; order keys of its least and greatest elements join the lanes of ``low`` and ``high``."""

    def build(rows: Rows) -> None:
        at, dim, to = (rows.values[i] for i in (1, 2, 4))
        zero = rows.plus(0)

        def strip(c: Any, lanes: int) -> None:
            cell = rows.load(0, rows.plus(at, c), lanes)
            rows.store(cell, 3, rows.plus(to, c))
            for array, pick in ((5, least), (6, most)):
                rows.store(pick(rows.b, rows.load(array, zero, lanes), order(rows.b, cell)), array, zero)

        rows.strips(dim, LANES, strip)

    return intrinsic_of(build, src, INDEX, INDEX, cells, INDEX, low, high)


@intrinsic
def extremes_k(_: Any, src: Any, at: Any, stride: Any, dim: Any, first: Any, low: Any, high: Any) -> Any:
    """Each channel's order keys of min and max over rows ``[first, 64)`` join those in ``low`` and ``high``."""

    def build(rows: Rows) -> None:
        b = rows.b
        at, stride, dim, first = rows.values[1:5]

        def take(t: Any, count: int) -> None:
            def strip(c: Any, lanes: int) -> None:
                start = rows.plus(at, rows.times(t, stride), c)
                keys = []
                for _ in range(count):
                    keys.append(order(b, rows.load(0, start, lanes)))
                    start = rows.plus(start, stride)
                for array, pick in ((5, least), (6, most)):
                    edge = rows.load(array, c, lanes)
                    for key in keys:
                        edge = pick(b, edge, key)
                    rows.store(edge, array, c)

            rows.strips(dim, LANES, strip)

        # Up to a multiple of 8 row by row, then 8 rows at once.
        even = b.and_(rows.plus(first, 7), ir.IntType(64)(-8))
        rows.count(first, even, 1, lambda t: take(t, 1))
        rows.count(even, 64, 8, lambda t: take(t, 8))

    return intrinsic_of(build, src, INDEX, INDEX, INDEX, INDEX, low, high)


@intrinsic
def extremes_v(_: Any, src: Any, at: Any, dim: Any, low: Any, high: Any, g: Any) -> Any:
    """Order keys of min and max of each 64 channels of a row join ``low[g …]`` and ``high[g …]``."""

    def build(rows: Rows) -> None:
        b = rows.b
        at, dim, g = (rows.values[i] for i in (1, 2, 5))

        def part(c: Any, group: Any, lanes: int) -> None:
            key = order(b, rows.load(0, rows.plus(at, c), lanes))
            slot = rows.plus(g, group)
            for array, pick, name in ((3, least, "smin"), (4, most, "smax")):
                element = key.type.element
                reduce = b.module.declare_intrinsic(
                    f"llvm.vector.reduce.{name}.v{lanes}i{element.width}", (), ir.FunctionType(element, [key.type])
                )
                edge = b.insert_element(
                    ir.Constant(ir.VectorType(element, 1), ir.Undefined), b.call(reduce, [key]), I32(0)
                )
                rows.store(pick(b, rows.load(array, slot, 1), edge), array, slot)

        rows.groups(dim, part)

    return intrinsic_of(build, src, INDEX, INDEX, low, high, INDEX)


@intrinsic
def settle(
    _: Any, low: Any, high: Any, groups: Any, steps: Any, half: Any, cells: Any, to: Any, base: Any, step: Any,
    less: Any, status: Any,
) -> Any:  # fmt: skip
    """Write a block's metadata, and what `quantize_k` and `quantize_v` need of each group.

    Their codes come out as 0 in a flagged group and as the last step in a constant one. NOT_FINITE and FLAGGED join
    the lanes of ``status``.
    """
    dtype = cache_dtype(cells)

    def build(rows: Rows) -> None:
        b = rows.b
        groups, to = rows.values[2], rows.values[6]

        def strip(g: Any, lanes: int) -> None:
            low_key, high_key = rows.load(0, g, lanes), rows.load(1, g, lanes)
            bad = _not_finite(rows, low_key, high_key, dtype)
            low, high = order(b, low_key), order(b, high_key)
            lowest, highest = widen(b, low, dtype), widen(b, high, dtype)
            whole, real = shaped(low.type, I32), shaped(low.type, F32)
            steps = rows.number(3, whole)
            width = b.fdiv(b.fsub(highest, lowest), b.sitofp(steps, real))
            infinity = constant(real, float("inf"))
            fixed = b.fcmp_ordered("==", highest, lowest)
            regular = b.and_(b.fcmp_ordered(">=", width, constant(real, TINY)), b.fcmp_ordered("<", width, infinity))
            usable = b.or_(regular, fixed)
            less = b.sub(constant(whole, MAGIC_BITS), rows.number(4, whole))
            less = b.select(fixed, b.sub(less, steps), less)
            rows.store(b.select(usable, lowest, constant(real, 0.0)), 7, g)
            rows.store(b.select(fixed, constant(real, 1.0), b.select(usable, width, infinity)), 8, g)
            rows.store(b.select(usable, less, constant(whole, MAGIC_BITS)), 9, g)
            flag = constant(low.type, FLAG[dtype])
            rows.store(b.select(usable, low, flag), 5, rows.plus(to, g))
            rows.store(b.select(usable, high, flag), 5, rows.plus(to, groups, g))
            none = constant(whole, 0)
            seen = b.or_(
                b.select(bad, constant(whole, NOT_FINITE), none), b.select(usable, none, constant(whole, FLAGGED))
            )
            rows.store(b.or_(seen, rows.load(10, rows.plus(0), lanes)), 10, rows.plus(0))

        rows.strips(groups, LANES, strip)

    return intrinsic_of(build, low, high, INDEX, INDEX, INDEX, cells, INDEX, base, step, less, status)


@intrinsic
def quantize_k(_: Any, src: Any, at: Any, stride: Any, dim: Any, base: Any, step: Any, less: Any, k: Any) -> Any:
    """Fine steps plus half a coarse one, ``[8, dim]``, of 8 rows whose groups are channels."""
    dtype = cache_dtype(src)

    def build(rows: Rows) -> None:
        b = rows.b
        at, stride, dim = rows.values[1:4]

        def four(t: Any) -> None:
            def strip(c: Any, lanes: int) -> None:
                group = rows.load_real(4, c, lanes), rows.load_real(5, c, lanes), rows.load(6, c, lanes)
                start, to = rows.plus(at, rows.times(t, stride), c), rows.plus(rows.times(t, dim), c)
                for _ in range(4):
                    rows.prefetch(0, rows.plus(start, rows.times(stride, 64)))
                    code = quantized(b, widen(b, rows.load(0, start, lanes), dtype), *group)
                    rows.store(b.trunc(code, shaped(code.type, rows.element(7))), 7, to)
                    start, to = rows.plus(start, stride), rows.plus(to, dim)

            rows.strips(dim, LANES, strip)

        rows.count(0, 8, 4, four)

    return intrinsic_of(build, src, INDEX, INDEX, INDEX, base, step, less, k)


@intrinsic
def quantize_v(
    _: Any, src: Any, at: Any, stride: Any, dim: Any, base: Any, step: Any, less: Any, k: Any, g: Any
) -> Any:
    """Fine steps plus half a coarse one, of 8 rows whose groups, from ``g``, are 64 channels of a token."""
    dtype = cache_dtype(src)

    def build(rows: Rows) -> None:
        b = rows.b
        at, stride, dim, g = (rows.values[i] for i in (1, 2, 3, 8))
        per_token = b.sdiv(rows.plus(dim, 63), ir.IntType(64)(64))

        def token(t: Any) -> None:
            def part(c: Any, group: Any, lanes: int) -> None:
                slot = rows.plus(g, rows.times(t, per_token), group)
                base, step, less = (rows.spread(i, slot, e, lanes) for i, e in ((4, F32), (5, F32), (6, I32)))
                start = rows.plus(at, rows.times(t, stride), c)
                next_block = rows.plus(start, rows.times(stride, 64))
                for ahead in range(0, lanes, 32):
                    rows.prefetch(0, rows.plus(next_block, ahead))
                cell = rows.load(0, start, lanes)
                code = quantized(b, widen(b, cell, dtype), base, step, less)
                to = rows.plus(rows.times(t, dim), c)
                rows.store(b.trunc(code, shaped(code.type, rows.element(7))), 7, to)

            rows.groups(dim, part)

        rows.count(0, 8, 1, token)

    return intrinsic_of(build, src, INDEX, INDEX, INDEX, base, step, less, k, INDEX)


@intrinsic
def split(_: Any, k: Any, size: Any, shift: Any, coarse: Any, fine: Any) -> Any:
    """``k`` to its high bits ``coarse`` and its low ``shift`` bits ``fine``."""

    def build(rows: Rows) -> None:
        b = rows.b

        def strip(i: Any, lanes: int) -> None:
            own = rows.load(0, i, lanes)
            shift = rows.number(2, own.type)
            mask = b.sub(b.shl(constant(own.type, 1), shift), constant(own.type, 1))
            for array, value in ((3, b.lshr(own, shift)), (4, b.and_(own, mask))):
                byte = shaped(own.type, I8)
                rows.store(value if own.type == byte else b.trunc(value, byte), array, i)

        rows.strips(rows.values[1], CODE_LANES, strip)

    return intrinsic_of(build, k, INDEX, INDEX, coarse, fine)


@intrinsic
def pack_nibbles(_: Any, codes: Any, dim: Any, out: Any, to: Any) -> Any:
    """4-bit codes ``[8, dim]``: even rows to low halves of bytes ``[4, dim]``, odd rows to high ones."""

    def build(rows: Rows) -> None:
        b = rows.b
        dim, to = rows.values[1], rows.values[3]

        def pair(t: Any) -> None:
            even = rows.times(t, rows.times(dim, 2))

            def strip(c: Any, lanes: int) -> None:
                low, high = rows.load(0, rows.plus(even, c), lanes), rows.load(0, rows.plus(even, dim, c), lanes)
                rows.store(b.or_(low, b.shl(high, constant(high.type, 4))), 2, rows.plus(to, rows.times(t, dim), c))

            rows.strips(dim, CODE_LANES, strip)

        rows.count(0, 4, 1, pair)

    return intrinsic_of(build, codes, INDEX, out, INDEX)


@intrinsic
def pack_both(_: Any, k: Any, dim: Any, anchor: Any, to: Any, residual: Any, fine_to: Any) -> Any:
    """`split` and `pack_nibbles` in one for 4 + 4 bits, straight from uint8 ``k``."""

    def build(rows: Rows) -> None:
        b = rows.b
        dim, to, fine_to = rows.values[1], rows.values[3], rows.values[5]

        def two(t: Any) -> None:
            even, place = rows.times(t, rows.times(dim, 2)), rows.times(t, dim)

            def strip(c: Any, lanes: int) -> None:
                first, second = rows.load(0, rows.plus(even, c), lanes), rows.load(0, rows.plus(even, dim, c), lanes)
                byte = first.type
                high = b.and_(second, constant(byte, 0xF0))
                rows.store(b.or_(b.lshr(first, constant(byte, 4)), high), 2, rows.plus(to, place, c))
                low = b.and_(first, constant(byte, 0x0F))
                rows.store(b.or_(low, b.shl(second, constant(byte, 4))), 4, rows.plus(fine_to, place, c))

            rows.strips(dim, CODE_LANES, strip)

        rows.count(0, 4, 1, two)

    return intrinsic_of(build, k, INDEX, anchor, INDEX, residual, INDEX)


@intrinsic
def pack_planes(_: Any, codes: Any, width: Any, dim: Any, out: Any, to: Any) -> Any:
    """Codes ``[8, dim]`` of ``width`` bits: bit p of row t to bit t of byte ``out[to + 8 * dim * p + c]``."""

    def build(rows: Rows) -> None:
        b = rows.b
        width, dim, to = rows.values[1], rows.values[2], rows.values[4]

        def plane(p: Any) -> None:
            def strip(c: Any, lanes: int) -> None:
                byte = ir.VectorType(I8, lanes)
                packed, at = constant(byte, 0), c
                place = rows.spread_value(p, byte)
                for token in range(8):
                    own = b.and_(b.lshr(rows.load(0, at, lanes), place), constant(byte, 1))
                    packed = b.or_(packed, b.shl(own, constant(byte, token)))
                    at = rows.plus(at, dim)
                rows.store(packed, 3, rows.plus(to, rows.times(rows.times(p, dim), 8), c))

            rows.strips(dim, CODE_LANES, strip)

        rows.count(0, width, 1, plane)

    return intrinsic_of(build, codes, INDEX, INDEX, out, INDEX)


def _not_finite(rows: Rows, low: Any, high: Any, dtype: str) -> Any:
    """Whether order keys are below that of the least finite number, or above that of the greatest."""
    below = rows.b.icmp_signed("<", low, constant(low.type, -INFINITY[dtype]))
    return rows.b.or_(below, rows.b.icmp_signed(">=", high, constant(high.type, INFINITY[dtype])))
