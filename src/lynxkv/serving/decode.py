"""The decode worker: takes requests with a transfer's whereabouts, pulls the KV, and answers."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from lynxkv.node.arrivals import Moment
from lynxkv.node.decode import DecodeNode, Outcome, Request
from lynxkv.serving.activity import Tracked
from lynxkv.serving.ask import Ask
from lynxkv.serving.choice_run import follow
from lynxkv.serving.exchange import Reply, encode
from lynxkv.serving.logs import about
from lynxkv.serving.rendering import Choice, Drafts, Rendering, usage
from lynxkv.serving.slots import Slots
from lynxkv.serving.transfer import ToDecode, read_to_decode
from lynxkv.serving.worker import WorkerService, check_seed, spec_of
from lynxkv.speculation import Drafted, Event, Retracted, Verified, Window

_STATES = {"room": "prefill", "manifest": "anchor", "anchor": "residual"}
"""What a request is in after a moment of its transfer."""


class DecodeService(WorkerService):
    """Answers requests whose KV a prefill worker holds, or will hold.

    Parameters
    ----------
    node : DecodeNode
    model : str
        Its name towards clients.
    max_running, max_queue : int
        Choices in work at a time, and those that may wait for their turn; one more is refused.
    """

    def __init__(
        self, node: DecodeNode, *, model: str, max_running: int = 16, max_queue: int = 64, **options: Any
    ) -> None:
        super().__init__("decode", node.engine, model=model, **options)
        self.node = node
        self.slots = Slots(max_running, max_queue)
        self._threads = ThreadPoolExecutor(max_running, thread_name_prefix="decode")

    async def start(self) -> None:
        """Compile the codec's kernels, so that no request waits for it."""
        await asyncio.to_thread(self.node.warm, [spec_of("residual")])

    async def close(self) -> None:
        """End what still runs, and every link."""
        self.tokenizer.close()
        await asyncio.to_thread(self.node.close)
        await asyncio.to_thread(self._threads.shutdown)

    def health(self) -> dict[str, Any]:
        """What is held."""
        return self.about | {"holdings": asdict(self.node.holdings()) | {"queued": self.slots.waiting}}

    async def answer(self, ask: Ask, reply: Reply, tracked: Tracked) -> None:
        """Pull, decode and answer; a failure before token 1 has its own status."""
        where = read_to_decode(ask.transfer)
        with about(transfer=where.transfer_id), self.node.keeping(where.peer, where.transfer):
            await self._answer(ask, where, reply, tracked)

    async def _answer(self, ask: Ask, where: ToDecode, reply: Reply, tracked: Tracked) -> None:
        check_seed(ask, where.seed)
        self.slots.check(ask.n)
        tokens = await self.tokenizer.of(ask)
        tracked.transfer, tracked.prompt_tokens = where.transfer_id, len(tokens)
        params = replace(ask.params, seed=where.seed, max_tokens=self.tokenizer.room(tokens, ask))
        requests = [
            Request(
                tokens=tuple(tokens),
                params=replace(params, sample=i),
                spec=spec_of(ask.lynx.target),
                verify=ask.lynx.verify,
                cap=ask.lynx.cap,
                on_loss=ask.lynx.on_loss,
                deadline_s=ask.lynx.deadline_s,
                transfer=where.transfer if i == 0 else None,  # the others admit the same prompt: its KV is held by then
                epoch=where.remote_epoch,
            )
            for i in range(ask.n)
        ]
        writer = _Writer(ask, reply, Rendering(ask, tracked.id, self.model, self.tokenizer.spell))
        await _together([self._run(request, i, where, writer, tracked) for i, request in enumerate(requests)])
        await writer.finish(len(tokens), tracked)

    async def _run(self, request: Request, index: int, where: ToDecode, writer: "_Writer", tracked: Tracked) -> None:
        """One choice."""
        async with self.slots.slot():
            generation = self.node.generate(where.peer, request, _observer(tracked))
            async with aclosing(follow(generation, self._threads)) as items:
                async for item in items:
                    if isinstance(item, Outcome):
                        tracked.outcomes.append(item)
                        await writer.ended(index, item, _report(item, where, self.name))
                    else:
                        _note(tracked, item)
                        await writer.event(index, item)


