"""Who may run: at most so many at once, so many more wait in the order they came, and one more is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lynxkv.errors import CapacityExceeded, Overloaded


class Slots:
    """A bounded FIFO of running work on one event loop.

    Parameters
    ----------
    running, waiting : int
        Bounds.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._bounds = running, waiting
        self._free = asyncio.Semaphore(running)
        self.asked = 0

    @property
    def waiting(self) -> int:
        """Those in the queue."""
        return max(0, self.asked - self._bounds[0])

    def check(self, count: int) -> None:
        """Raise unless ``count`` more have room.

        Raises
        ------
        CapacityExceeded
            They never will.
        Overloaded
            Not now.
        """
        running, waiting = self._bounds
        if count > running + waiting:
            raise CapacityExceeded(f"at most {running} answers run and {waiting} wait here; n is {count}")
        if self.asked + count > running + waiting:
            raise Overloaded(f"{running} answers run and {self.waiting} wait, of at most {waiting}: try again later")

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one; waits its turn. Call :meth:`check` before."""
        self.asked += 1
        try:
            async with self._free:
                yield
        finally:
            self.asked -= 1
