"""The workers a router knows: what they say of themselves, whether they answer, and how much each has to do."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

import aiohttp
import msgspec

from lynxkv.serving.errors import HttpError

log = logging.getLogger(__name__)

WorkerKind = Literal["lynxkv", "vllm"]
"""Whose server a worker is: lynxkv's own, or vLLM's OpenAI server with a KV connector."""

KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)
ROLES = ("prefill", "decode")

POLL_S = 1.0
ANSWER_S = 5.0
DEAD_S = 15.0
"""A worker that is silent for so long is given up: its requests end."""


class Worker:
    """One worker process.

    Attributes
    ----------
    kind : WorkerKind or None
        As it last showed; None: it has never answered.
    up : bool
        It answered last time and takes requests.
    about : mapping
        What its ``/health`` said; of a vLLM worker what was found out in its place.
    models : mapping
        The models it serves, and the context of each, where it tells it.
    requests, outstanding : int
        The requests it has now, and about how many tokens they are.
    dead : asyncio.Event
        It has been silent for DEAD_S: whoever waits for it should not.
    """

    def __init__(self, role: str, url: str) -> None:
        self.role, self.url = role, url.rstrip("/")
        self.kind: WorkerKind | None = None
        self.up = False
        self.about: Mapping[str, Any] = {}
        self.models: Mapping[str, int | None] = {}
        self.requests = self.outstanding = 0
        self.dead = asyncio.Event()
        self._silent_since: float | None = None

    def __repr__(self) -> str:
        return f"{self.role} worker {self.url}"

    @contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        """Count a request and its tokens while it runs here."""
        self.requests += 1
        self.outstanding += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.outstanding -= tokens

    @property
    def load(self) -> int:
        """What it has to do, to compare it with others of its kind: requests of a vLLM worker, else tokens."""
        return self.requests if self.kind == "vllm" else self.outstanding

    def lost(self, why: object) -> None:
        """It could not be reached: no new requests until it answers again."""
        if self.up:
            log.warning("%r is down: %s", self, why)
        self.up = False

    async def check(self, client: aiohttp.ClientSession) -> None:
        """Ask for its health."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status, content = await self._get(client, "/health")
                if status == 200 and not content:
                    await self._is_vllm(client)
                else:
                    self._is_ours(status, msgspec.json.decode(content))
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            self.lost(str(error) or type(error).__name__)
            self._silent()
            return
        self._silent_since = None
        self.dead.clear()

    async def _is_vllm(self, client: aiohttp.ClientSession) -> None:
        """A health without a word is vLLM's; what it serves is asked when it comes up."""
        if self.up and self.kind == "vllm":
            return
        told = {path: await self._get(client, path) for path in ("/version", "/v1/models")}
        for path, (status, content) in told.items():
            if status != 200:
                self.lost(f"its health is vLLM's, but its {path} answers {status}: {content[:100]!r}")
                return
        version = msgspec.json.decode(told["/version"][1], type=_Version).version
        cards = msgspec.json.decode(told["/v1/models"][1], type=_Models).data
        about = {"model": cards[0].id if cards else None, "version": version}
        self._is("vllm", about, {card.id: card.max_model_len for card in cards})

    def _is_ours(self, status: int, about: Any) -> None:
        if not isinstance(about, dict) or about.get("role") != self.role:
            self.lost(f"a {self.role} worker's health expected, got {str(about)[:100]}")
        elif status == 200:
            self._is("lynxkv", about, {str(about.get("model")): about.get("context")})
        else:
            self.lost(f"it answers {status}, {about.get('status')}")
            self.about = about

    def _is(self, kind: WorkerKind, about: Mapping[str, Any], models: Mapping[str, int | None]) -> None:
        self.kind, self.about, self.models = kind, about, models
        if not self.up:
            log.info("%r is up, %s, model %s", self, kind, about.get("model"))
        self.up = True

    async def _get(self, client: aiohttp.ClientSession, path: str) -> tuple[int, bytes]:
        async with client.get(f"{self.url}{path}") as response:
            return response.status, await response.read()

    def plain(self) -> dict[str, Any]:
        """As ``/health`` and ``/lynx/state`` show it."""
        shown = {name: self.about.get(name) for name in ("name", "model", "version", "fingerprint", "holdings")}
        counts = {"requests": self.requests, "outstanding_tokens": self.outstanding}
        return {"role": self.role, "url": self.url, "kind": self.kind, "up": self.up, **counts, **shown}

    def _silent(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= DEAD_S:
            self.dead.set()


class _Version(msgspec.Struct):
    """vLLM's ``/version``."""

    version: str


class _Card(msgspec.Struct):
    """A model of vLLM's ``/v1/models``."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class Fleet:
    """All workers; the one with the least to do comes first.

    Parameters
    ----------
    prefill, decode : sequence of str
        URLs.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.workers = [Worker(role, url) for role, urls in zip(ROLES, (prefill, decode), strict=True) for url in urls]
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, client: aiohttp.ClientSession) -> None:
        """Ask every worker once, and again and again from then on."""
        await self.check(client)
        self._watching = [asyncio.create_task(_watch(worker, client)) for worker in self.workers]

    async def close(self) -> None:
        """Stop asking."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    async def check(self, client: aiohttp.ClientSession) -> None:
        """Ask all of them now."""
        await asyncio.gather(*(worker.check(client) for worker in self.workers))

    def of(self, role: str) -> list[Worker]:
        """Those of a role that are up."""
        return [worker for worker in self.workers if worker.role == role and worker.up]

    def kind(self, model: str | None) -> WorkerKind | None:
        """Whose workers serve ``model``: the first kind with a pair that is up, else whoever did; None: nobody ever."""
        paired = [kind for kind in KINDS if _best(self._up(kind), model)]
        known = [worker.kind for worker in self.workers if model is None or model in worker.models]
        return next((kind for kind in (*paired, *known, *(w.kind for w in self.workers)) if kind is not None), None)

    def pair(self, kind: WorkerKind | None, model: str | None, without: set[Worker]) -> tuple[Worker, Worker]:
        """A prefill and a decode worker of ``kind`` that serve ``model`` and can use each other's KV.

        Raises
        ------
        HttpError
            503, naming what is missing.
        """
        left = [worker for worker in self._up(kind) if worker not in without]
        pair = _best(left, model)
        if pair is not None:
            return pair
        able = [worker for worker in left if model is None or model in worker.models]
        counts = ", ".join(f"{len(_of(able, role))} {role}" for role in ROLES)
        missing = "".join(f"{each}; " for each in self.missing())
        raise HttpError(
            503,
            "no_workers",
            f"a prefill and a decode worker of one kind that run the same model are needed; {counts} are up: "
            f"{missing}see this router's /health",
            retry_after_s=2,
        )

    def ready(self) -> bool:
        """Whether some prefill and decode worker can answer together."""
        return any(_best(self._up(kind), None) for kind in KINDS)

    def missing(self) -> list[str]:
        """What keeps workers that are up from being a pair, by name; empty: nothing does."""
        found = []
        for kind in KINDS:
            mine = self._up(kind)
            lacking = [role for role in ROLES if not _of(mine, role)]
            if len(lacking) == 1:
                found.append(f"no {lacking[0]} worker of kind {kind} is up for {', '.join(map(repr, mine))}")
            elif not lacking and not _best(mine, None):
                told = ", ".join(f"{worker!r} runs {' and '.join(worker.models)}" for worker in mine)
                found.append(f"no prefill and decode worker of kind {kind} run the same model: {told}")
        return found

    def _up(self, kind: WorkerKind | None) -> list[Worker]:
        return [worker for worker in self.workers if worker.up and worker.kind == kind]


def _best(workers: Sequence[Worker], model: str | None) -> tuple[Worker, Worker] | None:
    """Of workers of one kind the prefill and the decode worker with the least to do that fit together."""
    prefills = sorted(_of(workers, "prefill"), key=_load)
    for decode in sorted(_of(workers, "decode"), key=_load):
        for prefill in prefills:
            if _fit(prefill, decode, model):
                return prefill, decode
    return None


def _fit(prefill: Worker, decode: Worker, model: str | None) -> bool:
    if prefill.about.get("fingerprint") != decode.about.get("fingerprint"):  # vLLM's have none
        return False
    both = prefill.models.keys() & decode.models.keys()
    return bool(both) if model is None else model in both


def _load(worker: Worker) -> int:
    return worker.load


def _of(workers: Sequence[Worker], role: str) -> list[Worker]:
    return [worker for worker in workers if worker.role == role]


async def _watch(worker: Worker, client: aiohttp.ClientSession) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(POLL_S)
            await worker.check(client)
