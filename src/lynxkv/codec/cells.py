"""A cache's elements in NumPy: bfloat16 as uint16 bit patterns, float16 and float32 as themselves."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CELL: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
"""NumPy dtype of an element."""

FLAG: dict[str, int] = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}
"""Bit pattern (quiet NaN) of the min and max of a flagged group; no finite element has it."""

_BITS = {2: np.uint16, 4: np.uint32}


def bit_pattern(cells: NDArray[Any]) -> NDArray[Any]:
    """Elements as unsigned integers of their own width; a view."""
    return cells.view(_BITS[cells.itemsize])


def widen(cells: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Elements of cache type ``dtype`` as float32, exactly."""
    if dtype == "bfloat16":
        return (cells.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return cells.astype(np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Finite float32 rounded once, half to even, to elements of cache type ``dtype``."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(CELL[dtype])


def is_finite(cells: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Which elements are neither NaN nor infinite."""
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    bits = bit_pattern(cells)
    result: NDArray[np.bool_] = (bits & ((1 << (8 * bits.itemsize - 1)) - 1)) < infinity
    return result
