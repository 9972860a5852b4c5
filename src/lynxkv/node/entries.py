"""Encoded KV at the prefill node: entries with a time to live, reference counts and one memory bound."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lynxkv.codec import CacheShape, CodecSpec, Segment, segment_bounds
from lynxkv.errors import CapacityExceeded, LynxError, Overloaded
from lynxkv.node.spans import Buffer
from lynxkv.speculation import Logits
from lynxkv.wire.fingerprint import Fingerprint
from lynxkv.wire.writer import segment_digest


def entry_key(fingerprint: Fingerprint, token_digest: bytes, spec: CodecSpec) -> bytes:
    """16 bytes that name one encoded KV: same model, same tokens, same codec spec."""
    return hashlib.blake2b(msgspec.msgpack.encode((fingerprint, token_digest, spec)), digest_size=16).digest()


class Encoded(NamedTuple):
    """A segment's bytes and their digest, computed once for all transfers."""

    data: Buffer
    digest: int


@dataclass(frozen=True, slots=True)
class Listener:
    """What an entry tells each transfer that reads it, on whichever thread it happens; must not block."""

    segment: Callable[[int, Encoded], object]
    finished: Callable[[Logits], object]
    failed: Callable[[LynxError], object]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a store holds right now."""

    entries: int
    bytes: int
    readers: int


class Entry:
    """One encoded KV, complete or still being encoded. All methods are thread-safe."""

    def __init__(
        self, key: bytes, tokens: bytes, shape: CacheShape, spec: CodecSpec, segments: tuple[Segment, ...]
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.shape = shape
        self.spec = spec
        self.segments = segments
        self._least = tuple(segment_bounds(shape, spec, segment)[0] for segment in segments)
        self.reserved = sum(self._least)
        self.readers = 0
        self.used = time.monotonic()
        self.error: LynxError | None = None
        self.logits: Logits | None = None
        self._buffers: dict[int, Encoded] = {}
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        """Whether every segment and the logits of token 1 are there."""
        return self.logits is not None

    def buffer(self, index: int) -> Buffer:
        """Bytes of segment ``index`` of a complete entry."""
        return self._buffers[index].data

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the segments that are there."""
        with self._lock:
            return sum(encoded.data.nbytes for encoded in self._buffers.values())

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` all there is, and then all that comes."""
        with self._lock:
            known = sorted(self._buffers.items())
            logits, error = self.logits, self.error
            if logits is None and error is None:
                self._listeners.append(listener)
            for index, encoded in known:
                listener.segment(index, encoded)
        if logits is not None:
            listener.finished(logits)
        if error is not None:
            listener.failed(error)

    def beyond_reserved(self, index: int, buffer: Buffer) -> int:
        """Bytes of a segment that were not reserved: the raw values of groups the codec flagged."""
        return buffer.nbytes - self._least[index]

    def put(self, index: int, buffer: Buffer) -> None:
        """Segment ``index`` is encoded."""
        encoded = Encoded(buffer, segment_digest(buffer.data))
        with self._lock:
            self._buffers[index] = encoded
            for listener in self._listeners:
                listener.segment(index, encoded)

    def finish(self, logits: Logits) -> None:
        """Every segment was put; ``logits`` ``[vocab]`` are those of token 1."""
        with self._lock:
            self.logits = logits
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.finished(logits)

    def fail(self, error: LynxError) -> None:
        """Encoding ended with ``error``; its bytes are dropped."""
        with self._lock:
            self.error = error
            self._buffers.clear()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.failed(error)


class EntryStore:
    """Entries by key within ``memory_bytes``.

    An entry nobody reads lives ``ttl_s`` after its last use; when room is short it goes earlier, the least
    recently used first. Room that readers hold is waited for: full memory is back-pressure.
    """

    def __init__(self, memory_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory_bytes = memory_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[bytes, Entry] = {}
        self._lock = threading.RLock()
        self._waiting: set[Callable[[], object]] = set()

    def get(self, key: bytes) -> Entry | None:
        """The entry of ``key`` with one more reader, or None; a failed entry is not found."""
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is None or entry.error is not None:
                return None
            return self._read(entry)

    async def add(self, entry: Entry, deadline_s: float) -> tuple[Entry, bool]:
        """Reserve room for ``entry`` and keep it; ``(entry, True)``, or another's of the same key and False.

        Either way with one more reader; a caller that is cancelled holds nothing.

        Raises
        ------
        CapacityExceeded
            It can never fit.
        Overloaded
            Room was not free within ``deadline_s`` seconds.
        """
        if entry.reserved > self.memory_bytes:
            raise CapacityExceeded(
                f"an entry of {entry.reserved} bytes cannot fit in {self.memory_bytes}: "
                "raise the prefill node's memory bound or send a shorter prompt"
            )
        until = self._clock() + deadline_s
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        try:
            while True:
                changed.clear()
                with self._lock:
                    self._expire()
                    other = self._entries.get(entry.key)
                    if other is not None and other.error is None:
                        return self._read(other), False
                    if self._make_room(entry.reserved):
                        self._entries[entry.key] = entry
                        return self._read(entry), True
                    self._waiting.add(wake)
                left = until - self._clock()
                if left <= 0:
                    raise Overloaded(
                        f"room for {entry.reserved} bytes expected within {deadline_s:g} s; "
                        f"{self.used_bytes} of {self.memory_bytes} are in use: retry later"
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, 1.0)):  # time to live ends without a signal
                        await changed.wait()
        finally:
            with self._lock:
                self._waiting.discard(wake)

    def grow(self, entry: Entry, size: int) -> None:
        """Reserve ``size`` more bytes for ``entry``; CapacityExceeded where no idle entry can make way for them."""
        if size <= 0:
            return
        with self._lock:
            if not self._make_room(size):
                raise CapacityExceeded(
                    f"an entry needs {size} bytes more than its shape, for values beyond the codec's range; "
                    f"{self.used_bytes} of {self.memory_bytes} are in use: raise the prefill node's memory bound"
                )
            entry.reserved += size

    def release(self, entry: Entry) -> None:
        """One reader less."""
        with self._lock:
            if entry.readers < 1:
                raise AssertionError("an entry was released more often than it was read")
            entry.readers -= 1
            entry.used = self._clock()
            if entry.error is not None and not entry.readers:
                self._drop(entry)
            for wake in self._waiting:
                wake()

    def abandon(self, entry: Entry) -> bool:
        """Drop ``entry`` if nobody reads it; False: somebody does."""
        with self._lock:
            if entry.readers:
                return False
            self._drop(entry)
            return True

    def expire(self) -> None:
        """Drop what nobody reads and whose time is over."""
        with self._lock:
            self._expire()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved by all entries."""
        with self._lock:
            return sum(entry.reserved for entry in self._entries.values())

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all entries' segments that are there."""
        with self._lock:
            entries = list(self._entries.values())
        return sum(entry.encoded_bytes for entry in entries)

    def check_integrity(self) -> Holdings:
        """What is held; AssertionError when a bound or a count is broken."""
        with self._lock:
            entries = list(self._entries.values())
            used = sum(entry.reserved for entry in entries)
            if used > self.memory_bytes or any(entry.readers < 0 for entry in entries):
                raise AssertionError(f"{used} bytes of {self.memory_bytes} in use")
            return Holdings(len(entries), used, sum(entry.readers for entry in entries))

    def _read(self, entry: Entry) -> Entry:
        entry.readers += 1
        entry.used = self._clock()
        return entry

    def _drop(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def _idle(self) -> list[Entry]:
        return sorted((e for e in self._entries.values() if not e.readers), key=lambda e: e.used)

    def _expire(self) -> None:
        now = self._clock()
        for entry in self._idle():
            if now - entry.used >= self.ttl_s or entry.error is not None:
                del self._entries[entry.key]

    def _make_room(self, size: int) -> bool:
        idle = self._idle()
        while self.used_bytes + size > self.memory_bytes:
            if not idle:
                return False
            del self._entries[idle.pop(0).key]
        return True
