"""KV tensors to tiers of bytes and back; one definition, several kernels (docs/format.md)."""

from lynxkv.codec.decode import decode
from lynxkv.codec.encode import encode
from lynxkv.codec.layout import segment_bounds
from lynxkv.codec.plan import Segment, Span, plan
from lynxkv.codec.segment import check
from lynxkv.codec.shape import CacheShape, LayerShape, Rows
from lynxkv.codec.spec import BLOCK, Bits, CodecSpec, Kind, LayerBits, Tier

__all__ = [
    "BLOCK",
    "Bits",
    "CacheShape",
    "CodecSpec",
    "Kind",
    "LayerBits",
    "LayerShape",
    "Rows",
    "Segment",
    "Span",
    "Tier",
    "check",
    "decode",
    "encode",
    "plan",
    "segment_bounds",
]
