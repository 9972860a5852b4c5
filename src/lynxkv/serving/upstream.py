"""The workers a router knows: what they say of themselves, whether they answer, and how much each has to do."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from lynxkv.serving.errors import HttpError

log = logging.getLogger(__name__)

POLL_S = 1.0
ANSWER_S = 5.0
DEAD_S = 15.0
"""A worker that is silent for so long is given up: its requests end."""


class Worker:
    """One worker process.

    Attributes
    ----------
    up : bool
        It answered last time and takes requests.
    about : mapping
        What its ``/health`` said.
    outstanding : int
        Tokens of the requests it has now, about.
    dead : asyncio.Event
        It has been silent for DEAD_S: whoever waits for it should not.
    """

    def __init__(self, role: str, url: str) -> None:
        self.role, self.url = role, url.rstrip("/")
        self.up = False
        self.about: Mapping[str, Any] = {}
        self.outstanding = 0
        self.dead = asyncio.Event()
        self._silent_since: float | None = None

    def __repr__(self) -> str:
        return f"{self.role} worker {self.url}"

    @contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        """Count a request's tokens while it runs here."""
        self.outstanding += tokens
        try:
            yield
        finally:
            self.outstanding -= tokens

    def lost(self, why: object) -> None:
        """It could not be reached: no new requests until it answers again."""
        if self.up:
            log.warning("%r is down: %s", self, why)
        self.up = False

    async def check(self, client: aiohttp.ClientSession) -> None:
        """Ask for its health."""
        try:
            async with asyncio.timeout(ANSWER_S):
                async with client.get(f"{self.url}/health") as response:
                    about = msgspec.json.decode(await response.read())
                    status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            self.lost(str(error) or type(error).__name__)
            self._silent()
            return
        self._silent_since = None
        self.dead.clear()
        if not isinstance(about, dict) or about.get("role") != self.role:
            self.lost(f"a {self.role} worker's health expected, got {str(about)[:100]}")
            return
        ready = status == 200
        if ready and not self.up:
            log.info("%r is up, model %s", self, about.get("model"))
        elif not ready:
            self.lost(f"it answers {status}, {about.get('status')}")
        self.about, self.up = about, ready

    def plain(self) -> dict[str, Any]:
        """As ``/health`` and ``/lynx/state`` show it."""
        shown = {name: self.about.get(name) for name in ("name", "model", "fingerprint", "holdings")}
        return {"role": self.role, "url": self.url, "up": self.up, "outstanding_tokens": self.outstanding, **shown}

    def _silent(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= DEAD_S:
            self.dead.set()


class Fleet:
    """All workers; the one with the least to do comes first.

    Parameters
    ----------
    prefill, decode : sequence of str
        URLs.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.workers = [Worker(role, url) for role, urls in (("prefill", prefill), ("decode", decode)) for url in urls]
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

    def pair(self, model: str | None, without: set[Worker]) -> tuple[Worker, Worker]:
        """A prefill and a decode worker that serve ``model`` and can use each other's KV.

        Raises
        ------
        HttpError
            503, naming what is missing.
        """
        left = [worker for worker in self.workers if worker.up and worker not in without]
        able = [worker for worker in left if model is None or worker.about.get("model") == model]
        for decode in sorted(_of(able, "decode"), key=_least):
            fitting = [p for p in _of(able, "prefill") if p.about["fingerprint"] == decode.about["fingerprint"]]
            if fitting:
                return min(fitting, key=_least), decode
        counts = ", ".join(f"{len(_of(able, role))} {role}" for role in ("prefill", "decode"))
        raise HttpError(
            503,
            "no_workers",
            f"a prefill and a decode worker that run the same model are needed; {counts} are up: "
            "see this router's /health",
            retry_after_s=2,
        )


def _of(workers: Sequence[Worker], role: str) -> list[Worker]:
    return [worker for worker in workers if worker.role == role]


def _least(worker: Worker) -> int:
    return worker.outstanding


async def _watch(worker: Worker, client: aiohttp.ClientSession) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(POLL_S)
            await worker.check(client)
