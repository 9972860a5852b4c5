"""An event loop on a thread of its own, for sockets beside threads that compute."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class Loop:
    """Runs from the moment it is made until :meth:`close`. All methods are thread-safe.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return bool(self._loop.is_closed())

    def post(self, function: Callable[..., object], *args: object) -> bool:
        """Have ``function(*args)`` called on the loop; False: it is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop; an interrupt here cancels it there."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End every task, then the thread; idempotent."""
        if self.closed:
            return
        self.call(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
