"""A request handed on to a worker: posted, its stream passed on, its silence and its loss told."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp

from lynxkv.serving.errors import HttpError
from lynxkv.serving.exchange import DONE, Reply, encode
from lynxkv.serving.upstream import DEAD_S, Worker

T = TypeVar("T")

ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Statuses of one worker that another one may not have."""

_ERROR_EVENT = b"event: error\n"


class WorkerFailed(Exception):
    """A worker could not do its part; if the client was told nothing yet, another one may."""

    def __init__(self, worker: Worker, error: HttpError) -> None:
        super().__init__(str(error))
        self.worker, self.error = worker, error


def post(
    client: aiohttp.ClientSession, worker: Worker, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Any:
    """The context of a response to ``body`` as JSON."""
    return client.post(
        f"{worker.url}{path}", data=encode(body), headers={**headers, "content-type": "application/json"}
    )


async def pass_on(response: aiohttp.ClientResponse, worker: Worker, reply: Reply) -> bool:
    """Whole events, byte for byte; half an event is never sent. Whether the answer came to its regular end.

    The last event ends the answer, so that a client that leaves with it was answered; the rest is only read.
    """
    await reply.stream()
    rest, regular = b"", False
    async for data in response.content.iter_any():
        whole, _, rest = (rest + data).rpartition(b"\n\n")
        if whole and not reply.complete:
            whole += b"\n\n"
            regular = whole.endswith(DONE)
            await reply.raw(whole, last=regular or _ERROR_EVENT in whole)
    if reply.complete:
        return regular
    raise WorkerFailed(worker, HttpError(502, "peer_lost", f"{worker!r} ended in mid-answer"))


def unreachable(worker: Worker, error: Exception) -> WorkerFailed:
    """The failure of a worker whose connection is lost; it gets no new requests until it answers again."""
    why = str(error) or type(error).__name__
    worker.lost(why)
    return WorkerFailed(worker, HttpError(502, "peer_lost", f"{worker!r} cannot be reached or went away: {why}"))


async def unless_dead(worker: Worker, work: Coroutine[Any, Any, T]) -> T:
    """``work``, given up when its worker has been silent for too long."""
    task, dead = asyncio.ensure_future(work), asyncio.ensure_future(worker.dead.wait())
    try:
        await asyncio.wait((task, dead), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            error = HttpError(504, "worker_silent", f"{worker!r} has not answered for {DEAD_S:g} s; it was given up")
            raise WorkerFailed(worker, error)
        return task.result()
    finally:
        task.cancel()
        dead.cancel()
        await asyncio.gather(task, dead, return_exceptions=True)


def lower(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers under names in lower case."""
    return {name.lower(): value for name, value in headers.items()}
