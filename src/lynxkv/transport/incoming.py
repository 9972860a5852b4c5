"""A transfer as its consumer sees it: segments land in its buffers, and its end is reported once."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from lynxkv.codec.plan import Segment
from lynxkv.codec.spec import Tier
from lynxkv.errors import (
    CorruptData,
    DeadlineExceeded,
    LynxError,
    ProtocolError,
    StaleGeneration,
    TransferError,
    TransferRejected,
)
from lynxkv.transport.connection import Connection
from lynxkv.wire.events import (
    Acknowledge,
    AnyEvent,
    Cancel,
    Failed,
    FirstToken,
    Pull,
    Reject,
    Resend,
    SegmentReady,
    TierEnd,
    Working,
    error_of,
)
from lynxkv.wire.fingerprint import Fingerprint, compare
from lynxkv.wire.frames import FrameKind, Header
from lynxkv.wire.handshake import make_generation
from lynxkv.wire.landing import Landing
from lynxkv.wire.manifest import Manifest, check_manifest, describe
from lynxkv.wire.reader import Frame

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""What a server gets beyond a pull's deadline to say itself that it passed."""


class Sink(Protocol):
    """Who takes an incoming transfer. Calls are on the loop's thread, and none follows ``ended``.

    Raising LynxError from any of them ends the transfer with it, and the server is told.
    """

    def manifest(self, manifest: Manifest) -> None:
        """What will come; checked for sanity and against our fingerprint."""

    def buffer(self, segment: int, size: int) -> memoryview:
        """Writable buffer of exactly ``size`` bytes where the segment is received. It is written until ``landed``
        or ``ended``; asked for again if the segment arrived corrupt.
        """

    def landed(self, segment: int) -> None:
        """Every byte is in, and is what the producer put."""

    def first_token(self, event: FirstToken) -> None:
        """Token 1."""

    def tier_end(self, tier: Tier) -> None:
        """Every segment of ``tier`` that was pulled has landed."""

    def ended(self, error: LynxError | None) -> None:
        """None: all that was pulled has landed; acknowledge or reject it. Otherwise why it never will."""


