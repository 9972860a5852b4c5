"""KV buffers that never move: preallocated layers behind transformers' cache interface.

A growing cache reallocates as tokens come in, under the feet of whoever refines its rows in place. These
layers are allocated once; rows of the prompt keep their address for the life of a session.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's K and V, ``[1, kv_heads, capacity, dim]``; row 0 is absolute position ``first``.

    ``window`` 0 keeps every token. Otherwise the layer is sliding: attention sees ``window - 1`` rows
    before the new ones, and older rows are dropped when room runs out. ``capacity`` then has to be at
    least ``window - 1`` plus the most rows ever appended between two drops.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        window: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window > 0
        self.first = 0
        self.length = 0
        self.keys = torch.empty((1, kv_heads, capacity, k_dim), dtype=dtype, device=device)
        self.values = torch.empty((1, kv_heads, capacity, v_dim), dtype=dtype, device=device)
        self.is_initialized = True

    @property
    def capacity(self) -> int:
        """Rows the buffers hold."""
        return int(self.keys.shape[2])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows ``[1, kv_heads, n, dim]``; returns the rows attention may see."""
        n = key_states.shape[2]
        visible = self.get_mask_sizes(n)[0]
        self._make_room(n)
        at = self.length - self.first
        self.keys[:, :, at : at + n] = key_states
        self.values[:, :, at : at + n] = value_states
        self.length += n
        rows = slice(at + n - visible, at + n)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def _make_room(self, n: int) -> None:
        held = self.length - self.first
        if held + n <= self.capacity:
            return
        keep = min(held, self.window - 1) if self.window else held
        if keep + n > self.capacity:
            raise AssertionError(f"a cache layer of {self.capacity} rows was asked to hold {keep + n}")
        for buffer in (self.keys, self.values):
            buffer[:, :, :keep] = buffer[:, :, held - keep : held].clone()
        self.first = self.length - keep

    def place(self, first: int, length: int) -> None:
        """Declare rows ``[first, length)`` present, at the front of the buffers; their content comes later."""
        self.first, self.length = first, length

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        needed = max(0, length - self.window + 1) if self.window else 0
        if not self.first <= min(needed, length) <= length <= self.length:
            raise AssertionError(
                f"a layer of rows [{self.first}, {self.length}) cannot be cut to {length}: row {needed} must be there"
            )
        self.length = length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows attention sees with ``query_length`` new ones, and the absolute position of the first."""
        past = min(self.length, self.window - 1) if self.window else self.length
        return past + int(query_length), self.length - past

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far, dropped ones included."""
        return self.length

    def get_max_length(self) -> int:
        """The window of a sliding layer; -1 where there is no limit the mask has to know."""
        return self.window or -1


class Buffers(Cache):  # type: ignore[misc]
    """All layers of one session."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers=layers)
        self.layers: list[Layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V buffers."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values))
