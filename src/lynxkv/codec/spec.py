"""What a codec does to a KV cache: tiers, bits per tensor kind and layer, raw rows."""

from dataclasses import dataclass
from enum import IntEnum

from lynxkv.errors import SpecError

BLOCK = 64
"""Tokens in a block, on the absolute grid; also the V group's width in channels."""

SPEC_VERSION = 1


class Tier(IntEnum):
    """A layer of precision; useless without those before it."""

    ANCHOR = 0
    RESIDUAL = 1
    EXACT = 2


class Kind(IntEnum):
    """Which of the two tensors of a layer."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of one tensor kind: ``anchor`` (1..8) and ``residual`` (0..8), 12 together at most."""

    anchor: int = 4
    residual: int = 4

    def __post_init__(self) -> None:
        if not (1 <= self.anchor <= 8 and 0 <= self.residual <= 8 and self.anchor + self.residual <= 12):
            raise SpecError(
                f"bits must be anchor 1..8, residual 0..8, at most 12 together; got {self.anchor}+{self.residual}"
            )

    @property
    def steps(self) -> int:
        """Fine steps between a group's min and max: ``(2^a - 1) * 2^r`` (240 for 4+4)."""
        return ((1 << self.anchor) - 1) << self.residual


@dataclass(frozen=True, slots=True)
class LayerBits:
    """Bits of one layer that differ from the spec's own."""

    layer: int
    k: Bits
    v: Bits


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """How a KV cache is cut into tiers; part of an entry's key and of the handshake.

    Parameters
    ----------
    k, v : Bits
        Bits of K (quantized per channel over a block) and V (per token over 64 channels).
    overrides : tuple of LayerBits
        Layers with bits of their own, ascending by layer.
    sinks : int
        First tokens of a sequence that stay raw and out of their block's min and max, 0..64.
    recent : int
        Least number of last tokens that stay raw, >= 0.
    raw : bool
        Every row raw: the anchor is the cache itself and there is no other tier.
    exact : bool
        The lossless third tier follows the residual.
    """

    k: Bits = Bits()
    v: Bits = Bits()
    overrides: tuple[LayerBits, ...] = ()
    sinks: int = 4
    recent: int = 32
    raw: bool = False
    exact: bool = False
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        if self.version != SPEC_VERSION:
            raise SpecError(f"codec spec version {SPEC_VERSION} expected, got {self.version}; update the older peer")
        if not 0 <= self.sinks <= BLOCK:
            raise SpecError(f"sinks must be 0..{BLOCK}, got {self.sinks}")
        if not 0 <= self.recent < 1 << 31:
            raise SpecError(f"recent must be 0..2^31-1, got {self.recent}")
        layers = [o.layer for o in self.overrides]
        if layers != sorted(set(layers)) or any(layer < 0 for layer in layers):
            raise SpecError(f"overrides must name ascending layers once each, got {layers}")

    def bits(self, layer: int, kind: Kind) -> Bits:
        """Bits of ``kind`` in ``layer``."""
        for o in self.overrides:
            if o.layer == layer:
                return o.k if kind is Kind.K else o.v
        return self.k if kind is Kind.K else self.v

    @property
    def target(self) -> Tier:
        """The tier at which drafts are verified: the last one this spec has."""
        if self.raw:
            return Tier.ANCHOR
        if self.exact:
            return Tier.EXACT
        pairs = [(self.k, self.v), *((o.k, o.v) for o in self.overrides)]
        return Tier.RESIDUAL if any(b.residual for pair in pairs for b in pair) else Tier.ANCHOR
