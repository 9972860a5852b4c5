"""The shape of a KV cache, and which of its rows are coded and which stay raw."""

from dataclasses import dataclass
from typing import NamedTuple

from lynxkv.codec.spec import BLOCK, CodecSpec, Kind
from lynxkv.errors import SpecError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Rows(NamedTuple):
    """Absolute positions: raw ``[start, coded)``, whole blocks ``[coded, tail)``, raw ``[tail, stop)``.

    Without a whole block ``coded == tail == start`` and every row is raw.
    """

    start: int
    coded: int
    tail: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's cache: K ``[kv_heads, stop - start, k_dim]``, V likewise (``v_dim`` 0: a latent without V).

    ``[start, stop)`` are the absolute token positions the layer holds; ``start > 0`` for a sliding window.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.k_dim < 1 or self.v_dim < 0 or not 0 <= self.start <= self.stop:
            raise SpecError(
                "a layer needs kv_heads >= 1, k_dim >= 1, v_dim >= 0 and 0 <= start <= stop; got "
                f"kv_heads={self.kv_heads} k_dim={self.k_dim} v_dim={self.v_dim} tokens=[{self.start}, {self.stop})"
            )

    def dim(self, kind: Kind) -> int:
        """Channels of a head of ``kind``."""
        return self.k_dim if kind is Kind.K else self.v_dim

    def rows(self, spec: CodecSpec) -> Rows:
        """Which rows are coded (docs/format.md: only whole blocks; ``recent`` last tokens stay raw)."""
        coded = -(-self.start // BLOCK) * BLOCK
        tail = (self.stop - spec.recent) // BLOCK * BLOCK
        if spec.raw or tail <= coded:
            return Rows(self.start, self.start, self.start, self.stop)
        return Rows(self.start, coded, tail, self.stop)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """All layers of one KV cache and its element type (``bfloat16``, ``float16`` or ``float32``)."""

    dtype: str
    layers: tuple[LayerShape, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"cache dtype must be one of {', '.join(DTYPE_BYTES)}; got {self.dtype!r}")

    @property
    def stop(self) -> int:
        """Tokens of the sequence: one past the last position any layer holds."""
        return max((layer.stop for layer in self.layers), default=0)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]