class _Writer:
    """Turns the choices' events into one response."""

    def __init__(self, ask: Ask, reply: Reply, rendering: Rendering) -> None:
        self._ask, self._reply, self._rendering = ask, reply, rendering
        self._choices = [Choice(i) for i in range(ask.n)]
        self._drafts = [Drafts(choice) for choice in self._choices]
        self._reports: list[dict[str, Any]] = [{} for _ in range(ask.n)]
        self._last: dict[int, dict[str, Any] | None] = {}

    async def event(self, index: int, event: Event) -> None:
        """A choice goes on; its last piece waits for what is told with it."""
        choice, drafts = self._choices[index], self._drafts[index]
        show_drafts = self._ask.stream and self._ask.lynx.emit == "draft"
        match event:
            case Verified():
                choice.add(event)
                if not self._ask.stream:
                    return
                piece = self._rendering.piece(choice, event)
                if event.finish is not None:
                    self._last[index] = piece
                elif piece is not None:
                    await self._send(piece)
            case Drafted() if show_drafts:
                await self._send(self._rendering.draft(index, drafts.add(event), event.text))
            case Retracted() if show_drafts:
                await self._send(self._rendering.retract(index, drafts.start(event.position)))

    async def ended(self, index: int, outcome: Outcome, report: dict[str, Any]) -> None:
        """A choice is finished."""
        self._reports[index] = report
        if self._ask.stream:
            await self._send((self._last.pop(index) or {}) | {"lynx": report})

    async def finish(self, prompt_tokens: int, tracked: Tracked) -> None:
        """Every choice is finished."""
        tracked.finish = ",".join(choice.finish or "" for choice in self._choices)
        used = usage(prompt_tokens, self._choices)
        reports: Any = self._reports[0] if self._ask.n == 1 else self._reports
        if not self._ask.stream:
            await self._reply.json(encode(self._rendering.whole(self._choices, used, lynx=reports)))
            return
        if self._ask.include_usage:
            await self._reply.event(encode(self._rendering.usage(used, lynx=reports)))
        await self._reply.done()

    async def _send(self, chunk: dict[str, Any]) -> None:
        if not self._reply.streaming:
            await self._reply.stream()
        await self._reply.event(encode(chunk))


def _observer(tracked: Tracked) -> Callable[[Moment], None]:
    """Writes a transfer's moments down; called from several threads."""

    def observe(moment: Moment) -> None:
        if moment.what == "segment":
            if moment.tier is not None:
                tracked.segment(moment.tier.name.lower(), moment.size, moment.at)
            return
        drafted = moment.what == "target" and tracked.state == "draft"
        tracked.happened(moment.what, at=moment.at, state=_STATES.get(moment.what))
        if drafted:
            tracked.happened("verify", at=moment.at, state="verify")

    return observe


def _note(tracked: Tracked, event: Event) -> None:
    """Write down what speculation does, as far as it begins something."""
    match event:
        case Drafted(position=1):
            tracked.happened("draft", state="draft")
        case Verified(position=1):
            tracked.happened("verified")
            if tracked.state != "verify":
                tracked.happened("decode", state="decode")
        case Window():
            tracked.happened("decode", state="decode")


def _report(outcome: Outcome, where: ToDecode, name: str) -> dict[str, Any]:
    """The ``lynx`` object of a finished choice."""
    times = asdict(outcome.times)
    return {
        **{kind: times.pop(kind) for kind in ("ttft_prefill_s", "ttft_draft_s", "ttft_verified_s")},
        "times": times,
        "bytes": outcome.bytes,
        "drafted": outcome.drafted,
        "accepted": outcome.accepted,
        "target": outcome.target,
        "on_loss": None if outcome.loss is None else "recomputed",
        "seed": outcome.seed,
        "transfer_id": where.transfer_id,
        "prefill_worker": where.remote_engine_id,
        "decode_worker": name,
    }


async def _together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
