"""The fixed frame header: 64 bytes, little-endian, with a checksum of its own."""

import struct
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lynxkv.codec.spec import Tier
from lynxkv.errors import CorruptData, ProtocolError

MAGIC = b"LYNX"
HEADER_BYTES = 64
MAX_DATA = 256 << 10
"""Payload bytes of a data frame, at most."""
MAX_CONTROL = 4 << 20
"""Payload bytes of a control frame, at most."""
NO_TRANSFER = bytes(16)

_FIELDS = struct.Struct("<4sBBBx16sQIIQQ")
_CHECK = struct.Struct("<Q")
_TIERS = tuple(Tier)


class FrameKind(IntEnum):
    """What a frame's payload is."""

    CONTROL = 1
    DATA = 2


class Header(NamedTuple):
    """A frame's header.

    ``check`` is xxh3-64 of a control frame's payload; in a data frame, of the segment's bytes
    ``[0, offset + length)``, so that the last frame's check is the segment's digest.
    """

    version: int
    kind: FrameKind
    tier: Tier
    transfer: bytes
    generation: int
    segment: int
    length: int
    offset: int
    check: int


def pack_header(header: Header) -> bytes:
    """64 bytes of a header."""
    version, kind, tier, transfer, generation, segment, length, offset, check = header
    fields = _FIELDS.pack(MAGIC, version, kind, tier, transfer, generation, segment, length, offset, check)
    return fields + _CHECK.pack(xxh3_64_intdigest(fields))


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Header of 64 bytes; :class:`ProtocolError` or :class:`CorruptData` if they are not one."""
    view = memoryview(data)
    magic, version, kind, tier, transfer, generation, segment, length, offset, check = _FIELDS.unpack(view[:56])
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}, got {magic!r}; the peer does not speak this protocol")
    if xxh3_64_intdigest(view[:56]) != _CHECK.unpack(view[56:64])[0]:
        raise CorruptData("a frame header's checksum is wrong; the stream cannot be trusted any further")
    if view[7] != 0 or kind not in (1, 2) or tier >= len(_TIERS):
        raise ProtocolError(f"frame kind 1 or 2 and tier 0..2 expected, got kind {kind} tier {tier} flags {view[7]}")
    return Header(version, FrameKind(kind), _TIERS[tier], transfer, generation, segment, length, offset, check)
