"""One socket: frames out in order, frames in without copies, and the handshake that comes first."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from lynxkv.errors import DeadlineExceeded, HandshakeRefused, LynxError, PeerLost, ProtocolError
from lynxkv.wire.events import AnyEvent, Failed, Hello, Refused, error_of, failed
from lynxkv.wire.fingerprint import refusal
from lynxkv.wire.frames import MAX_CONTROL, NO_TRANSFER, Header
from lynxkv.wire.handshake import HANDSHAKE_VERSION, negotiate
from lynxkv.wire.landing import Landing
from lynxkv.wire.reader import Frame, FrameReader
from lynxkv.wire.writer import Out, control_frame

log = logging.getLogger(__name__)

NOTSENT_BYTES = 256 << 10
"""Unsent bytes the kernel may hold: what an anchor that comes late has to wait for."""
SHUTDOWN_S = 1.0
"""What a connection that is closed gets to send what was written."""
MAX_BACKLOG = 8 << 20
"""Control bytes a peer that does not read may let pile up before it is cut off."""


class Owner(Protocol):
    """Whoever a connection works for. All calls are on the loop's thread; ``lost`` is the last one."""

    def connected(self, connection: "Connection") -> None:
        """The socket is there, and TLS where there is any; nobody has greeted yet."""

    def greeted(self, connection: "Connection") -> None:
        """The handshake is done."""

    def place(self, connection: "Connection", header: Header) -> Landing | None:
        """Where a data frame goes (see :data:`lynxkv.wire.reader.Place`)."""

    def received(self, connection: "Connection", frame: Frame) -> None:
        """A whole frame is in."""

    def writable(self, connection: "Connection") -> None:
        """The kernel takes bytes again."""

    def lost(self, connection: "Connection", error: LynxError) -> None:
        """The connection is over; ``error`` says why."""


