"""Prompts on their way to entries: a few in work, one chunk each in turn, the rest in a queue."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from lynxkv.codec import CodecSpec
from lynxkv.engine.base import Engine
from lynxkv.errors import EngineError, LynxError, TransferRejected
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.entries import Entry, EntryStore, entry_key
from lynxkv.node.spans import Buffer, decode_span, encode_prefill, encode_session, warm
from lynxkv.node.turns import Turns, in_turns
from lynxkv.speculation import Logits
from lynxkv.wire import token_digest

log = logging.getLogger(__name__)

RAW = CodecSpec(raw=True)


@dataclass(slots=True, eq=False)
class _Job:
    entry: Entry
    tokens: Sequence[int]
    cancellation: Cancellation
    future: "Future[None] | None" = None


class Prefilling:
    """Fills entries. All methods are thread-safe.

    Parameters
    ----------
    engine : Engine
    store : EntryStore
        Where the entries are kept; one that nobody reads any more is not filled further.
    chunk : int
        Tokens of a prefill chunk.
    max_running : int
        Prompts in work at a time; their chunks take turns.
    """

    def __init__(self, engine: Engine, store: EntryStore, *, chunk: int, max_running: int) -> None:
        self._engine, self._store, self._chunk = engine, store, chunk
        self._turns = Turns()
        self._lock = threading.Lock()
        self._jobs: dict[Entry, _Job] = {}
        self._running = 0
        self._workers = ThreadPoolExecutor(max_running, thread_name_prefix="prefill")

    def __len__(self) -> int:
        """Prompts in work or in the queue."""
        with self._lock:
            return len(self._jobs)

    @property
    def running(self) -> int:
        """Prompts in work."""
        with self._lock:
            return self._running

    def warm(self) -> "Future[None]":
        """Compile the codec's kernels, so that no request waits for it."""
        return self._workers.submit(warm, self._engine, CodecSpec())

    def submit(self, entry: Entry, tokens: Sequence[int]) -> None:
        """Fill ``entry`` when it is its turn; whoever listens to it hears how that goes."""
        job = _Job(entry, tokens, Cancellation())
        with self._lock:
            self._jobs[entry] = job
        job.future = self._workers.submit(self._run, job)

    def release(self, entry: Entry) -> None:
        """One reader of ``entry`` less; the last one of an entry that is not filled ends its filling."""
        self._store.release(entry)
        with self._lock:
            job = self._jobs.get(entry)
        if job is None or not self._store.abandon(entry):
            return
        job.cancellation.cancel("nobody waits for this prompt any more")
        if job.future is not None and job.future.cancel():
            self._end(job)
            entry.fail(TransferRejected("nobody waits for this prompt any more"))

    def close(self) -> None:
        """End what is in work after its chunk, and what is queued at once; returns when the threads have ended."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.cancellation.cancel("the prefill node stops")
        self._workers.shutdown(cancel_futures=True)
        for job in jobs:
            self._end(job)

    def _end(self, job: _Job) -> None:
        with self._lock:
            self._jobs.pop(job.entry, None)

    # What follows runs on the worker threads.

    def _run(self, job: _Job) -> None:
        with self._lock:
            self._running += 1
        try:
            self._fill(job)
        finally:
            with self._lock:
                self._running -= 1
            self._end(job)

    def _fill(self, job: _Job) -> None:
        entry = job.entry
        raw: Entry | None = None
        try:
            job.cancellation.check()
            raw = self._raw_twin(entry)
            entry.finish(self._encode_prefill(job) if raw is None else self._encode_held(job, raw))
        except LynxError as error:
            entry.fail(error)
        except Exception as error:  # the thread's edge: whatever it was, everyone who waits is told
            log.exception("prefill of %d tokens failed", len(job.tokens))
            entry.fail(EngineError(f"the prefill node could not run this prompt: {type(error).__name__}: {error}"))
        finally:
            if raw is not None:
                self._store.release(raw)

    def _raw_twin(self, entry: Entry) -> Entry | None:
        """A complete raw entry of the same tokens: another spec can be encoded from it without a prefill."""
        if entry.spec == RAW:
            return None
        raw = self._store.get(entry_key(self._engine.fingerprint, token_digest(entry.tokens), RAW))
        if raw is not None and not raw.complete:
            self.release(raw)
            return None
        return raw

    def _encode_prefill(self, job: _Job) -> Logits:
        entry = job.entry
        return encode_prefill(
            self._engine,
            job.tokens,
            self._chunk,
            entry.shape,
            entry.spec,
            entry.segments,
            partial(self._put, job),
            paced=lambda steps: in_turns(steps, self._turns, job.cancellation),
        )

    def _encode_held(self, job: _Job, raw: Entry) -> Logits:
        entry = job.entry
        session = self._engine.open(raw.shape.stop, self._chunk)
        try:
            session.place(raw.shape)
            for i, segment in enumerate(raw.segments):
                job.cancellation.check()
                decode_span(session, raw.shape, raw.spec, segment.span, raw.buffer(i), None)
            for index, data in encode_session(session, entry.shape, entry.spec, entry.segments):
                self._put(job, index, data)
        finally:
            session.close()
        if raw.logits is None:
            raise AssertionError("a raw entry is complete or not used")
        return raw.logits

    def _put(self, job: _Job, index: int, data: Buffer) -> None:
        job.cancellation.check()
        self._store.grow(job.entry, job.entry.beyond_reserved(index, data))
        job.entry.put(index, data)
