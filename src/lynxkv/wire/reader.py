"""Bytes in, frames out, without I/O: data payloads are received straight in their final buffers."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lynxkv.errors import CorruptData, ProtocolError
from lynxkv.wire.events import AnyEvent, decode_event
from lynxkv.wire.frames import HEADER_BYTES, MAX_CONTROL, MAX_DATA, FrameKind, Header, unpack_header
from lynxkv.wire.landing import Landing

Place = Callable[[Header], Landing | None]
"""Where a data frame goes; None drops its payload. May raise LynxError, which ends the stream."""


class Frame(NamedTuple):
    """A whole frame: a control frame has ``event``, a data frame ``landing`` (None: it was dropped)."""

    header: Header
    event: AnyEvent | None
    landing: Landing | None


class FrameReader:
    """State machine of one stream: fill :meth:`buffer`, then say how much with :meth:`filled`.

    Holds one header, one control payload (as announced, at most ``control_limit``) and a scratch for dropped
    payloads. An error is final: the stream has no point at which to start again.
    """

    def __init__(self, place: Place, *, versions: Collection[int], control_limit: int = MAX_CONTROL) -> None:
        self._place = place
        self.versions = frozenset(versions)
        self.control_limit = control_limit
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch: memoryview | None = None
        self._header: Header | None = None
        self._landing: Landing | None = None
        self._target = self._head
        self._need = HEADER_BYTES
        self._got = 0
        self._error: Exception | None = None

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream go: never empty, never past the end of the current frame."""
        if self._error is not None:
            raise ProtocolError("the stream has ended in an error") from self._error
        if self._dropping:
            return self._drop_buffer()[: min(self._need - self._got, 65536)]
        return self._target[self._got : self._need]

    def filled(self, count: int) -> Frame | None:
        """``count`` bytes were put in :meth:`buffer`; the frame they complete, if any.

        Raises
        ------
        ProtocolError, CorruptData
            The stream is not one of valid frames. A data payload that is not what was sent raises nothing: its
            landing is marked corrupt and the stream goes on.
        """
        self._got += count
        if self._got < self._need:
            return None
        try:
            if self._header is None:
                return self._begin(unpack_header(self._head))
            return self._finish(self._header)
        except Exception as e:
            self._error = e
            raise

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Copy ``data`` through :meth:`buffer`; all frames it completes."""
        frames, rest = [], memoryview(data)
        while rest:
            target = self.buffer()
            n = min(len(target), len(rest))
            target[:n] = rest[:n]
            rest = rest[n:]
            frame = self.filled(n)
            if frame is not None:
                frames.append(frame)
        return frames

    def end(self) -> None:
        """The stream ended; :class:`ProtocolError` if that was inside a frame."""
        if self._header is not None or self._got:
            raise ProtocolError(f"the stream ended inside a frame: {self._got} of {self._need} bytes")

    def forget(self, landing: Landing) -> None:
        """Stop writing into ``landing``'s buffer now; the rest of its current frame is dropped."""
        if self._landing is landing:
            self._landing = None
            self._target = self._drop_buffer()

    @property
    def receiving(self) -> bytes | None:
        """Transfer whose payload is coming in right now."""
        return None if self._header is None else self._header.transfer

    @property
    def _dropping(self) -> bool:
        return self._header is not None and self._header.kind is FrameKind.DATA and self._landing is None

    def _drop_buffer(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(65536))
        return self._scratch

    def _begin(self, header: Header) -> Frame | None:
        if header.version not in self.versions:
            raise ProtocolError(f"frame version {sorted(self.versions)} expected, got {header.version}")
        if header.kind is FrameKind.CONTROL:
            if not 0 < header.length <= self.control_limit:
                raise ProtocolError(f"a control frame of 1..{self.control_limit} bytes expected, got {header.length}")
            self._target = memoryview(bytearray(header.length))
        else:
            if not 0 < header.length <= MAX_DATA:
                raise ProtocolError(f"a data frame of 1..{MAX_DATA} bytes expected, got {header.length}")
            self._landing = self._place(header)
            self._target = self._drop_buffer() if self._landing is None else self._landing.room(header)
        self._header, self._need, self._got = header, header.length, 0
        return None

    def _finish(self, header: Header) -> Frame:
        target, landing = self._target, self._landing
        self._header, self._landing = None, None
        self._target, self._need, self._got = self._head, HEADER_BYTES, 0
        if header.kind is FrameKind.DATA:
            if landing is not None:
                landing.add(header)
            return Frame(header, None, landing)
        if xxh3_64_intdigest(target) != header.check:
            raise CorruptData("a control frame's checksum is wrong")
        return Frame(header, decode_event(target), None)
