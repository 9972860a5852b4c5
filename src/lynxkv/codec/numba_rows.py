"""What a Numba intrinsic of the codec is made of: vectors loaded from and stored to rows of arrays.

LLVM's own vectorizer checks at every short loop whether arrays overlap, which costs more than the loop; here loops run
over explicit vectors instead. Indices are in elements and are not checked.

Inside kernels a bfloat16 is uint16, a float16 is int16 and a float32 is float32, so that the array's type alone says
how to widen and narrow.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.cgutils import alloca_once_value, create_struct_proxy
from numba.extending import intrinsic as numba_intrinsic

from lynxkv.codec.numba_lanes import F32, I8, I16, I32, splat

F = TypeVar("F", bound=Callable[..., Any])

INDEX = types.intp
LANES = 16
"""Cache elements in a vector: two AVX2 registers of float32."""
CODE_LANES = 32
"""Codes of one byte in a vector."""
GROUP = 64
"""Elements of a whole V group."""

INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
NOT_FINITE = 1
FLAGGED = 2

_WORD = ir.IntType(64)
_BITS = {8: I8, 16: I16, 32: I32}


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Numba intrinsic; kernels call it without the typing context."""
    made: Callable[..., Any] = numba_intrinsic(function)
    return made


class _Cache(FunctionCache):  # type: ignore[misc]
    """Kernels kept on disk, for these very sources: Numba itself looks at the kernel's own file only."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _sources())


@cache
def _sources() -> str:
    """Digest of every file that kernels are made of."""
    files = sorted(Path(__file__).parent.glob("numba_*.py"))
    return xxhash.xxh3_128_hexdigest(b"".join(file.read_bytes() for file in files))


def kernel(function: F) -> F:
    """Compile ``function`` without fast-math, so that every operation rounds as the format says.

    What is compiled is kept on disk, unless neither the package's folder nor the user's can be written
    (``NUMBA_CACHE_DIR`` names another).
    """
    compiled: Any = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # Numba's "no locator available"
        compiled._cache = _Cache(function)
    kept: F = compiled
    return kept


def cache_dtype(array: Any) -> str:
    """The cache's element type, from the Numba type of an array of its elements."""
    return {types.uint16: "bfloat16", types.int16: "float16", types.float32: "float32"}[array.dtype]


def intrinsic_of(build: Callable[["Rows"], None], *arguments: Any) -> Any:
    """What an intrinsic without a result returns to Numba: its signature, and code built by ``build``."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        build(Rows(context, builder, signature, values))
        return context.get_dummy_value()

    return types.void(*arguments), codegen


class Rows:
    """The arguments of an intrinsic, by position, and loops over them."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self.b = builder
        self.values = values
        self._types = signature.args
        self._data = [
            create_struct_proxy(kind)(context, builder, value=value).data if isinstance(kind, types.Array) else None
            for kind, value in zip(signature.args, values, strict=True)
        ]

    def element(self, array: int) -> Any:
        """The integer type as wide as an element of an array."""
        return _BITS[self._types[array].dtype.bitwidth]

    def load(self, array: int, index: Any, lanes: int) -> Any:
        """A vector of an array's elements as integers, their bits."""
        return self.b.load(self._pointer(array, index, self.element(array), lanes), align=self._align(array))

    def load_real(self, array: int, index: Any, lanes: int) -> Any:
        """A vector of a float32 array."""
        return self.b.load(self._pointer(array, index, F32, lanes), align=4)

    def spread(self, array: int, index: Any, element: Any, lanes: int) -> Any:
        """One element in every lane."""
        pointer = self._pointer(array, index, element, 1)
        one = self.b.load(self.b.bitcast(pointer, element.as_pointer()), align=self._align(array))
        return splat(self.b, one, lanes)

    def store(self, value: Any, array: int, index: Any) -> None:
        """Store a vector."""
        pointer = self._pointer(array, index, value.type.element, value.type.count)
        self.b.store(value, pointer, align=self._align(array))

    def prefetch(self, array: int, index: Any) -> None:
        """Ask for a cache line that is needed soon; it may lie outside the array."""
        at = self.b.gep(self.b.bitcast(self._data[array], self.element(array).as_pointer()), [index])
        pointer = self.b.bitcast(at, I8.as_pointer())
        call = self.b.module.declare_intrinsic(
            "llvm.prefetch", [I8.as_pointer()], ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        )
        self.b.call(call, [pointer, I32(0), I32(3), I32(1)])

    def number(self, position: int, like: Any) -> Any:
        """An integer argument in every lane of a vector type."""
        return self.spread_value(self.values[position], like)

    def spread_value(self, number: Any, like: Any) -> Any:
        """An index in every lane of an integer vector type."""
        return splat(self.b, self.b.trunc(number, like.element), like.count)

    def plus(self, *terms: Any) -> Any:
        """A sum of indices, each a value or an int."""
        total = None
        for term in terms:
            value = _WORD(term) if isinstance(term, int) else term
            total = value if total is None else self.b.add(total, value)
        return total

    def times(self, index: Any, factor: Any) -> Any:
        """A product of an index and a value or an int."""
        return self.b.mul(index, _WORD(factor) if isinstance(factor, int) else factor)

    def count(self, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> None:
        """``for i in range(start, stop, step): body(i)``."""
        b = self.b
        start, stop = (_WORD(edge) if isinstance(edge, int) else edge for edge in (start, stop))
        index = alloca_once_value(b, start)
        test, inside, end = (b.append_basic_block(name) for name in ("test", "inside", "end"))
        b.branch(test)
        b.position_at_end(test)
        b.cbranch(b.icmp_signed("<", b.load(index), stop), inside, end)
        b.position_at_end(inside)
        body(b.load(index))
        b.store(b.add(b.load(index), _WORD(step)), index)
        b.branch(test)
        b.position_at_end(end)

    def strips(self, size: Any, lanes: int, body: Callable[[Any, int], None]) -> None:
        """Cover ``[0, size)`` with ``body(start, lanes)``: vectors, the last one overlapping; single ones if shorter.

        ``body`` must give the same when it does an element twice.
        """
        b = self.b
        last = b.sub(size, _WORD(lanes))
        with b.if_else(b.icmp_signed(">=", last, _WORD(0))) as (long, short):
            with long:
                self.count(0, size, lanes, lambda i: body(b.select(b.icmp_signed("<", i, last), i, last), lanes))
            with short:
                self.count(0, size, 1, lambda i: body(i, 1))

    def groups(self, size: Any, body: Callable[[Any, Any, int], None]) -> None:
        """Cover one token's channels ``[0, size)`` with ``body(start, group, lanes)``, group after group of 64."""
        b = self.b
        whole = b.sdiv(size, _WORD(GROUP))
        self.count(0, whole, 1, lambda g: body(b.mul(g, _WORD(GROUP)), g, GROUP))
        start = b.mul(whole, _WORD(GROUP))
        with b.if_then(b.icmp_signed("<", start, size)):
            self.strips(b.sub(size, start), LANES, lambda i, lanes: body(b.add(start, i), whole, lanes))

    def _align(self, array: int) -> int:
        return int(self._types[array].dtype.bitwidth) // 8

    def _pointer(self, array: int, index: Any, element: Any, lanes: int) -> Any:
        at = self.b.gep(self.b.bitcast(self._data[array], element.as_pointer()), [index])
        return self.b.bitcast(at, ir.VectorType(element, lanes).as_pointer())
