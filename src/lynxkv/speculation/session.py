"""What speculation needs of a model: forward some tokens, forget some tokens."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class Session(Protocol):
    """One sequence's state in a model."""

    @property
    def length(self) -> int:
        """Tokens whose KV the session holds."""
        ...

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append ``tokens``; returns float32 logits ``[len(tokens), vocab]`` of the token after each."""
        ...

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on."""
        ...
