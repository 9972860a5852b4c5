"""The receiving end of one transfer: what the link's loop lands, the decoding thread picks up."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lynxkv.codec import BLOCK, CacheShape, CodecSpec, Tier
from lynxkv.errors import DeadlineExceeded, LynxError, ProtocolError, TransferError
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.spans import CHUNK, Buffer
from lynxkv.wire import FirstToken, Manifest


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a transfer, at ``time.monotonic()`` seconds.

    ``what`` is ``room`` (memory is reserved, ``size`` bytes), ``manifest`` (``size``: number of segments),
    ``first_token``, ``segment`` (with its tier and bytes), ``anchor`` or ``target`` (all of it written into the
    session), ``lost`` or ``recomputed``.
    """

    at: float
    what: str
    tier: Tier | None = None
    size: int = 0


Observer = Callable[[Moment], None]


class Arrivals:
    """A sink for one transfer (see :class:`lynxkv.transport.Sink`).

    Parameters
    ----------
    digest : bytes
        Of the tokens asked for: another prompt's KV is refused.
    shape, spec
        What this node expects the manifest to say.
    vocab, seed
        Token 1 is one of so many ids, and was drawn with this seed.
    room, grow
        Bytes reserved for all segments, and what reserves more of them or raises.
    cancellation : Cancellation
        Ends every wait; register :meth:`wake` with it.
    observe : callable
        Called for every moment, on the loop's thread.
    """

    def __init__(
        self,
        digest: bytes,
        shape: CacheShape,
        spec: CodecSpec,
        *,
        vocab: int,
        seed: int,
        room: int,
        grow: Callable[[int], None],
        cancellation: Cancellation,
        observe: Observer,
    ) -> None:
        self._digest, self._shape, self._spec = digest, shape, spec
        self._vocab, self._seed = vocab, seed
        self._room, self._grow = room, grow
        self._cancellation = cancellation
        self._observe = observe
        self._changed = threading.Condition()
        self._buffers: dict[int, Buffer] = {}
        self._landed: deque[int] = deque()
        self._first: FirstToken | None = None
        self._manifest: Manifest | None = None
        self._error: LynxError | None = None
        self._over = False
        self._dropped = False

    # Called by the link, on its loop.

    def manifest(self, manifest: Manifest) -> None:
        """Refuse what is not the KV asked for."""
        for what, ours, theirs in (
            ("token digest", self._digest.hex(), manifest.digest.hex()),
            ("cache shape", self._shape, manifest.shape),
            ("codec spec", self._spec, manifest.spec),
        ):
            if ours != theirs:
                raise ProtocolError(f"{what} differs from what was asked for: expected {ours}, got {theirs}")
        with self._changed:
            self._manifest = manifest
            self._changed.notify_all()
        self._observe(Moment(time.monotonic(), "manifest", size=len(manifest.segments)))

    def buffer(self, segment: int, size: int) -> memoryview:
        """Where a segment's bytes go, for good; CapacityExceeded if it is larger than its shape and memory is full."""
        if segment not in self._buffers:  # else it arrived corrupt and comes again
            self._room -= size
        if self._room < 0:
            self._grow(-self._room)
            self._room = 0
        buffer = np.empty(size, dtype=np.uint8)
        with self._changed:
            if self._dropped:
                raise TransferError("the request is over")
            self._buffers[segment] = buffer
        return buffer.data

    def landed(self, segment: int) -> None:
        """Every byte of ``segment`` is in and checked."""
        with self._changed:
            if self._dropped:
                return
            self._landed.append(segment)
            manifest, size = self._manifest, self._buffers[segment].nbytes
            self._changed.notify_all()
        tier = manifest.segments[segment].tier if manifest else None
        self._observe(Moment(time.monotonic(), "segment", tier, size))

    def first_token(self, event: FirstToken) -> None:
        """Token 1 came; refuse what this request's sampler cannot have drawn."""
        if not 0 <= event.token < self._vocab or event.seed != self._seed:
            raise ProtocolError(
                f"token 1 of 0..{self._vocab - 1} drawn with seed {self._seed} expected, "
                f"got {event.token} with seed {event.seed}"
            )
        with self._changed:
            self._first = event
            self._changed.notify_all()
        self._observe(Moment(time.monotonic(), "first_token"))

    def tier_end(self, tier: Tier) -> None:
        """Nothing to do: segments are counted."""

    def ended(self, error: LynxError | None) -> None:
        """Nothing more will come."""
        with self._changed:
            self._error, self._over = error, True
            self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again whether the request was cancelled; any thread."""
        with self._changed:
            self._changed.notify_all()

    # Called by the decoding thread.

    @property
    def token(self) -> FirstToken | None:
        """Token 1, once it is here."""
        with self._changed:
            return self._first

    def take(self, until: float | None = None, *, or_token: bool = False) -> list[tuple[int, Buffer]]:
        """Segments that landed since the last call, now the caller's.

        With ``until``, waits for at least one; with ``or_token``, for that or for token 1. The transfer's error is
        raised once nothing that landed before it is left.
        """
        with self._changed:
            if until is not None:
                what = "token 1" if or_token else "a segment"
                self._wait(lambda: bool(self._landed) or (or_token and self._first is not None), until, what)
            elif self._error is not None and not self._landed:
                self._cancellation.check()  # which ends the transfer, too
                raise self._error
            taken = [(segment, self._buffers.pop(segment)) for segment in self._landed]
            self._landed.clear()
            return taken

    def current(self, until: float) -> Manifest:
        """The manifest; the transfer's error if it ended before."""
        with self._changed:
            self._wait(lambda: self._manifest is not None, until, "the manifest")
            assert self._manifest is not None
            return self._manifest

    def drop(self) -> None:
        """Free every buffer; what still comes is refused."""
        with self._changed:
            self._dropped = True
            self._buffers.clear()
            self._landed.clear()

    @property
    def chunk(self) -> int:
        """Tokens of the producer's prefill chunk, as its segments show; a prompt within one chunk rounds up."""
        manifest = self._manifest
        longest = max((s.span.stop - s.span.start for s in manifest.segments), default=CHUNK) if manifest else CHUNK
        return -(-longest // BLOCK) * BLOCK

    @property
    def held_bytes(self) -> int:
        """Bytes in buffers not yet taken."""
        with self._changed:
            return sum(buffer.nbytes for buffer in self._buffers.values())

    def _wait(self, there: Callable[[], bool], until: float, what: str) -> None:
        while not there():
            self._cancellation.check()
            if self._error is not None:
                raise self._error
            if self._over:
                raise ProtocolError(f"the transfer ended without {what}")
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{what} did not come before the request's deadline")
            self._changed.wait(left)
