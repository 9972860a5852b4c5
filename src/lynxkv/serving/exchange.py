"""One HTTP exchange: its work ends when the client goes away or the process stops, and a failure is always told."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lynxkv.errors import LynxError
from lynxkv.serving.activity import Activity, Tracked
from lynxkv.serving.errors import Draining, HttpError, Told, tell
from lynxkv.serving.logs import about
from lynxkv.serving.schema import Kind

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

BODY_S = 60.0
"""How long a client may take to send its request."""

AWAY_S = 5.0
"""How long work may go on after its last byte, whether the process stops or not."""

_ID = 128
"""Longest ``x-request-id`` that is taken over."""


class Reply:
    """Writes the one response of an exchange: a JSON body, or server-sent events.

    A client that takes no byte for ``patience_s`` holds a worker's slot for nothing: the write fails with an
    :class:`HttpError` then, and nothing more is written.
    """

    patience_s = 60.0

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        self.streaming = False
        self.complete = False

    async def json(self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole response."""
        await self._start(status, {"content-type": "application/json", **(headers or {})}, length=len(body))
        await self._body(body, last=True)

    async def told(self, told: Told) -> None:
        """A failure: its status before the first byte, an ``error`` event and no ``[DONE]`` after it."""
        if self.streaming:
            await self._body(b"event: error\ndata: " + told.encoded() + b"\n\n", last=True)
        else:
            await self.json(told.encoded(), status=told.status, headers=told.headers)

    async def stream(self) -> None:
        """Begin a stream of events."""
        self.streaming = True
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def event(self, data: bytes) -> None:
        """One event, of JSON bytes."""
        await self._body(b"data: " + data + b"\n\n")

    async def raw(self, data: bytes, *, last: bool = False) -> None:
        """Whole events as they came from elsewhere."""
        await self._body(data, last)

    async def done(self) -> None:
        """The stream's regular end."""
        await self._body(DONE, last=True)

    async def _start(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self.status = status
        lines = [*headers.items(), ("x-request-id", self._request_id)]
        if length is not None:
            lines.append(("content-length", str(length)))
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
        await self._put({"type": "http.response.start", "status": status, "headers": encoded})

    async def _body(self, data: bytes, last: bool = False) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": not last})
        self.complete = self.complete or last

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self.patience_s):
                await self._send(message)
        except TimeoutError as error:
            self.complete = True
            raise HttpError(499, "client_stalled", f"the client took no byte for {self.patience_s:g} s") from error


Work = Callable[[Reply, Tracked], Awaitable[None]]


class Exchange(Response):
    """Runs ``work``, which writes the response; whatever ends it early, everything it holds is freed.

    Parameters
    ----------
    work : callable
        Cancelled when the client goes away or ``stopping`` is set; raises LynxError for a failure.
    request : Request
        With its body read.
    """

    def __init__(self, work: Work, activity: Activity, tracked: Tracked, stopping: asyncio.Event) -> None:
        super().__init__()
        self._work, self._activity, self._tracked, self._stopping = work, activity, tracked, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        with about(request=self._tracked.id):
            await self._run(Reply(send, self._tracked.id), receive)

    async def _run(self, reply: Reply, receive: Receive) -> None:
        work = asyncio.ensure_future(self._work(reply, self._tracked))
        gone = asyncio.ensure_future(_disconnect(receive))
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((work, gone, stop), return_when=asyncio.FIRST_COMPLETED)
            if reply.complete:  # then the client is expected to go, and what is left to do is to put things away
                await asyncio.wait((work,), timeout=AWAY_S)
            if not work.done():
                work.cancel()
            await self._finish(reply, work, stopped=not gone.done())
        finally:
            left = [task for task in (work, gone, stop) if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._activity.end(self._tracked, "aborted")

    async def _finish(self, reply: Reply, work: "asyncio.Future[None]", *, stopped: bool) -> None:
        try:
            await work
        except asyncio.CancelledError:
            if not stopped or not work.cancelled():  # the client is gone, or this very exchange is cancelled
                return
            error: LynxError = Draining()
        except LynxError as failure:
            error = failure
        except Exception as failure:  # the exchange's edge: the client is told that something broke, the log what
            log.exception("request %s failed", self._tracked.id)
            error = HttpError(500, "internal_error", f"{type(failure).__name__} in this process; its log says more")
        else:
            self._tracked.status = reply.status
            self._activity.end(self._tracked, "finished" if (reply.status or 500) < 400 else "failed")
            return
        await self._fail(reply, error)

    async def _fail(self, reply: Reply, error: LynxError) -> None:
        told = tell(error)
        self._tracked.error, self._tracked.message = told.code, told.message
        self._tracked.status = told.status
        if self._stopping.is_set():
            reply.patience_s = 1.0
        if not reply.complete:
            with suppress(HttpError):  # the client takes nothing any more: the failure above is what counts
                await reply.told(told)
        self._activity.end(self._tracked, "failed")


async def read_body(request: Request, most: int) -> bytes:
    """The request's body; 413 when it is larger than ``most`` bytes, 408 when it does not come."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HttpError(413, "body_too_large", f"a body of at most {most} bytes expected")
    except TimeoutError as late:
        raise HttpError(408, "body_late", f"the whole request was not here within {BODY_S:g} s") from late
    except ClientDisconnect as gone:
        raise HttpError(499, "client_gone", "the client went away while it sent its request") from gone
    return bytes(body)


def request_id(headers: Mapping[str, str]) -> str:
    """The caller's ``x-request-id`` where it is short and plain, else a new one."""
    given = headers.get("x-request-id", "")
    plain = 0 < len(given) <= _ID and given.isascii() and all(c.isalnum() or c in "-_.:" for c in given)
    return given if plain else secrets.token_hex(16)


def begin(activity: Activity, request: Request, kind: Kind) -> Tracked:
    """Track the request that came in."""
    headers = dict(request.headers)
    return activity.begin(request_id(headers), kind, headers)


def encode(body: Any) -> bytes:
    """JSON bytes."""
    return msgspec.json.encode(body)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