class Incoming:
    """One pull and its progress.

    Attributes
    ----------
    manifest : Manifest or None
        Once it is in.
    received : list of int
        Payload bytes per tier that have landed or are landing.
    """

    def __init__(
        self,
        connection: Connection,
        pull: Pull,
        sink: Sink,
        fingerprint: Fingerprint | None,
        stall_s: float,
        forget: Callable[["Incoming"], None],
    ) -> None:
        self.pull = pull
        self.manifest: Manifest | None = None
        self.received = [0 for _ in Tier]
        self._connection, self._sink, self._fingerprint = connection, sink, fingerprint
        self._stall_s, self._forget = stall_s, forget
        self._epoch = connection.peer.epoch if connection.peer is not None else 0
        self._generation = make_generation(self._epoch, pull.attempt)
        self._missing: set[int] = set()
        self._open: dict[Tier, tuple[int, Landing]] = {}
        self._resent: set[int] = set()
        self._tiers_left = set(pull.tiers)
        self._token_due = False
        self._over = False
        self._error: LynxError | None = None
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(pull.deadline_s + GRACE_S, self._never_announced)

    def __repr__(self) -> str:
        return f"transfer {self.transfer.hex()[:12]}"

    @property
    def transfer(self) -> bytes:
        """The 128-bit id."""
        return self.pull.transfer

    @property
    def over(self) -> bool:
        """``ended`` was called."""
        return self._over

    async def wait(self) -> None:
        """Return when all has landed; raise the error the transfer ended with."""
        await asyncio.shield(self._done)
        if self._error is not None:
            raise self._error

    def acknowledge(self) -> None:
        """Everything is used or copied: the lease ends. :class:`TransferError` before all has landed."""
        if not self._over:
            raise TransferError(f"{self!r}: {len(self._missing)} segments have not landed; cancel it instead")
        if self._error is None:
            self._say(Acknowledge())
            self._forget(self)

    def reject(self, reason: str) -> None:
        """Do not take it; the lease ends, the sink's ``ended`` is called if it was not."""
        self._leave(Reject(reason[:4000]), f"rejected here: {reason}")

    def cancel(self, reason: str) -> None:
        """The request is over; the lease ends, the sink's ``ended`` is called if it was not."""
        self._leave(Cancel(reason[:4000]), f"cancelled here: {reason}")

    def fail(self, error: LynxError, *, tell: bool = True) -> None:
        """End with ``error``: no buffer is written any more when ``ended`` is called."""
        if self._over:
            self._forget(self)
            return
        self._over, self._error = True, error
        self._timer.cancel()
        for _, landing in self._open.values():
            self._connection.reader.forget(landing)
        self._open.clear()
        if tell:
            event = Cancel if isinstance(error, DeadlineExceeded) else Reject
            self._say(event(str(error)[:4000]))
        self._forget(self)
        self._finish(error)

    def place(self, header: Header) -> Landing | None:
        """Where a data frame of this transfer goes; None: it is not wanted."""
        if self._over or not self._is_current(header):
            return None
        opened = self._open.get(header.tier)
        if opened is not None and opened[0] == header.segment:
            return opened[1]
        if header.segment not in self._resent:
            self.fail(
                ProtocolError(
                    f"{self!r}: data of segment {header.segment}, which was not announced, in {header.tier!r}"
                )
            )
        return None

    def frame(self, frame: Frame) -> None:
        """A frame of this transfer is in."""
        if self._over:
            if isinstance(frame.event, Failed):
                self._forget(self)
            return
        if not self._is_current(frame.header):
            return
        self._last = self._loop.time()
        try:
            if frame.event is not None:
                self._event(frame.event, frame.header)
            elif frame.landing is not None and self.manifest is not None:
                self._data(frame.header, frame.landing, self.manifest)
        except LynxError as e:
            self.fail(e)
        except Exception as e:
            log.exception("%r: its sink failed", self)
            self.fail(TransferError(f"{self!r}: its sink failed: {e!r}"))

    def _is_current(self, header: Header) -> bool:
        """Whether a frame belongs to this life of the producer and this attempt."""
        if header.generation == self._generation or (not header.generation and header.kind is FrameKind.CONTROL):
            return True
        if header.generation >> 16 != self._epoch:
            self.fail(
                StaleGeneration(
                    f"{self!r}: epoch {self._epoch} expected, got {header.generation >> 16}; it was dropped"
                )
            )
        return False

    def _event(self, event: AnyEvent, header: Header) -> None:
        match event:
            case Failed():
                self.fail(error_of(event), tell=False)
            case _ if header.generation != self._generation:
                raise ProtocolError(f"{self!r}: a {type(event).__name__} without a generation")
            case Manifest():
                self._begin(event)
            case _ if self.manifest is None:
                raise ProtocolError(f"{self!r}: its manifest expected first, got {type(event).__name__}")
            case SegmentReady():
                self._announced(event, self.manifest)
            case FirstToken():
                self._token_due = False
                self._sink.first_token(event)
                self._check_complete()
            case Working():
                pass  # any frame shows that the producer is alive
            case TierEnd(tier):
                self._tier_ended(tier, self.manifest)
            case _:
                raise ProtocolError(f"{self!r}: a {type(event).__name__} is not for a decode node")

    def _begin(self, manifest: Manifest) -> None:
        if self.manifest is not None:
            raise ProtocolError(f"{self!r}: a second manifest")
        if manifest.transfer != self.transfer or manifest.generation != self._generation:
            raise StaleGeneration(
                f"{self!r}: a manifest of generation {self._generation} expected, got {manifest.generation} "
                f"of {manifest.transfer.hex()[:12]}"
            )
        check_manifest(manifest)
        wanted = manifest.clip(self.pull.start, self.pull.stop)
        if (manifest.start, manifest.stop) != wanted:
            raise ProtocolError(f"{self!r}: tokens {wanted} expected, got {(manifest.start, manifest.stop)}")
        if self._fingerprint is not None:
            compare(self._fingerprint, manifest.fingerprint)
        self.manifest = manifest
        self._missing = set(manifest.select(manifest.start, manifest.stop, self.pull.tiers))
        self._token_due = manifest.first_token
        self._timer.cancel()
        self._timer = self._loop.call_later(self._stall_s, self._check_stall)
        self._sink.manifest(manifest)
        self._check_complete()

    def _announced(self, ready: SegmentReady, manifest: Manifest) -> None:
        if ready.segment not in self._missing:
            raise ProtocolError(f"{self!r}: segment {ready.segment} was not pulled, or came before")
        segment = manifest.segments[ready.segment]
        if segment.tier in self._open:
            raise ProtocolError(f"{self!r}: segment {ready.segment} starts inside {self._open[segment.tier][0]}")
        least, most = manifest.bounds(ready.segment)
        if not least <= ready.size <= most:
            raise ProtocolError(f"{self!r}: {describe(segment)} has {least}..{most} bytes, not {ready.size}")
        buffer = self._sink.buffer(ready.segment, ready.size)
        if self._over:
            return
        landing = Landing(buffer, ready.digest)
        if landing.size != ready.size or buffer.readonly:
            given = f"{landing.size} {'read-only' if buffer.readonly else 'writable'}"
            raise TransferError(f"{self!r}: {ready.size} writable bytes expected from its sink, got {given} ones")
        if ready.size:
            self._open[segment.tier] = (ready.segment, landing)
        else:
            self._landed(ready.segment)

    def _data(self, header: Header, landing: Landing, manifest: Manifest) -> None:
        self.received[header.tier] += header.length
        if landing.corrupt:
            self._corrupt(header.segment, manifest.segments[header.segment])
        elif landing.complete:
            del self._open[header.tier]
            self._landed(header.segment)

    def _corrupt(self, number: int, segment: Segment) -> None:
        name = describe(segment)
        if number in self._resent:
            raise CorruptData(f"{self!r}: {name} arrived corrupt twice; the link or the peer's memory is bad")
        log.warning("%r: %s arrived corrupt; asking for it again", self, name)
        self._resent.add(number)
        del self._open[segment.tier]
        self._say(Resend(number))

    def _landed(self, segment: int) -> None:
        self._missing.discard(segment)
        self._sink.landed(segment)
        self._check_complete()

    def _tier_ended(self, tier: Tier, manifest: Manifest) -> None:
        if tier not in self._tiers_left:
            raise ProtocolError(f"{self!r}: {tier.name.lower()} ended, which was not pulled or had ended")
        again = [i for i in self._missing if manifest.segments[i].tier is tier]
        if any(i not in self._resent for i in again):
            raise ProtocolError(f"{self!r}: {tier.name.lower()} ended with {len(again)} segments missing")
        if not again:
            self._tiers_left.discard(tier)
            self._sink.tier_end(tier)
            self._check_complete()

    def _check_complete(self) -> None:
        if not (self._over or self._missing or self._tiers_left or self._token_due):
            self._over = True
            self._timer.cancel()
            self._finish(None)

    def _finish(self, error: LynxError | None) -> None:
        self._done.set_result(None)
        try:
            self._sink.ended(error)
        except Exception:
            log.exception("%r: its sink failed when told of the end; other transfers go on", self)

    def _leave(self, event: Reject | Cancel, text: str) -> None:
        if self._over:
            if self._error is None:
                self._say(event)
                self._forget(self)
            return
        self._say(event)
        self.fail(TransferRejected(f"{self!r}: {text}"), tell=False)

    def _say(self, event: AnyEvent) -> None:
        self._connection.send(event, self.transfer, self._generation)

    def _never_announced(self) -> None:
        error = DeadlineExceeded(f"{self!r}: no manifest within {self.pull.deadline_s:g} s; ask the prefill node why")
        self.fail(error)

    def _check_stall(self) -> None:
        if self._connection.reader.receiving == self.transfer:
            self._last = max(self._last, self._connection.last_bytes)
        left = self._last + self._stall_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_stall)
            return
        error = DeadlineExceeded(
            f"{self!r}: nothing arrived for {self._stall_s:g} s with {len(self._missing)} segments missing"
        )
        self.fail(error)
