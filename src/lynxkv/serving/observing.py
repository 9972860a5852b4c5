"""Connects what a process does with its metrics, its traces and its log."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from fastapi import APIRouter
from fastapi.responses import Response

from lynxkv.serving import metrics
from lynxkv.serving.activity import Tracked
from lynxkv.serving.decode import DecodeService
from lynxkv.serving.metrics import Metrics, Reading
from lynxkv.serving.prefill import PrefillService
from lynxkv.serving.router import RouterService
from lynxkv.serving.service import Service
from lynxkv.serving.tracing import Trace, Tracing

log = logging.getLogger(__name__)

_PHASES = (
    ("queue", "queued", "prefill"),
    ("prefill", "prefill", "first_token"),
    ("pull anchor", "room", "anchor"),
    ("pull residual", "anchor", "target"),
    ("draft", "draft", "verify"),
    ("verify", "verify", "decode"),
    ("decode", "decode", "finished"),
)
"""Spans of a request, by the moments that begin and end them; a process has those of its role."""


def observe(service: Service, model: str, read: Callable[[], Reading], tracing: Tracing) -> APIRouter:
    """Have metrics, traces and log hear of every request of ``service``; the route of ``/metrics``.

    Parameters
    ----------
    service : Service
    model : str
        Of the build metric.
    read : callable
        What is held now: one of the functions below.
    tracing : Tracing
    """
    of_process = Metrics(service.role, model, lambda: _with_process(read()))
    service.activity.observers += [Metered(of_process), Traced(tracing), Logged()]
    router = APIRouter(include_in_schema=False)

    @router.get("/metrics")
    async def scrape() -> Response:  # on the loop, where what is held can be read
        body, media_type = of_process.render()
        return Response(body, headers={"content-type": media_type})

    return router


class Metered:
    """Counts requests."""

    def __init__(self, into: Metrics) -> None:
        self._into = into

    def began(self, request: Tracked) -> None:
        """Nothing is known yet."""

    def ended(self, request: Tracked) -> None:
        """Count it by what came of it."""
        if request.state == "aborted":
            self._into.abort()
        elif request.status is not None:
            self._into.request(request.status, request.ended_s or 0.0)
        for role in request.retried:
            self._into.retry(role)
        for outcome in request.outcomes:
            self._into.answer(
                prompt_tokens=request.prompt_tokens,
                answer_tokens=len(outcome.tokens),
                ttft_prefill_s=outcome.times.ttft_prefill_s,
                ttft_draft_s=outcome.times.ttft_draft_s,
                ttft_verified_s=outcome.times.ttft_verified_s,
                end_s=outcome.times.end_s,
                drafted=outcome.drafted,
                accepted=outcome.accepted,
            )


class Traced:
    """One span a request, a child of the caller's, with a child for every phase."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._traces: dict[Tracked, Trace] = {}

    def began(self, request: Tracked) -> None:
        """Begin the span; requests to other processes carry it on."""
        trace = self._traces[request] = self._tracing.begin(f"{request.role} {request.kind}", request.headers)
        request.onward.update(trace.headers())

    def ended(self, request: Tracked) -> None:
        """End it."""
        trace = self._traces.pop(request)
        trace.note(
            request=request.id,
            transfer=request.transfer,
            state=request.state,
            status=request.status,
            prompt_tokens=request.prompt_tokens,
            answer_tokens=sum(len(outcome.tokens) for outcome in request.outcomes),
            drafted=sum(outcome.drafted for outcome in request.outcomes),
            accepted=sum(outcome.accepted for outcome in request.outcomes),
            retried=",".join(request.retried) or None,
            prefill_worker=request.workers.get("prefill"),
            decode_worker=request.workers.get("decode"),
        )
        for name, begins, ends in _PHASES:
            trace.phase(name, request.first(begins), request.first(ends))
        trace.end(None if request.error is None else ": ".join(filter(None, (request.error, _why(request)))))


class Logged:
    """One line a request, when it is over."""

    def began(self, request: Tracked) -> None:
        """Its end says it all."""

    def ended(self, request: Tracked) -> None:
        """Say what came of it."""
        ours = request.status is not None and request.status >= 500 and request.error != "draining"
        fields = {
            "request": request.id,
            "transfer": request.transfer,
            "status": request.status,
            "prompt_tokens": request.prompt_tokens,
            "answer_tokens": sum(len(outcome.tokens) for outcome in request.outcomes) or None,
            "finish": request.finish,
            "error": request.error,
            "why": _why(request),
            "retried": ",".join(request.retried) or None,
            "seconds": round(request.ended_s or 0.0, 4),
        }
        told = {name: value for name, value in fields.items() if value is not None}
        log.log(logging.WARNING if ours else logging.INFO, "%s %s", request.kind, request.state, extra=told)


def _why(request: Tracked) -> str | None:
    """A failure's message; that of a refusal may quote the request, so only its code is told."""
    return request.message if (request.status or 0) >= 500 else None


def of_prefill(service: PrefillService) -> Reading:
    """What a prefill worker holds, on its loop."""
    held, totals = service.node.holdings(), service.node.totals()
    return Reading(
        running=service.activity.running,
        queues={"prefill": held.queued, "pull": held.parked},
        memory={
            "entries": held.entry_bytes,
            "reserved": held.memory_bytes,
            "sending": held.queued_bytes,
            "limit": service.node.store.memory_bytes,
        },
        leases=held.leases,
        entries=held.entries,
        sent=totals.sent_bytes,
        leases_ended=totals.released,
        resends=totals.resends,
    )


def of_decode(service: DecodeService) -> Reading:
    """What a decode worker holds."""
    held, totals = service.node.holdings(), service.node.totals()
    return Reading(
        running=service.activity.running,
        queues={"slot": service.slots.waiting, "memory": held.waiting},
        memory={"kv": held.kv_bytes, "staged": held.staged_bytes, "reserved": held.memory_bytes},
        received=totals.received_bytes,
        losses=totals.losses,
    )


def of_router(service: RouterService) -> Reading:
    """What a router knows of its workers."""
    workers = tuple(
        metrics.Worker(worker.role, worker.url, worker.up, worker.outstanding) for worker in service.fleet.workers
    )
    return Reading(running=service.activity.running, workers=workers)


def _with_process(reading: Reading) -> Reading:
    return replace(reading, tasks=len(asyncio.all_tasks()), threads=threading.active_count())
