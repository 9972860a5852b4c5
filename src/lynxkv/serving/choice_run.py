"""One choice in a thread of its own: its generation's events reach the event loop in order."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor

from lynxkv.errors import EngineError, LynxError
from lynxkv.node.decode import Generation, Outcome
from lynxkv.speculation import Event

log = logging.getLogger(__name__)

_Item = Event | Outcome | LynxError


async def follow(generation: Generation, threads: Executor) -> AsyncGenerator[Event | Outcome, None]:
    """Events of ``generation`` as they happen, then its outcome; its error is raised.

    Closing the iterator cancels the generation at once, and returns when its thread is free.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[_Item] = asyncio.Queue()  # bounded by the answer's length

    def post(item: _Item) -> None:
        loop.call_soon_threadsafe(items.put_nowait, item)

    context = contextvars.copy_context()  # log lines of the thread carry the request's ids
    thread = loop.run_in_executor(threads, context.run, _run, generation, post)
    try:
        while True:
            item = await items.get()
            if isinstance(item, LynxError):
                raise item
            yield item
            if isinstance(item, Outcome):
                return
    finally:
        generation.cancel("the request is over")
        await _ended(thread)


def _run(generation: Generation, post: Callable[[_Item], None]) -> None:
    try:
        for event in generation:
            post(event)
        post(generation.outcome)
    except LynxError as error:
        post(error)
    except Exception as error:  # the thread's edge: whoever waits is told
        log.exception("an answer could not be decoded")
        post(EngineError(f"the decode worker could not run this request: {type(error).__name__}: {error}"))


async def _ended(thread: "asyncio.Future[None]") -> None:
    """Wait for the thread even while cancelled: what it holds is in use until then."""
    cancelled = False
    while not thread.done():
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
