"""A transfer as its producer sees it: segments are put from any thread, and its end is reported once."""

import asyncio
import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

from lynxkv.errors import LynxError, ProtocolError, TransferError
from lynxkv.wire.events import FirstToken
from lynxkv.wire.manifest import MAX_SEGMENT_BYTES, Manifest
from lynxkv.wire.writer import segment_digest

log = logging.getLogger(__name__)


class Released(StrEnum):
    """Why a lease ended."""

    ACKNOWLEDGED = "acknowledged"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PEER_LOST = "peer lost"
    FAILED = "failed"
    DRAINED = "drained"


class Put(NamedTuple):
    """A segment's bytes and their xxh3-64."""

    data: memoryview
    digest: int


class Listener(Protocol):
    """The server an outgoing transfer was announced to. Calls are on its loop's thread."""

    def put(self, outgoing: "Outgoing", segment: int) -> None:
        """A segment is there."""

    def token(self, outgoing: "Outgoing") -> None:
        """Token 1 is there."""

    def renewed(self, outgoing: "Outgoing") -> None:
        """The producer is alive."""

    def broken(self, outgoing: "Outgoing", error: LynxError) -> None:
        """The producer gave up."""


OnReleased = Callable[[Released, str], None]


class Outgoing:
    """One delivery to one peer, under a lease from its announcement on.

    Parameters
    ----------
    manifest : Manifest
        What is delivered; ``generation``, ``start``, ``stop`` and ``ready`` are filled in when it is pulled.
    on_released : callable, optional
        Called once with the reason and a text, on the server's loop, when the lease has ended and no byte of any
        segment is needed any more (a frame in the kernel's hands may still hold a reference). Also called when
        the server closes.
    """

    def __init__(self, manifest: Manifest, *, on_released: OnReleased | None = None) -> None:
        self.manifest = manifest
        self.segments: dict[int, Put] = {}
        self.first: FirstToken | None = None
        self._on_released = on_released
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._early: list[Callable[[Listener], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._released: Released | None = None

    def __repr__(self) -> str:
        return f"transfer {self.transfer.hex()[:12]}"

    @property
    def transfer(self) -> bytes:
        """The 128-bit id."""
        return self.manifest.transfer

    @property
    def released(self) -> Released | None:
        """Why the lease ended; None while it is held."""
        return self._released

    def put(self, segment: int, data: bytes | bytearray | memoryview, *, digest: int | None = None) -> bool:
        """Hand over a segment's bytes, which must not change until the lease ends. Any thread, once a segment.

        ``data`` is anything contiguous with the buffer protocol (a NumPy array too); ``digest`` is its
        :func:`~lynxkv.wire.writer.segment_digest` where that is known already. False: the lease has ended,
        nothing more is needed.

        Raises
        ------
        TransferError
            The segment was put before.
        ProtocolError
            No such segment, or more bytes than the wire carries.
        """
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        if not 0 <= segment < len(self.manifest.segments):
            raise ProtocolError(f"{self!r}: segments 0..{len(self.manifest.segments) - 1} exist, got {segment}")
        if view.nbytes > MAX_SEGMENT_BYTES:
            raise ProtocolError(f"{self!r}: a segment of at most {MAX_SEGMENT_BYTES} bytes expected, got {view.nbytes}")
        with self._lock:
            if segment in self._known:
                raise TransferError(f"{self!r}: segment {segment} was put before")
            self._known.add(segment)
        put = Put(view, segment_digest(view) if digest is None else digest)

        def arrive(listener: Listener) -> None:
            self.segments[segment] = put
            listener.put(self, segment)

        return self._post(arrive)

    def first_token(self, event: FirstToken) -> bool:
        """Hand over token 1; it goes out before any data. Any thread. False: the lease has ended."""

        def arrive(listener: Listener) -> None:
            self.first = event
            listener.token(self)

        return self._post(arrive)

    def fail(self, error: LynxError) -> bool:
        """Give up: the peer is told, the lease ends. Any thread. False: it had ended before."""
        return self._post(lambda listener: listener.broken(self, error))

    def renew(self) -> bool:
        """Renew the lease, and tell the peer that work goes on: for whoever takes long over a segment. Any thread."""
        return self._post(lambda listener: listener.renewed(self))

    def bind(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """For the server, on its loop: from now on hear what the producer does, and what it did before."""
        with self._lock:
            early, self._early = self._early, []
            self._loop, self._listener = loop, listener
        for call in early:
            call(listener)

    def release(self, reason: Released, detail: str) -> None:
        """For the server, on its loop: the lease has ended. Only the first call counts."""
        with self._lock:
            if self._released is not None:
                return
            self._released = reason
            self._early = []
        self.segments.clear()
        if self._on_released is None:
            return
        try:
            self._on_released(reason, detail)
        except Exception:
            log.exception("%r: the callback for its end (%s) failed; other transfers go on", self, reason.value)

    def _post(self, call: Callable[[Listener], None]) -> bool:
        with self._lock:
            if self._released is not None:
                return False
            loop, listener = self._loop, self._listener
            if loop is None or listener is None:
                self._early.append(call)
                return True
        try:
            loop.call_soon_threadsafe(self._hear, call, listener)
        except RuntimeError:
            return False
        return True

    def _hear(self, call: Callable[[Listener], None], listener: Listener) -> None:
        if self._released is None:
            call(listener)
