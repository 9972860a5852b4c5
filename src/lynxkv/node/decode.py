"""The decode node's conductor: reserve memory, pull, write, draft, verify, decode."""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from lynxkv.codec import CacheShape, CodecSpec, Tier, plan, segment_bounds
from lynxkv.engine.base import Engine, KVSession
from lynxkv.errors import LynxError, RequestError
from lynxkv.node.admission import sampling_to_wire, tokens_to_bytes
from lynxkv.node.arrivals import Arrivals, Moment, Observer
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.holdings import DecodeHoldings, DecodeTotals
from lynxkv.node.links import Links, Peer
from lynxkv.node.pulling import Order, Pulling, keeping
from lynxkv.node.refinement import LOSS, PulledRefinement, SpanWriter
from lynxkv.node.request import Generation, OnLoss, Outcome, Request
from lynxkv.node.room import Room
from lynxkv.node.spans import CHUNK, encode_prefill, warm
from lynxkv.node.times import Stopwatch, Times
from lynxkv.node.turns import SessionInTurns, Turns, in_turns
from lynxkv.speculation import Answer, Draw, Event, Logits, Sampler, Speculator, Window
from lynxkv.transport import OPEN, Link, Security
from lynxkv.wire import Admit, Hello, Pull, token_digest

__all__ = ["DecodeNode", "Generation", "OnLoss", "Outcome", "Request", "Times"]

log = logging.getLogger(__name__)

CLOSED = "the decode node was closed"


@dataclass(slots=True, eq=False)
class _Run:
    """What one request holds while it runs."""

    cancellation: Cancellation
    session: KVSession | None = None
    refinement: PulledRefinement | None = None
    loss: LynxError | None = None
    window: Window = field(default_factory=lambda: Window(0, 0))


