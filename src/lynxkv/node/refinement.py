"""From landed segments to KV in the session: anchor first, then refined in place up to the target."""

import time
from collections.abc import Callable, Collection

from lynxkv.codec import CacheShape, CodecSpec, Segment, Span, Tier, check
from lynxkv.engine.base import KVSession, Rows
from lynxkv.errors import CorruptData, LynxError, ProtocolError, TransferError
from lynxkv.node.arrivals import Arrivals, Moment, Observer
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.spans import Buffer, decode_span
from lynxkv.speculation import Draw

LOSS = (TransferError, CorruptData, ProtocolError)
"""Errors after which the KV will not come."""

Recover = Callable[[LynxError], Draw]


class SpanWriter:
    """Writes spans of one entry into a session; keeps an anchor's bytes until its residual came.

    Parameters
    ----------
    session : Rows
        With the shape's rows placed.
    segments : sequence of Segment
        All there are.
    wanted : collection of int or None
        Numbers of those that will come; None: all.

    Attributes
    ----------
    held_bytes : int
        Bytes of segments kept for those still to come.
    """

    def __init__(
        self,
        session: Rows,
        shape: CacheShape,
        spec: CodecSpec,
        segments: tuple[Segment, ...],
        wanted: Collection[int] | None = None,
    ) -> None:
        self._session, self._shape, self._spec = session, shape, spec
        self._segments = segments
        come = segments if wanted is None else [segments[i] for i in wanted]
        self._missing = {tier: {s.span for s in come if s.tier is tier} for tier in Tier}
        self._waiting: dict[Span, dict[Tier, Buffer]] = {}
        self.held_bytes = 0

    def done(self, tier: Tier) -> bool:
        """Whether every row is written with all of ``tier``."""
        return not self._missing[tier]

    @property
    def complete(self) -> bool:
        """Whether every segment is written."""
        return not any(self._missing.values())

    def put(self, index: int, buffer: Buffer) -> None:
        """Write segment ``index`` as far as it can be; CorruptData names what is wrong with it."""
        segment = self._segments[index]
        span, tier = segment.span, segment.tier
        if span not in self._missing[tier]:
            raise ProtocolError(f"segment {index} came a second time")
        check(self._shape, self._spec, segment, buffer)
        self._missing[tier].discard(span)
        tiers = self._waiting.setdefault(span, {})
        tiers[tier] = buffer
        self.held_bytes += buffer.nbytes
        anchor, residual = tiers.get(Tier.ANCHOR), tiers.get(Tier.RESIDUAL)
        if anchor is None:
            return
        decode_span(self._session, self._shape, self._spec, span, anchor, residual)
        if span not in self._missing[Tier.RESIDUAL]:
            self.held_bytes -= sum(held.nbytes for held in self._waiting.pop(span).values())

    def drop(self) -> None:
        """Free what is kept."""
        self._waiting.clear()
        self.held_bytes = 0


class PulledRefinement:
    """The speculator's refinement over a pulled transfer (see :class:`lynxkv.speculation.Refinement`).

    Parameters
    ----------
    arrivals : Arrivals
    session : KVSession
        With the shape's rows placed.
    until : float
        ``time.monotonic()`` by which the KV has to be there.
    cancellation : Cancellation
        Of the request: what is lost because of it stays lost.
    recover : callable or None
        Fills the session to the target by other means and gives token 1; ``None``: a loss is raised.
    completed : callable
        Called once when every byte of the target is written.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        session: KVSession,
        *,
        until: float,
        cancellation: Cancellation,
        recover: Recover | None,
        completed: Callable[[], None],
        observe: Observer,
    ) -> None:
        self._arrivals, self._session = arrivals, session
        self._until = until
        self._cancellation = cancellation
        self._recover, self._completed, self._observe = recover, completed, observe
        self._writer: SpanWriter | None = None
        self._recovered: Draw | None = None

    @property
    def held_bytes(self) -> int:
        """Compressed bytes held for this transfer."""
        writer = self._writer
        return self._arrivals.held_bytes + (writer.held_bytes if writer is not None else 0)

    def close(self) -> None:
        """Free the compressed bytes; nothing is written any more."""
        self._arrivals.drop()
        if self._writer is not None:
            self._writer.drop()

    def first(self) -> Draw:
        """Token 1 of the prefill node; meanwhile, segments are written as they land."""
        try:
            while (event := self._arrivals.token) is None:
                self._write(block=True, or_token=True)
        except LOSS as error:
            return self._lost(error)
        return Draw(event.token, event.logprob, tuple(event.top_logprobs))

    def ready(self) -> None:
        """Write segments as they land until the anchor is whole."""
        try:
            while self._recovered is None and not self._writing().done(Tier.ANCHOR):
                self._write(block=True)
        except LOSS as error:
            self._lost(error)
        if self._recovered is None:
            self._observe(Moment(time.monotonic(), "anchor"))

    def refine(self, block: bool) -> bool:
        """Write what has landed; with ``block``, all of it. Whether the target is complete."""
        try:
            while self._recovered is None and not self._writing().complete:
                if not self._write(block) and not block:
                    return False
        except LOSS as error:
            self._lost(error)
        return True

    def _writing(self) -> SpanWriter:
        if self._writer is None:
            manifest = self._arrivals.current(self._until)
            self._writer = SpanWriter(self._session, manifest.shape, manifest.spec, manifest.segments)
        return self._writer

    def _write(self, block: bool, *, or_token: bool = False) -> bool:
        """Write what has landed; whether that was anything."""
        writer = self._writing()
        taken = self._arrivals.take(self._until if block else None, or_token=or_token)
        for index, buffer in taken:
            writer.put(index, buffer)
        if taken and writer.complete:
            self._observe(Moment(time.monotonic(), "target"))
            self._completed()
        return bool(taken)

    def _lost(self, error: LynxError) -> Draw:
        self._cancellation.check()
        if self._recover is None:
            raise error
        self._observe(Moment(time.monotonic(), "lost"))
        self._recovered = self._recover(error)
        self._observe(Moment(time.monotonic(), "recomputed"))
        return self._recovered
