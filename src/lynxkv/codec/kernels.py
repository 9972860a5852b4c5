"""The two implementations of the codec's arithmetic, chosen by name; same bytes, same values."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec.layout import Run
from lynxkv.errors import SpecError

DEFAULT = "numba"


class Kernels(Protocol):
    """What an implementation does; `lynxkv.codec.reference` states the contract of each."""

    def encode_layer(
        self, run: Run, values: NDArray[Any], anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None
    ) -> tuple[bool, bool]:
        """Encode all heads of a layer; returns (finite, flagged)."""

    def decode_layer(
        self, run: Run, anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None, out: NDArray[Any], skip: int
    ) -> NDArray[np.int64]:
        """Decode all heads of a layer; returns each head's number of flagged elements."""


def kernels_named(name: str | None) -> Kernels:
    """The implementation called ``name`` (``reference`` or ``numba``); None: numba."""
    match name or DEFAULT:
        case "numba":
            from lynxkv.codec import numba_layer

            return numba_layer
        case "reference":
            from lynxkv.codec import reference

            return reference
        case other:
            raise SpecError(f"kernels must be 'numba' or 'reference', got {other!r}")
