"""What a process does: its requests in flight and the last hundred, with their moments; never a prompt or an answer."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lynxkv.node.decode import Outcome
from lynxkv.serving.schema import Kind

KEPT = 100
"""Finished requests that are remembered."""

MOST_SEGMENTS = 60
"""Moments of one tier's segments; above, neighbours are summed."""


@dataclass(slots=True)
class Happened:
    """A moment: seconds since the request came, and for segments their tier and bytes."""

    what: str
    at: float
    tier: str | None = None
    bytes: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON shows it."""
        shown: dict[str, Any] = {"what": self.what, "at": round(self.at, 6)}
        return shown if self.tier is None else shown | {"tier": self.tier, "bytes": self.bytes}


@dataclass(slots=True, eq=False)
class Tracked:
    """One request, from its arrival to its last byte.

    Attributes
    ----------
    state : str
        ``queued``, ``prefill``, ``anchor``, ``draft``, ``residual``, ``verify``, ``decode``, then ``finished``,
        ``failed`` or ``aborted``.
    headers : mapping
        The request's own, names in lower case.
    onward : dict
        Headers that requests to other processes carry; observers add theirs in :meth:`Observer.began`.
    outcomes : list of Outcome
        Of finished choices, on a decode worker.
    status, error : int or None, str or None
        The answer's HTTP status, and the failure's code.
    """

    id: str
    kind: Kind
    role: str
    headers: Mapping[str, str]
    onward: dict[str, str] = field(default_factory=dict)
    transfer: str | None = None
    state: str = "queued"
    prompt_tokens: int = 0
    choices: int = 1
    started: float = field(default_factory=time.time)
    outcomes: list[Outcome] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    workers: dict[str, str] = field(default_factory=dict)
    finish: str | None = None
    error: str | None = None
    message: str | None = None
    status: int | None = None
    ended_s: float | None = None
    _begun: float = field(default_factory=time.monotonic)
    _moments: list[Happened] = field(default_factory=list)
    _segments: dict[str, list[Happened]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def elapsed(self, at: float | None = None) -> float:
        """Seconds since the request came, now or at ``time.monotonic()`` seconds ``at``."""
        return (time.monotonic() if at is None else at) - self._begun

    def happened(self, what: str, *, at: float | None = None, state: str | None = None) -> None:
        """Add a moment, now or at ``time.monotonic()`` seconds ``at``; any thread."""
        with self._lock:
            self._moments.append(Happened(what, self.elapsed(at)))
            if state is not None and self.ended_s is None:
                self.state = state

    def first(self, what: str) -> float | None:
        """When ``what`` first happened, in seconds since the request came; None: it did not."""
        with self._lock:
            return next((moment.at for moment in self._moments if moment.what == what), None)

    def segment(self, tier: str, size: int, at: float) -> None:
        """Bytes of ``tier`` have landed; any thread."""
        with self._lock:
            moments = self._segments.setdefault(tier, [])
            moments.append(Happened("segment", self.elapsed(at), tier, size))
            if len(moments) > MOST_SEGMENTS:
                moments[:] = [_sum(moments[i : i + 2]) for i in range(0, len(moments), 2)]

    def plain(self) -> dict[str, Any]:
        """As ``/lynx/requests`` shows it."""
        with self._lock:
            moments = [*self._moments, *(moment for tier in self._segments.values() for moment in tier)]
            moments.sort(key=lambda moment: moment.at)
            landed = {tier: sum(each.bytes for each in segments) for tier, segments in self._segments.items()}
        drafted = sum(outcome.drafted for outcome in self.outcomes)
        accepted = sum(outcome.accepted for outcome in self.outcomes)
        return {
            "id": self.id,
            "kind": self.kind,
            "role": self.role,
            "transfer_id": self.transfer,
            "state": self.state,
            "prompt_tokens": self.prompt_tokens,
            "choices": self.choices,
            "started": self.started,
            "moments": [moment.plain() for moment in moments],
            "drafted": drafted,
            "accepted": accepted,
            "answer_tokens": sum(len(outcome.tokens) for outcome in self.outcomes),
            "bytes": landed,
            "retried": list(self.retried),
            "workers": dict(self.workers),
            "finish": self.finish,
            "error": self.error,
            "message": self.message,
            "status": self.status,
            "ended_s": self.ended_s,
        }


class Observer(Protocol):
    """Hears of every request of a process, on its event loop; metrics, traces and logs are observers."""

    def began(self, request: Tracked) -> None:
        """A request came in."""
        ...

    def ended(self, request: Tracked) -> None:
        """It was answered, failed or aborted: everything known of it is there."""
        ...


class Activity:
    """The requests of one process.

    Parameters
    ----------
    role : str
    observers : iterable of Observer
    """

    def __init__(self, role: str, observers: Iterable[Observer] = ()) -> None:
        self.role = role
        self.observers = list(observers)
        self._running: dict[Tracked, None] = {}
        self._over: deque[Tracked] = deque(maxlen=KEPT)

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._running)

    def begin(self, request_id: str, kind: Kind, headers: Mapping[str, str]) -> Tracked:
        """A request came in; its ``state`` is ``queued``."""
        request = Tracked(request_id, kind, self.role, headers)
        request.onward["x-request-id"] = request_id
        request.happened("queued")
        self._running[request] = None
        for observer in self.observers:
            observer.began(request)
        return request

    def end(self, request: Tracked, state: str) -> None:
        """A request is over; idempotent."""
        if request not in self._running:
            return
        del self._running[request]
        request.happened(state, state=state)
        request.ended_s = request.elapsed()
        self._over.append(request)
        for observer in self.observers:
            observer.ended(request)

    def requests(self) -> list[Tracked]:
        """Those in flight, then the last finished ones, the newest first."""
        return [*reversed(self._running), *reversed(self._over)]

    def plain(self) -> dict[str, Any]:
        """As ``/lynx/requests`` shows it; ``now`` lets a reader correct for clocks that differ."""
        return {"now": time.time(), "role": self.role, "requests": [request.plain() for request in self.requests()]}


def _sum(moments: list[Happened]) -> Happened:
    """Neighbours as one moment, at the time of the later."""
    return Happened("segment", moments[-1].at, moments[-1].tier, sum(moment.bytes for moment in moments))
