"""glibc's heap in a worker: KV buffers come and go on many threads, and what is free goes back to the system."""

import ctypes
import platform
import threading
import time

from lynxkv.serving.activity import Tracked

_M_ARENA_MAX = -8
ARENAS = 2
"""Heaps; glibc's own choice is eight a core, each of which keeps the most that its threads ever held at once."""

EVERY_S = 5.0


class Trimmed:
    """An observer of requests that trims the heap after them, at most every EVERY_S; without effect on other libcs."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
        self._next = 0.0
        if self._libc is not None:
            self._libc.mallopt(_M_ARENA_MAX, ARENAS)

    def began(self, request: Tracked) -> None:
        """Nothing is free yet."""

    def ended(self, request: Tracked) -> None:
        """What it held is free: trim, on a thread of its own since it takes milliseconds."""
        now = time.monotonic()
        if self._libc is not None and now >= self._next:
            self._next = now + EVERY_S
            threading.Thread(target=self._libc.malloc_trim, args=(0,), name="trim", daemon=True).start()
