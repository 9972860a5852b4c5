"""Runs one service as a process: listen, serve, drain when told to, and leave nothing behind."""

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from lynxkv.serving.access import bind
from lynxkv.serving.service import Service

KEEP_ALIVE_S = 75
"""Longer than a router keeps an idle connection, so that it never sends a request into one that is being closed."""

FLUSH_S = 3
"""How long clients have to take the last bytes of their answers when the process ends."""


@dataclass(frozen=True, slots=True)
class Listening:
    """How a process is reached and how it ends.

    Parameters
    ----------
    host, port : str, int
        Port 0: any free one.
    tls : ssl.SSLContext or None
        None: plain HTTP.
    drain_s : float
        What SIGTERM gives requests in flight. SIGINT ends them at once.
    until_stdin_closes : bool
        Also end at once when standard input closes: whoever holds its other end is gone.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    drain_s: float = 30.0
    until_stdin_closes: bool = False


def run(service: Service, app: FastAPI, listening: Listening, ready: Callable[[str], str]) -> None:
    """Serve until told to end.

    ``ready`` makes the line that is printed once requests are taken of the URL.

    Raises
    ------
    RequestError, LynxError
        The address cannot be had, or the service cannot start.
    KeyboardInterrupt
        It was interrupted.
    """
    if uvloop.run(serve(service, app, listening, ready)):
        raise KeyboardInterrupt


async def serve(service: Service, app: FastAPI, listening: Listening, ready: Callable[[str], str]) -> bool:
    """As :func:`run`, on the running loop; whether it was interrupted."""
    drain, end, interrupted = asyncio.Event(), asyncio.Event(), False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        end.set()

    with _told(drain.set, interrupt, end.set if listening.until_stdin_closes else None):
        async with serving(service, app, listening.host, listening.port, listening.tls) as server:
            print(ready(server.url), flush=True)
            await _first(drain.wait(), end.wait(), server.ended.wait())
            if drain.is_set() and not end.is_set():
                await _first(service.drain(listening.drain_s), end.wait())
    return interrupted


@asynccontextmanager
async def serving(
    service: Service, app: FastAPI, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator["Server"]:
    """Serve while inside, from the moment requests are taken; afterwards every request is ended.

    Raises
    ------
    RequestError, LynxError
        The address cannot be had, or the service cannot start.
    """
    await service.start()
    try:
        server = Server(app, host, port, tls)
        task = asyncio.create_task(server.run())
        try:
            await _first(server.up.wait(), server.ended.wait())
            if task.done():
                task.result()
            yield server
        finally:
            await service.stop()
            server.should_exit = True
            await task
    finally:
        await service.close()


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own, on a socket that is bound when it is made.

    Attributes
    ----------
    url : str
        How it is reached.
    up, ended : asyncio.Event
        It takes requests; it does not any more.
    """

    def __init__(self, app: FastAPI, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FLUSH_S,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._listener = bind(host, port)
        address, bound = self._listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{bound}"
        self.up, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:  # type: ignore[override]  # uvicorn's own begins a loop
        """Take requests until ``should_exit`` is set."""
        try:
            await self.serve(sockets=[self._listener])
        finally:
            self._listener.close()
            self.ended.set()

    async def main_loop(self) -> None:
        """Runs while requests are taken."""
        self.up.set()
        await super().main_loop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's."""
        yield


@contextmanager
def _told(
    drain: Callable[[], None], interrupt: Callable[[], None], orphaned: Callable[[], None] | None
) -> Iterator[None]:
    """Call one of these when a signal says so, or when standard input closes."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain)
    loop.add_signal_handler(signal.SIGINT, interrupt)

    def read() -> None:
        if not os.read(0, 65536):
            loop.remove_reader(0)
            if orphaned is not None:
                orphaned()

    if orphaned is not None:
        loop.add_reader(0, read)
    try:
        yield
    finally:
        loop.remove_reader(0)
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these is done; its error is raised, the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
