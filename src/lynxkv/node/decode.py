"""The decode node's conductor: pull, write, draft, verify, decode."""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, TypeVar

import uvloop

from lynxkv.codec import CacheShape, CodecSpec, Tier, plan
from lynxkv.engine.base import Engine, KVSession
from lynxkv.errors import LynxError, RequestError, TransferError
from lynxkv.node.admission import sampling_to_wire, tokens_to_bytes
from lynxkv.node.arrivals import Arrivals, Observer
from lynxkv.node.refinement import PulledRefinement, SpanWriter
from lynxkv.node.spans import encode_prefill, warm
from lynxkv.speculation import CAP, Answer, Draw, Event, Logits, Sampler, SamplingParams, Speculator, Verify, Window
from lynxkv.transport import Incoming, Link, connect
from lynxkv.wire import Admit, Hello, Pull, token_digest

log = logging.getLogger(__name__)

OnLoss = Literal["fail", "recompute"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be decoded from the KV of a prefill node.

    Parameters
    ----------
    tokens : tuple of int
        The prompt.
    params : SamplingParams
        Without a seed one is drawn.
    spec : CodecSpec
        How the KV is sent; its target is the precision of the answer.
    verify, cap
        As for :class:`lynxkv.speculation.Speculator`.
    on_loss : {"fail", "recompute"}
        What happens when the KV does not come: a typed error, or a prefill here at the same target.
    deadline_s : float
        By when the KV has to be there.
    """

    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    spec: CodecSpec = field(default_factory=CodecSpec)
    verify: Verify = "batched"
    cap: int = CAP
    on_loss: OnLoss = "fail"
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        if not all(isinstance(token, Integral) for token in self.tokens):
            raise RequestError("tokens must be integers; encode text with Engine.encode or Engine.chat first")
        if self.cap < 0:
            raise RequestError(f"the draft cap must be >= 0, got {self.cap}")
        if self.verify not in ("batched", "stepwise"):
            raise RequestError(f"verify must be 'batched' or 'stepwise', got {self.verify!r}")
        if self.on_loss not in ("fail", "recompute"):
            raise RequestError(f"on_loss must be 'fail' or 'recompute', got {self.on_loss!r}")
        if not 0 < self.deadline_s <= 86400:
            raise RequestError(f"deadline_s must be above 0 and at most 86400 seconds, got {self.deadline_s}")


@dataclass(slots=True)
class Outcome:
    """What is known of an answer once it is finished.

    ``bytes`` are payload bytes received by tier; ``wire_bytes`` all that the link received meanwhile, headers and
    events included.
    """

    tokens: list[int]
    text: str
    finish: str
    seed: int
    drafted: int
    accepted: int
    bytes: dict[str, int]
    wire_bytes: int
    loss: str | None


class Generation(Iterator[Event]):
    """Speculation's events of one answer as they happen; ``outcome`` is there once they have ended."""

    def __init__(self, steps: Generator[Event, None, Outcome]) -> None:
        self._steps = steps
        self._outcome: Outcome | None = None

    def __next__(self) -> Event:
        try:
            return next(self._steps)
        except StopIteration as end:
            self._outcome = end.value or self._outcome
            raise

    def close(self) -> None:
        """Cancel what is still running."""
        self._steps.close()

    @property
    def outcome(self) -> Outcome:
        """What is known of the finished answer; RequestError before its end."""
        if self._outcome is None:
            raise RequestError("the outcome is known once every event was taken; this answer has not ended")
        return self._outcome


@dataclass(slots=True)
class _Run:
    """What one request holds while it runs."""

    transfer: bytes
    link: Link | None = None
    incoming: Incoming | None = None
    loss: LynxError | None = None
    window: Window = field(default_factory=lambda: Window(0, 0))
    wire_before: int = 0
    complete: bool = False


class DecodeNode:
    """Decodes answers from the KV of prefill nodes. Sockets live on a loop in a thread of its own.

    Parameters
    ----------
    engine : Engine
    connect_s, admit_s : float
        Deadlines of a connection and of an admission.
    stall_s : float
        A transfer that brings no byte for so long is lost.
    """

    def __init__(
        self, engine: Engine, *, connect_s: float = 10.0, admit_s: float = 60.0, stall_s: float = 30.0, name: str = ""
    ) -> None:
        self.engine = engine
        self._connect_s, self._admit_s, self._stall_s = connect_s, admit_s, stall_s
        self._hello = Hello(role="decode", name=name, fingerprint=engine.fingerprint)
        self._links: dict[tuple[str, int], Link] = {}
        self._connecting: dict[tuple[str, int], asyncio.Lock] = {}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lynxkv-links", daemon=True)
        self._thread.start()

    def __enter__(self) -> "DecodeNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is pulled, close every link, end the thread; idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for link in self._links.values():
            await link.close()
        self._links.clear()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def warm(self, specs: Sequence[CodecSpec]) -> None:
        """Compile the codec's kernels for ``specs``, so that no request waits for it."""
        for spec in specs:
            warm(self.engine, spec)

    def prepare(self, peer: tuple[str, int], tokens: Sequence[int], spec: CodecSpec, *, deadline_s: float) -> None:
        """Have ``peer`` prefill and encode ``tokens`` and keep the entry; returns when it is there."""
        transfer = secrets.token_bytes(16)
        admit = Admit(transfer=transfer, tokens=tokens_to_bytes(tokens), spec=spec, options={"wait": True})

        async def run() -> None:
            link = await self._link(peer)
            await link.admit(admit, deadline_s=deadline_s)
            link.cancel(transfer, "only the entry was asked for")

        self._call(run())

    def generate(self, peer: tuple[str, int], request: Request, observe: Observer = lambda _: None) -> "Generation":
        """Decode one answer; nothing happens before the first event is asked for.

        ``observe`` hears what the transfer does, from several threads. Iterating raises:

        Raises
        ------
        PromptTooLong, RequestError
            The request cannot be run.
        HandshakeRefused
            The peer runs another model, or other options.
        TransferError, CorruptData, ProtocolError
            The KV did not come and ``on_loss`` is "fail".
        LynxError
            Whatever the peer refused the prompt with.
        """
        if self._loop.is_closed():
            raise RequestError("this decode node was closed; make another one")
        return Generation(self._generate(peer, request, observe))

    def _generate(self, peer: tuple[str, int], request: Request, observe: Observer) -> Generator[Event, None, Outcome]:
        params = request.params.seeded()
        engine, tokens = self.engine, list(request.tokens)
        engine.check_prompt(tokens, params.max_tokens)
        shape = engine.shape(len(tokens))
        run = _Run(secrets.token_bytes(16))
        packed = tokens_to_bytes(tokens)
        arrivals = Arrivals(token_digest(packed), shape, request.spec, engine.vocab, params.seed or 0, observe)
        sampler = Sampler(params, tokens, engine.eos)
        answer = Answer(params, engine.eos, engine.decode if engine.has_text else None)
        admit = Admit(transfer=run.transfer, tokens=packed, spec=request.spec, sampling=sampling_to_wire(params))
        asked = asyncio.run_coroutine_threadsafe(self._pull(peer, admit, arrivals, run, request), self._loop)
        try:
            session = engine.open(len(tokens) + params.max_tokens, request.cap + 1)  # while the first bytes travel
            session.place(shape)

            def recover(error: LynxError) -> Draw:
                log.warning("transfer %s is lost (%s); prefilling here instead", run.transfer.hex()[:12], error)
                run.loss = error
                self._cancel(run, "recomputed here")
                return sampler.draw(self._recompute(session, tokens, shape, request.spec, arrivals.chunk), [])

            refinement = PulledRefinement(
                arrivals,
                session,
                until=time.monotonic() + request.deadline_s,
                recover=recover if request.on_loss == "recompute" else None,
                completed=lambda: self._acknowledge(run),
                observe=observe,
            )
            speculator = Speculator(session, sampler, answer, refinement, verify=request.verify, cap=request.cap)
            for event in speculator.run():
                if isinstance(event, Window):
                    run.window = event
                yield event
        finally:
            asked.cancel()
            self._cancel(run, "the request is over")
        received = run.incoming.received if run.incoming else [0] * len(Tier)
        return Outcome(
            tokens=answer.tokens,
            text=answer.text,
            finish=answer.finish or "",
            seed=params.seed or 0,
            drafted=run.window.drafted,
            accepted=run.window.accepted,
            bytes={tier.name.lower(): received[tier] for tier in Tier},
            wire_bytes=run.link.received_bytes - run.wire_before if run.link else 0,
            loss=None if run.loss is None else str(run.loss),
        )

    def _recompute(
        self, session: KVSession, tokens: list[int], shape: CacheShape, spec: CodecSpec, chunk: int
    ) -> Logits:
        """Prefill here as the peer would, through the codec, so that the answer is the same."""
        segments = plan(shape, spec, segment_tokens=chunk)
        writer = SpanWriter(session, shape, spec, segments)
        return encode_prefill(self.engine, tokens, chunk, shape, spec, segments, writer.put)

    async def _pull(self, peer: tuple[str, int], admit: Admit, arrivals: Arrivals, run: _Run, request: Request) -> None:
        """Admit and pull; whatever goes wrong reaches the decoding thread through ``arrivals``."""
        try:
            link = run.link = await self._link(peer)
            run.wire_before = link.received_bytes
            admitted = await link.admit(admit, deadline_s=min(self._admit_s, request.deadline_s))
            tiers = tuple(tier for tier in Tier if tier <= request.spec.target)
            pull = Pull(transfer=run.transfer, tiers=tiers, deadline_s=request.deadline_s, epoch=admitted.epoch)
            run.incoming = await link.pull(pull, arrivals, stall_s=self._stall_s)
        except LynxError as error:
            arrivals.ended(error)
        except Exception as error:  # the loop's edge: the thread that waits is told
            log.exception("transfer %s could not be pulled", run.transfer.hex()[:12])
            arrivals.ended(TransferError(f"the transfer could not be pulled: {type(error).__name__}: {error}"))

    async def _link(self, peer: tuple[str, int]) -> Link:
        async with self._connecting.setdefault(peer, asyncio.Lock()):  # requests at once share one connection
            link = self._links.get(peer)
            if link is None or link.error is not None:
                link = self._links[peer] = await connect(*peer, self._hello, deadline_s=self._connect_s)
            return link

    def _acknowledge(self, run: _Run) -> None:
        """Every byte is used: end the lease as soon as the transfer itself has ended."""
        run.complete = True
        if run.incoming is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(_acknowledge(run.incoming), self._loop)

    def _cancel(self, run: _Run, reason: str) -> None:
        if run.link is not None and not run.complete and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(run.link.cancel, run.transfer, reason)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop's thread; an interrupt here cancels it there."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _acknowledge(incoming: Incoming) -> None:
    with suppress(LynxError):  # the bytes are all here and used: how the lease ends is the peer's affair
        await incoming.wait()
        incoming.acknowledge()
