"""A request that may be cancelled from any thread, whatever its own thread waits for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lynxkv.errors import Cancelled


class Cancellation:
    """Whether a request was cancelled, and whom to wake when it is. All methods are thread-safe.

    Whoever waits registers a wake with :meth:`waking`, and calls :meth:`check` after every wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._wakes: list[Callable[[], object]] = []

    @property
    def reason(self) -> str | None:
        """Why it was cancelled; None: it was not."""
        return self._reason

    def cancel(self, reason: str) -> None:
        """Cancel, and wake all who wait; only the first call counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    def check(self) -> None:
        """Raise :class:`~lynxkv.errors.Cancelled` once it is cancelled."""
        if self._reason is not None:
            raise Cancelled(f"the request was cancelled: {self._reason}")

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have ``wake`` called when it is cancelled, at once if it is already; from the thread that cancels."""
        with self._lock:
            self._wakes.append(wake)
            late = self._reason is not None
        try:
            if late:
                wake()
            yield
        finally:
            with self._lock:
                self._wakes.remove(wake)
