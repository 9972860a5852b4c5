"""A segment on its way in: its final buffer, and how much of it has arrived and is right."""

from xxhash import xxh3_64

from lynxkv.errors import ProtocolError
from lynxkv.wire.frames import Header


class Landing:
    """Receives one segment, frame after frame, in its final buffer.

    Parameters
    ----------
    buffer : memoryview
        Writable, contiguous, exactly the announced size.
    digest : int
        The announced xxh3-64 of all bytes.
    """

    __slots__ = ("_buffer", "_digest", "_hash", "arrived", "corrupt", "size")

    def __init__(self, buffer: memoryview, digest: int) -> None:
        self._buffer = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        self._digest = digest
        self._hash = xxh3_64()
        self.size = self._buffer.nbytes
        self.arrived = 0
        self.corrupt = False

    def room(self, header: Header) -> memoryview:
        """Where a frame's payload goes; :class:`ProtocolError` unless it continues the segment within its size."""
        if header.offset != self.arrived or header.offset + header.length > self.size or not header.length:
            raise ProtocolError(
                f"segment {header.segment}: a frame within [{self.arrived}, {self.size}) expected, "
                f"got offset {header.offset} length {header.length}"
            )
        return self._buffer[header.offset : header.offset + header.length]

    def add(self, header: Header) -> None:
        """Check a frame whose payload is in place; sets ``corrupt`` if it is not what was sent."""
        end = header.offset + header.length
        self._hash.update(self._buffer[header.offset : end])
        self.arrived = end
        if self._hash.intdigest() != header.check or (end == self.size and header.check != self._digest):
            self.corrupt = True

    @property
    def complete(self) -> bool:
        """Every byte is in and right."""
        return self.arrived == self.size and not self.corrupt