class DecodeNode:
    """Decodes answers from the KV of prefill nodes, many at a time.

    Each runs on the thread that iterates it; their forward passes take turns, one each, in the order they are asked
    for. Sockets live on a loop in a thread of their own.

    Parameters
    ----------
    engine : Engine
    connect_s, admit_s : float
        Deadlines of a connection and of an admission.
    stall_s : float
        A transfer that brings no byte for so long is lost.
    memory_bytes : int or None
        Bound of all requests' KV and compressed bytes together; a request waits until it fits. None: no bound.
    max_queue : int
        Requests that may wait for memory; one more is refused.
    security : Security or None
        Whom to trust; None: everyone.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        connect_s: float = 10.0,
        admit_s: float = 60.0,
        stall_s: float = 30.0,
        memory_bytes: int | None = None,
        max_queue: int = 64,
        name: str = "",
        security: Security | None = None,
    ) -> None:
        self.engine = engine
        self._admit_s, self._stall_s = admit_s, stall_s
        self._turns = Turns()
        self._room = Room(memory_bytes, max_queue)
        self._lock = threading.Lock()
        self._closing = False
        self._runs: set[_Run] = set()
        self._received: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        known = security or OPEN
        hello = Hello(role="decode", name=name, fingerprint=engine.fingerprint, secret=known.secret)
        self._links = Links(hello, connect_s, known.client_context())

    def __enter__(self) -> "DecodeNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel every request, close every link, end the thread; idempotent."""
        with self._lock:
            self._closing = True
            runs = list(self._runs)
        for run in runs:
            run.cancellation.cancel(CLOSED)
        self._links.close()

    def warm(self, specs: Sequence[CodecSpec]) -> None:
        """Compile the codec's kernels for ``specs``, so that no request waits for it."""
        for spec in specs:
            warm(self.engine, spec)

    def holdings(self) -> DecodeHoldings:
        """What is held right now."""
        with self._lock:
            runs = list(self._runs)
        sessions = [session for run in runs if (session := run.session) is not None]
        refinements = [refinement for run in runs if (refinement := run.refinement) is not None]
        links, pulls = self._links.held()
        return DecodeHoldings(
            running=self._room.holders,
            waiting=self._room.waiting,
            kv_bytes=sum(session.nbytes for session in sessions),
            staged_bytes=sum(refinement.held_bytes for refinement in refinements),
            memory_bytes=self._room.used_bytes,
            links=links,
            pulls=pulls,
        )

    def totals(self) -> DecodeTotals:
        """What was done so far."""
        with self._lock:
            received = {tier.name.lower(): self._received[tier.name.lower()] for tier in Tier}
            return DecodeTotals(received_bytes=received, losses=dict(self._losses))

    def prepare(self, peer: Peer, tokens: Sequence[int], spec: CodecSpec, *, deadline_s: float) -> None:
        """Have ``peer`` prefill and encode ``tokens`` and keep the entry; returns when it is there."""
        transfer = secrets.token_bytes(16)
        admit = Admit(transfer=transfer, tokens=tokens_to_bytes(tokens), spec=spec, options={"wait": True})

        async def run() -> None:
            link: Link = await self._links.to(peer)
            await link.admit(admit, deadline_s=deadline_s)
            link.cancel(transfer, "only the entry was asked for")

        self._links.call(run())

    def keeping(self, peer: Peer, transfer: bytes) -> AbstractContextManager[None]:
        """Keep the lease of a transfer that was admitted elsewhere while its request waits for its turn.

        Left with an error, the transfer is cancelled unless it is being pulled.
        """
        return keeping(self._links, peer, transfer)

    def generate(self, peer: Peer, request: Request, observe: Observer = lambda _: None) -> Generation:
        """Decode one answer; nothing happens before the first event is asked for.

        ``observe`` hears what the transfer does, from several threads. Iterating raises:

        Raises
        ------
        PromptTooLong, RequestError
            The request cannot be run.
        CapacityExceeded, Overloaded
            It needs more memory than there is, or than is free, and as many wait as may.
        Cancelled
            :meth:`Generation.cancel` was called, or the node closed.
        HandshakeRefused
            The peer runs another model, or other options.
        TransferError, CorruptData, ProtocolError
            The KV did not come and ``on_loss`` is "fail".
        LynxError
            Whatever the peer refused the prompt with.
        """
        if self._closing:
            raise RequestError("this decode node was closed; make another one")
        cancellation = Cancellation()
        return Generation(self._generate(peer, request, observe, cancellation), cancellation)

    def _generate(
        self, peer: Peer, request: Request, observe: Observer, cancellation: Cancellation
    ) -> Generator[Event, None, Outcome]:
        watch = Stopwatch()
        until = time.monotonic() + request.deadline_s
        cancellation.check()
        params = request.params.seeded()
        engine, tokens = self.engine, list(request.tokens)
        engine.check_prompt(tokens, params.max_tokens)
        shape = engine.shape(len(tokens))
        sampler = Sampler(params, tokens, engine.eos)
        answer = Answer(params, engine.eos, engine.decode if engine.has_text else None)
        packed = tokens_to_bytes(tokens)
        transfer = request.transfer or secrets.token_bytes(16)
        capacity, append = len(tokens) + params.max_tokens, request.cap + 1
        staged = _staged_bytes(shape, request.spec)
        size = engine.session_bytes(capacity, append) + staged
        if request.on_loss == "recompute":  # it fills a session of its own first
            size += engine.session_bytes(len(tokens), CHUNK)

        def hear(moment: Moment) -> None:
            watch.moment(moment)
            if moment.what == "segment" and moment.tier is not None:
                self._count(self._received, moment.tier.name.lower(), moment.size)
            observe(moment)

        with ExitStack() as held:
            run = held.enter_context(self._running(cancellation))
            with keeping(self._links, peer, transfer) if request.transfer else nullcontext():
                reservation = held.enter_context(self._room.reserved(size, cancellation, until))
            hear(Moment(time.monotonic(), "room", size=size))
            arrivals = Arrivals(
                token_digest(packed),
                shape,
                request.spec,
                vocab=engine.vocab,
                seed=params.seed or 0,
                room=staged,
                grow=reservation.grow,
                cancellation=cancellation,
                observe=hear,
            )
            order = Order(
                peer=peer,
                admit=None
                if request.transfer
                else Admit(transfer=transfer, tokens=packed, spec=request.spec, sampling=sampling_to_wire(params)),
                pull=Pull(
                    transfer=transfer,
                    tiers=tuple(tier for tier in Tier if tier <= request.spec.target),
                    deadline_s=request.deadline_s,
                    epoch=request.epoch,
                ),
                admit_s=min(self._admit_s, request.deadline_s),
                stall_s=self._stall_s,
            )
            pulling = Pulling(self._links, order, arrivals)
            held.callback(pulling.cancel, "the request is over")
            held.enter_context(cancellation.waking(arrivals.wake))
            held.enter_context(cancellation.waking(lambda: pulling.cancel(cancellation.reason or "")))
            pulling.start()
            session = run.session = engine.open(capacity, append)  # while the first bytes travel
            session.place(shape)

            def recover(error: LynxError) -> Draw:
                log.warning("transfer %s is lost (%s); prefilling here instead", transfer.hex()[:12], error)
                run.loss = error
                self._count(self._losses, type(error).__name__)
                pulling.cancel("recomputed here")
                logits = self._recompute(session, tokens, shape, request.spec, arrivals.chunk, cancellation)
                return sampler.draw(logits, [])

            refinement = run.refinement = PulledRefinement(
                arrivals,
                session,
                until=until,
                cancellation=cancellation,
                recover=recover if request.on_loss == "recompute" else None,
                completed=pulling.acknowledge,
                observe=hear,
            )
            speculator = Speculator(
                SessionInTurns(session, self._turns, cancellation),
                sampler,
                answer,
                refinement,
                verify=request.verify,
                cap=request.cap,
            )
            try:
                for event in speculator.run():
                    watch.event(event)
                    if isinstance(event, Window):
                        run.window = event
                    yield event
                    cancellation.check()
            except LOSS as error:
                cancellation.check()
                self._count(self._losses, type(error).__name__)
                raise
        return Outcome(
            tokens=answer.tokens,
            text=answer.text,
            finish=answer.finish or "",
            seed=params.seed or 0,
            drafted=run.window.drafted,
            accepted=run.window.accepted,
            bytes={tier.name.lower(): pulling.received[tier] for tier in Tier},
            wire_bytes=pulling.wire_bytes,
            loss=None if run.loss is None else str(run.loss),
            target="exact" if request.spec.raw or request.spec.exact else "residual",
            times=watch.stop(),
        )

    @contextmanager
    def _running(self, cancellation: Cancellation) -> Iterator[_Run]:
        run = _Run(cancellation)
        with self._lock:
            self._runs.add(run)
            closing = self._closing
        try:
            if closing:
                cancellation.cancel(CLOSED)
            yield run
        finally:
            with self._lock:
                self._runs.discard(run)
            # An error that somebody keeps refers to all this by its traceback: what is large is freed here.
            if run.session is not None:
                run.session.close()
            if run.refinement is not None:
                run.refinement.close()
            run.session = run.refinement = None

    def _count(self, counter: Counter[str], name: str, count: int = 1) -> None:
        with self._lock:
            counter[name] += count

    def _recompute(
        self,
        session: KVSession,
        tokens: list[int],
        shape: CacheShape,
        spec: CodecSpec,
        chunk: int,
        cancellation: Cancellation,
    ) -> Logits:
        """Prefill here as the peer would, through the codec, so that the answer is the same."""
        segments = plan(shape, spec, segment_tokens=chunk)
        writer = SpanWriter(session, shape, spec, segments)
        return encode_prefill(
            self.engine,
            tokens,
            chunk,
            shape,
            spec,
            segments,
            writer.put,
            paced=lambda steps: in_turns(steps, self._turns, cancellation),
        )


def _staged_bytes(shape: CacheShape, spec: CodecSpec) -> int:
    """Bytes of all segments. The producer's may be shorter, which takes up to 1 % more for their directories."""
    size = sum(segment_bounds(shape, spec, segment)[0] for segment in plan(shape, spec, segment_tokens=CHUNK))
    return size + size // 64
