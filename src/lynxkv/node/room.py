"""Memory that requests share: each reserves what it needs before it holds anything."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from lynxkv.errors import CapacityExceeded, DeadlineExceeded, Overloaded
from lynxkv.node.cancellation import Cancellation


class Reservation:
    """Bytes of a :class:`Room`; made by :meth:`Room.reserved`."""

    def __init__(self, room: "Room", size: int) -> None:
        self._room = room
        self.size = size

    def grow(self, size: int) -> None:
        """Take ``size`` bytes more without waiting (who holds some and waits for more may wait for ever).

        Raises
        ------
        CapacityExceeded
            They are not free.
        """
        self._room.grow(self, size)


class _Waiter:
    __slots__ = ("size", "woken")

    def __init__(self, size: int) -> None:
        self.size = size
        self.woken = threading.Event()


class Room:
    """At most ``memory_bytes`` (None: any number) are reserved at a time; who asks first gets room first.

    Parameters
    ----------
    memory_bytes : int or None
    max_queue : int
        How many may wait; one more is refused.
    """

    def __init__(self, memory_bytes: int | None, max_queue: int) -> None:
        self.memory_bytes = memory_bytes
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._used = 0
        self._holders = 0
        self._queue: deque[_Waiter] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return self._used

    @property
    def holders(self) -> int:
        """Reservations held now."""
        with self._lock:
            return self._holders

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        with self._lock:
            return len(self._queue)

    @contextmanager
    def reserved(self, size: int, cancellation: Cancellation, until: float) -> Iterator[Reservation]:
        """Hold ``size`` bytes, waiting for them until ``time.monotonic()`` reaches ``until``.

        Raises
        ------
        CapacityExceeded
            So much is never free.
        Overloaded
            It is not free now, and as many wait as may.
        DeadlineExceeded, Cancelled
            It was not free before that.
        """
        self._reserve(size, cancellation, until)
        reservation = Reservation(self, size)
        try:
            yield reservation
        finally:
            self._give_back(reservation.size)

    def grow(self, reservation: Reservation, size: int) -> None:
        """For :meth:`Reservation.grow`."""
        with self._lock:
            if not self._fits(size):
                raise CapacityExceeded(
                    f"a request needs {size} bytes more than it reserved; {self._used} of {self.memory_bytes} are in "
                    "use: raise the decode node's memory bound"
                )
            self._used += size
            reservation.size += size

    def _reserve(self, size: int, cancellation: Cancellation, until: float) -> None:
        cancellation.check()
        if self.memory_bytes is not None and size > self.memory_bytes:
            raise CapacityExceeded(
                f"a request of {size} bytes cannot fit in {self.memory_bytes}: "
                "raise the decode node's memory bound, or ask for less"
            )
        with self._lock:
            if not self._queue and self._fits(size):
                self._take(size)
                return
            if len(self._queue) >= self._max_queue:
                raise Overloaded(
                    f"room for {size} bytes expected, {self._used} of {self.memory_bytes} are in use "
                    f"and {len(self._queue)} requests wait already: retry later"
                )
            waiter = _Waiter(size)
            self._queue.append(waiter)
        try:
            with cancellation.waking(waiter.woken.set):
                there = waiter.woken.wait(max(0.0, until - time.monotonic()))
                cancellation.check()
            if not there:
                raise DeadlineExceeded(f"room for {size} bytes was not free before the request's deadline")
        except BaseException:  # an interrupt too: room given to nobody is lost
            self._leave(waiter)
            raise

    def _fits(self, size: int) -> bool:
        return self.memory_bytes is None or self._used + size <= self.memory_bytes

    def _take(self, size: int) -> None:
        self._used += size
        self._holders += 1

    def _leave(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._next()
                return
        self._give_back(waiter.size)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size
            self._holders -= 1
            self._next()

    def _next(self) -> None:
        while self._queue and self._fits(self._queue[0].size):
            waiter = self._queue.popleft()
            self._take(waiter.size)
            waiter.woken.set()
