"""Events and segments out, as frames."""

from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from lynxkv.codec.spec import Tier
from lynxkv.errors import CorruptData, ProtocolError
from lynxkv.wire.events import AnyEvent, encode_event
from lynxkv.wire.frames import MAX_CONTROL, NO_TRANSFER, FrameKind, Header, pack_header


class Out(NamedTuple):
    """A data frame to send: its header, and a view of the segment's own bytes."""

    header: bytes
    payload: memoryview


def segment_digest(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of a segment's bytes."""
    return xxh3_64_intdigest(data)


def control_frame(version: int, event: AnyEvent, transfer: bytes = NO_TRANSFER, generation: int = 0) -> bytes:
    """One control frame; :class:`ProtocolError` if the event is larger than a frame may be."""
    payload = encode_event(event)
    if len(payload) > MAX_CONTROL:
        raise ProtocolError(f"a {type(event).__name__} of at most {MAX_CONTROL} bytes expected, got {len(payload)}")
    check = xxh3_64_intdigest(payload)
    head = Header(version, FrameKind.CONTROL, Tier.ANCHOR, transfer, generation, 0, len(payload), 0, check)
    return pack_header(head) + payload


class SegmentWriter:
    """Cuts one segment into data frames, in order, each as large as asked for when it is cut."""

    __slots__ = ("_data", "_digest", "_generation", "_hash", "_tier", "_transfer", "_version", "segment", "sent")

    def __init__(
        self, version: int, transfer: bytes, generation: int, tier: Tier, segment: int, data: memoryview, digest: int
    ) -> None:
        self._version, self._transfer, self._generation = version, transfer, generation
        self._tier, self.segment, self._data, self._digest = tier, segment, data, digest
        self._hash = xxh3_64()
        self.sent = 0

    @property
    def left(self) -> int:
        """Payload bytes not cut yet."""
        return self._data.nbytes - self.sent

    def cut(self, limit: int) -> Out:
        """Cut the next frame, of at most ``limit`` payload bytes.

        Raises
        ------
        CorruptData
            The segment's bytes are no longer those whose digest was taken: someone wrote into them.
        """
        start = self.sent
        payload = self._data[start : start + limit]
        self._hash.update(payload)
        self.sent = start + payload.nbytes
        check = self._hash.intdigest()
        if not self.left and check != self._digest:
            raise CorruptData(f"segment {self.segment} changed in memory after it was put; it was not sent whole")
        head = Header(
            self._version,
            FrameKind.DATA,
            self._tier,
            self._transfer,
            self._generation,
            self.segment,
            payload.nbytes,
            start,
            check,
        )
        return Out(pack_header(head), payload)
