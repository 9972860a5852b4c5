"""A router without workers: what it answers, and when, is what a test tells it. Everything else is the real one's."""

import asyncio
import time

from fastapi import APIRouter
from fastapi.responses import Response

from lynxkv.errors import LynxError
from lynxkv.serving.exchange import encode
from lynxkv.serving.service import Service

MODEL = "smollm2-135m"

_DONE = object()


class Stage(Service):
    """Answers with the steps that it is given.

    Attributes
    ----------
    asked : list of dict
        Bodies of the requests that came.
    bodies : list of bytes
        The same, as they came.
    shown : list of dict
        Requests of ``/lynx/state``; see :func:`request`.
    up : bool
        Whether its workers seem to be.
    """

    def __init__(self, site, **options):
        super().__init__("router", "stage", **options)
        self._site = site
        self._steps = asyncio.Queue()
        self.asked, self.shown, self.up = [], [], True

    def health(self):
        return {"status": "ok"}

    def models(self):
        return [{"id": MODEL, "object": "model"}]

    async def answer(self, ask, reply, tracked):
        self.asked.append(ask.plain)
        while (step := await self._steps.get()) is not _DONE:
            if isinstance(step, LynxError):
                raise step
            if not reply.streaming:
                await reply.stream()
            await reply.event(encode(step))
        await reply.done()

    def routes(self):
        """``/lynx/state``."""
        router = APIRouter()

        @router.get("/lynx/state")
        async def state() -> Response:
            now = time.time()
            workers = [{"role": role, "url": f"http://{role}", "up": self.up} for role in ("prefill", "decode")]
            body = {"now": now, "router": {"name": "stage"}, "workers": workers, "requests": self.shown}
            return Response(encode(body), media_type="application/json")

        return [*super().routes(), router]

    def _step(self, step) -> None:
        self._site.loop.call_soon_threadsafe(self._steps.put_nowait, step)

    def verify(self, text: str) -> None:
        """More of the answer is certain."""
        self._step({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None})

    def draft(self, index: int, text: str) -> None:
        """Text is drafted from a character on."""
        self._beside({"event": "draft", "choice": 0, "index": index, "text": text})

    def retract(self, index: int) -> None:
        """Drafts are withdrawn from a character on."""
        self._beside({"event": "retract", "choice": 0, "index": index})

    def _beside(self, lynx) -> None:
        self._step({"choices": [{"index": 0, "delta": {}, "finish_reason": None}], "lynx": lynx, "usage": None})

    def fail(self, error: LynxError) -> None:
        """The request fails now."""
        self._step(error)

    def finish(self, **changes) -> None:
        """The answer ends, with its figures."""
        lynx = {
            "ttft_prefill_s": 1.21, "ttft_draft_s": 1.93, "ttft_verified_s": 3.4, "drafted": 8, "accepted": 6,
            "bytes": {"anchor": 6595200, "residual": 4429440, "exact": 0}, "target": "residual", "on_loss": None,
            "seed": 2265080804588341313, "transfer_id": "0" * 32,
        }  # fmt: skip
        usage = {"prompt_tokens": 1834, "completion_tokens": 24, "total_tokens": 1858}
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
        self._step(last)
        self._step({"choices": [], "usage": usage, "lynx": lynx | changes})
        self._step(_DONE)


def request(number: int, moments=(), *, ago=0.0, state="prefill", **known) -> dict:
    """A request as ``/lynx/state`` tells it, begun ``ago`` seconds ago.

    ``moments`` are ``(what, at)``, or ``(tier, at, bytes)`` of a segment.
    """
    told = [
        {"what": moment[0], "at": moment[1]}
        if len(moment) == 2
        else {"what": "segment", "at": moment[1], "tier": moment[0], "bytes": moment[2]}
        for moment in moments
    ]
    moved = {}
    for moment in told:
        if "tier" in moment:
            moved[moment["tier"]] = moved.get(moment["tier"], 0) + moment["bytes"]
    return {
        "id": f"{number:032x}", "state": state, "prompt_tokens": 1834, "moments": told, "drafted": 0, "accepted": 0,
        "bytes": moved, "finish": None, "error": None, "message": None, "ended_s": None, "started": time.time() - ago,
    } | known  # fmt: skip


PREFILL = [("queued", 0.0), ("prefill", 0.2), ("room", 0.2), ("first_token", 2.1)]

ANCHOR = [("anchor", 1.2 + 0.2 * i, 800_000) for i in range(8)]

DRAFT = [("anchor", 2.62), ("draft", 2.8)]

RESIDUAL = [("residual", 2.8 + 0.2 * i, 800_000) for i in range(6)]

DECODE = [("target", 3.85), ("verify", 3.85), ("verified", 4.1), ("decode", 4.1), ("finished", 5.9)]


def busy() -> list[dict]:
    """Two requests in flight, and some that are over."""
    whole = [*PREFILL, *ANCHOR, *DRAFT, *RESIDUAL, *DECODE]
    over = [
        request(
            0x6B21F0 + 7919 * i, whole, ago=30.0 + 9 * i, state="finished", finish="stop", drafted=9,
            accepted=9 - i % 3, ended_s=5.9,
        )
        for i in range(12)
    ]  # fmt: skip
    over[3] |= {"finish": None, "error": "aborted", "state": "aborted"}
    over[5] |= {"finish": None, "error": "peer_lost", "state": "failed", "message": "the prefill worker went away"}
    return [
        request(0xA1C3F9, [*PREFILL[:3], *ANCHOR[:4]], ago=2.0, state="anchor"),
        request(0xA09D44, [*PREFILL, *ANCHOR, *DRAFT, *RESIDUAL[:3]], ago=3.5, state="draft"),
        *over,
    ]
