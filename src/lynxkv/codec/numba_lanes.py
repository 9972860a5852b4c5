"""The codec's arithmetic as LLVM instructions on vectors.

Every function takes an IR builder and vector values and returns one. Nothing carries a fast-math flag, so LLVM neither
contracts a product and a sum nor replaces a division. A cache element is an integer of its own width (its bits).
"""

from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import config

I8, I16, I32, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()

MAGIC = 12582912.0
"""1.5 * 2^23: adding it to a float32 in [0, 2^22) rounds that half to even and leaves the integer in the low bits."""

MAGIC_BITS = 0x4B400000

TINY = 2.0**-126
"""The least normal float32."""


def shaped(like: Any, element: Any) -> Any:
    """A vector of ``element`` with as many lanes as the vector type ``like``."""
    return ir.VectorType(element, like.count)


def constant(like: Any, number: float) -> Any:
    """``number`` in every lane of the vector type ``like``."""
    return ir.Constant(like, [number] * like.count)


def splat(b: Any, scalar: Any, lanes: int) -> Any:
    """A scalar in every one of ``lanes`` lanes."""
    vector = ir.VectorType(scalar.type, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def widen(b: Any, cell: Any, dtype: str) -> Any:
    """The float32 of an element's bits; exact for every finite one."""
    wide, real = shaped(cell.type, I32), shaped(cell.type, F32)
    if dtype == "float32":
        return b.bitcast(cell, real)
    bits = b.zext(cell, wide)
    if dtype == "bfloat16":
        return b.bitcast(b.shl(bits, constant(wide, 16)), real)
    # Exponent and mantissa put in place, then scaled by 2^112, which takes care of subnormals too.
    magnitude = b.bitcast(b.shl(b.and_(bits, constant(wide, 0x7FFF)), constant(wide, 13)), real)
    scaled = b.bitcast(b.fmul(magnitude, constant(real, 2.0**112)), wide)
    sign = b.shl(b.and_(bits, constant(wide, 0x8000)), constant(wide, 16))
    return b.bitcast(b.or_(scaled, sign), real)


def rounded_bfloat16(b: Any, value: Any) -> Any:
    """The bits of the nearest bfloat16, half to even, in the high halves; the low halves are void."""
    wide = shaped(value.type, I32)
    bits = b.bitcast(value, wide)
    odd = b.and_(b.lshr(bits, constant(wide, 16)), constant(wide, 1))
    return b.add(b.add(bits, constant(wide, 0x7FFF)), odd)


def narrow(b: Any, value: Any, dtype: str) -> Any:
    """The bits of the element nearest to a finite float32, half to even."""
    wide = shaped(value.type, I32)
    bits = b.bitcast(value, wide)
    if dtype == "float32":
        return bits
    if dtype == "bfloat16":
        return b.trunc(b.lshr(rounded_bfloat16(b, value), constant(wide, 16)), shaped(value.type, I16))
    sign = b.and_(bits, constant(wide, 0x80000000))
    magnitude = b.xor(bits, sign)
    # Where the result is subnormal, adding 0.5 makes the adder round at its last bit.
    lifted = b.fadd(b.bitcast(magnitude, value.type), constant(value.type, 0.5))
    small = b.sub(b.bitcast(lifted, wide), constant(wide, 0x3F000000))
    odd = b.and_(b.lshr(magnitude, constant(wide, 13)), constant(wide, 1))
    # Rebias the exponent by -112 and round at bit 13.
    normal = b.lshr(b.add(b.add(magnitude, constant(wide, 0xC8000FFF)), odd), constant(wide, 13))
    chosen = b.select(b.icmp_unsigned("<", magnitude, constant(wide, 113 << 23)), small, normal)
    return b.trunc(b.or_(chosen, b.lshr(sign, constant(wide, 16))), shaped(value.type, I16))


def order(b: Any, cell: Any) -> Any:
    """An element's bits as a signed integer in the order of the numbers, -0 below +0; its own inverse."""
    width = cell.type.element.width
    negative = b.ashr(cell, constant(cell.type, width - 1))
    return b.xor(cell, b.and_(negative, constant(cell.type, (1 << (width - 1)) - 1)))


def least(b: Any, x: Any, y: Any) -> Any:
    """The smaller of two signed integers."""
    return b.select(b.icmp_signed("<", x, y), x, y)


def most(b: Any, x: Any, y: Any) -> Any:
    """The larger of two signed integers."""
    return b.select(b.icmp_signed(">", x, y), x, y)


def quantized(b: Any, value: Any, base: Any, step: Any, less: Any) -> Any:
    """``rint((value - base) / step) + MAGIC_BITS - less`` as int32."""
    quotient = b.fdiv(b.fsub(value, base), step)
    bits = b.bitcast(b.fadd(quotient, constant(value.type, MAGIC)), shaped(value.type, I32))
    return b.sub(bits, less)


def dequantized(b: Any, k: Any, low: Any, step: Any) -> Any:
    """``low + float32(k) * step`` for unsigned ``k`` of any width below 32."""
    return b.fadd(low, b.fmul(b.sitofp(b.zext(k, shaped(k.type, I32)), low.type), step))


def _table_instruction() -> str | None:
    """LLVM's name for looking 16 bytes up in a table of 16 at once, where the CPU that code is made for can."""
    if config.CPU_NAME or config.CPU_FEATURES:  # code for another CPU than this one
        return None
    architecture = llvm.get_process_triple().partition("-")[0]
    features = llvm.get_host_cpu_features()
    if architecture == "x86_64" and features.get("ssse3"):
        return "llvm.x86.ssse3.pshuf.b.128"
    if architecture in ("aarch64", "arm64") and features.get("neon"):
        return "llvm.aarch64.neon.tbl1.v16i8"
    return None


TABLE_INSTRUCTION = _table_instruction()

_BYTES = ir.VectorType(I8, 16)


def looked_up(b: Any, table: Any, codes: Any) -> Any:
    """``table[codes]`` of vectors of 16 bytes, codes below 16; only where there is a TABLE_INSTRUCTION."""
    module = b.module
    instruction = module.globals.get(TABLE_INSTRUCTION) or ir.Function(
        module, ir.FunctionType(_BYTES, [_BYTES, _BYTES]), TABLE_INSTRUCTION
    )
    return b.call(instruction, [table, codes])