class Connection(asyncio.BufferedProtocol):
    """A connected socket of either side.

    Parameters
    ----------
    hello : Hello
        What this side says of itself.
    opens : bool
        This side connected, so it greets first.
    handshake_s : float
        The handshake must be done after so long.
    """

    def __init__(
        self, hello: Hello, owner: Owner, *, opens: bool, handshake_s: float, notsent: int = NOTSENT_BYTES
    ) -> None:
        self._hello, self._owner, self._opens = hello, owner, opens
        self._handshake_s, self._notsent = handshake_s, notsent
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._encrypted = False
        self._over = False
        self.reader = FrameReader(
            lambda header: owner.place(self, header), versions=(HANDSHAKE_VERSION,), control_limit=1 << 16
        )
        self.version = HANDSHAKE_VERSION
        self.peer: Hello | None = None
        self.address = "?"
        self.last_bytes = self._loop.time()
        self.received_bytes = 0

    def __repr__(self) -> str:
        name = f" {self.peer.name!r}" if self.peer is not None and self.peer.name else ""
        return f"peer {self.address}{name}"

    @property
    def writable(self) -> bool:
        """A data frame may be written now."""
        return not self._paused and not self._over and self.peer is not None

    @property
    def over(self) -> bool:
        """The connection has ended; nothing can be sent."""
        return self._over

    @property
    def backlog(self) -> int:
        """Bytes written but not yet taken by the kernel."""
        return 0 if self._transport is None or self._over else self._transport.get_write_buffer_size()

    def send(self, event: AnyEvent, transfer: bytes = NO_TRANSFER, generation: int = 0) -> int:
        """Write a control event now, before any data; bytes written, 0 once the connection is over."""
        if self._over:
            return 0
        return self.send_control(control_frame(self.version, event, transfer, generation))

    def send_control(self, data: bytes) -> int:
        """Write a whole control frame; bytes written."""
        if self._over or self._transport is None:
            return 0
        self._transport.write(data)
        if self.backlog > MAX_BACKLOG:
            self.end(PeerLost(f"{self!r} does not read: {self.backlog} bytes of events pile up; it was cut off"))
        return len(data)

    def send_data(self, control: bytes, out: Out) -> int:
        """Write a data frame, and a control frame before it; bytes written."""
        if self._over or self._transport is None:
            return 0
        parts: Sequence[bytes | memoryview] = (control + out.header, out.payload)
        self._transport.writelines(parts)
        return len(parts[0]) + len(parts[1])

    def end(self, error: LynxError, *, tell: bool = False) -> None:
        """End the connection because of ``error``; ``tell`` lets the peer know why."""
        if self._over:
            return
        if tell:
            self.send(failed(error))
            self.close(error)
            return
        self._finish(error)
        if self._transport is not None:
            self._transport.abort()

    def close(self, error: LynxError) -> None:
        """End the connection after what was written has gone out, or after :data:`SHUTDOWN_S`."""
        if self._over:
            return
        self._finish(error)
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._loop.call_later(SHUTDOWN_S, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up and greet."""
        self._transport = cast(asyncio.Transport, transport)
        # Nothing may pile up here. Under TLS a limit of 0 would stop writing for good: uvloop and asyncio look at it
        # only after a write, and take an empty buffer for a full one.
        self._transport.set_write_buffer_limits(high=1, low=0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._notsent)
        self._encrypted = transport.get_extra_info("ssl_object") is not None
        address = transport.get_extra_info("peername")
        self.address = f"{address[0]}:{address[1]}" if address else "?"
        self._timer = self._loop.call_later(self._handshake_s, self._too_slow)
        self._owner.connected(self)
        if self._opens:
            self.send(self._hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the final buffer of whatever comes."""
        return memoryview(bytearray(4096)) if self._over else self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes are in."""
        self.received_bytes += nbytes
        if self._over:
            return
        self.last_bytes = self._loop.time()
        try:
            frame = self.reader.filled(nbytes)
            if frame is not None:
                self._received(frame)
        except LynxError as e:
            self.end(e, tell=self.peer is not None)

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        self._paused = True

    def resume_writing(self) -> None:
        """The kernel takes bytes again."""
        self._paused = False
        if not self._over:
            self._owner.writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        if self._over:
            return
        if isinstance(exc, ssl.SSLError) and self.peer is None:
            self._finish(HandshakeRefused(f"{self!r} ended TLS: {exc}; do both have certificates of one authority?"))
            return
        why = f": {exc}" if exc is not None else ""
        if self.peer is None and self._encrypted:  # uvloop ends a refused handshake without an alert
            why += "; it came to no greeting over TLS: does the peer take our certificate?"
        try:
            self.reader.end()
        except ProtocolError as e:
            why += f"; {e}"
        self._finish(PeerLost(f"the connection to {self!r} ended{why}"))

    def _received(self, frame: Frame) -> None:
        event = frame.event
        if self.peer is not None:
            if isinstance(event, Hello | Refused):
                raise ProtocolError(f"{self!r} sent a second handshake")
            if isinstance(event, Failed) and frame.header.transfer == NO_TRANSFER:
                raise error_of(event)
            self._owner.received(self, frame)
        elif isinstance(event, Hello):
            self._greet(event)
        elif isinstance(event, Refused):
            self.end(refusal(event.field, event.theirs, event.ours))
        else:
            raise ProtocolError(f"a hello expected first, got {type(event).__name__}")

    def _greet(self, theirs: Hello) -> None:
        outcome = negotiate(self._hello, theirs)
        if isinstance(outcome, Refused):
            self.send(outcome)
            self.close(refusal(outcome.field, outcome.ours, outcome.theirs))
            return
        if not self._opens:
            self.send(self._hello)
        self.peer, self.version = msgspec.structs.replace(theirs, secret=None), outcome
        self.reader.versions = frozenset((outcome,))
        self.reader.control_limit = MAX_CONTROL
        self._stop_timer()
        self._owner.greeted(self)

    def _too_slow(self) -> None:
        self.end(DeadlineExceeded(f"{self!r}: no handshake within {self._handshake_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self, error: LynxError) -> None:
        self._over = True
        self._stop_timer()
        if isinstance(error, HandshakeRefused | ProtocolError):
            log.warning("%r: %s", self, error)
        self._owner.lost(self, error)
