"""Prometheus metrics of one process: what it has done, and what it holds while it is asked."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lynxkv import __version__

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_TPOT = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_REQUEST = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Worker:
    """What a router knows of one worker."""

    role: str
    url: str
    up: bool
    outstanding_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process holds now, and the totals its nodes keep themselves.

    Parameters
    ----------
    running : int
        Requests in work.
    queues : mapping of str to int
        Requests that wait, by what for.
    memory : mapping of str to int
        Bytes by kind; ``limit`` is the bound of them all.
    leases, entries : int or None
        Transfers under a lease and entries held; None where there are none by nature.
    sent, received : mapping of str to int
        Payload bytes by tier so far.
    losses : mapping of str to int
        Transfers lost so far, by the error's class.
    leases_ended : mapping of str to int
        Leases ended so far, by why.
    resends : int or None
        Segments sent again so far.
    workers : tuple of Worker
        Of a router.
    tasks, threads : int
        Of the process: they return to what an idle one has.
    """

    running: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    leases: int | None = None
    entries: int | None = None
    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    leases_ended: Mapping[str, int] = field(default_factory=dict)
    resends: int | None = None
    workers: tuple[Worker, ...] = ()
    tasks: int = 0
    threads: int = 0


class Metrics:
    """Metrics of one process, in a registry of their own. No label has a value per request.

    Parameters
    ----------
    role : {"prefill", "decode", "router"}
    model : str
    read : callable
        Gives a :class:`Reading`; called at every scrape, on the scraping thread.
    """

    def __init__(self, role: str, model: str, read: Callable[[], Reading]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter, which nothing here uses
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Readings(role, model, read))
        ProcessCollector(registry=self._registry)
        into = self._registry
        self._requests = Counter("lynxkv_requests", "Requests answered, by HTTP status.", ["status"], registry=into)
        self._aborts = Counter("lynxkv_aborts", "Requests whose client went away before the end.", registry=into)
        self._seconds = Histogram(
            "lynxkv_request_seconds", "From a request's arrival to its last byte.", buckets=_REQUEST, registry=into
        )
        if role == "router":
            self._retries = Counter(
                "lynxkv_router_retries", "Requests sent to another worker, by role of the one that failed.", ["role"],
                registry=into,
            )  # fmt: skip
        if role == "decode":
            self._ttft = Histogram(
                "lynxkv_ttft_seconds",
                "To the first token: prefill (drawn by the prefill worker), draft (the decode worker's own, "
                "verified or not), verified (that one, on the target).",
                ["kind"],
                buckets=_TTFT,
                registry=into,
            )
            for kind in ("prefill", "draft", "verified"):
                self._ttft.labels(kind)
            self._tpot = Histogram(
                "lynxkv_tpot_seconds", "Per token after the first, of answers of two and more.", buckets=_TPOT,
                registry=into,
            )  # fmt: skip
            self._drafted = Counter(
                "lynxkv_window_drafted_tokens", "Tokens drafted before verification.", registry=into
            )
            self._accepted = Counter("lynxkv_window_accepted_tokens", "Drafted tokens that were kept.", registry=into)
            self._answer_tokens = Counter("lynxkv_answer_tokens", "Tokens of finished answers.", registry=into)
            self._prompt_tokens = Counter("lynxkv_prompt_tokens", "Tokens of their prompts.", registry=into)

    def request(self, status: int, seconds: float) -> None:
        """A request was answered in full, with an error's status included."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def abort(self) -> None:
        """A client went away before its answer was complete."""
        self._aborts.inc()

    def retry(self, role: str) -> None:
        """A router sent a request to another worker, since one of ``role`` failed."""
        self._retries.labels(role).inc()

    def answer(
        self,
        *,
        prompt_tokens: int,
        answer_tokens: int,
        ttft_prefill_s: float | None,
        ttft_draft_s: float | None,
        ttft_verified_s: float | None,
        end_s: float | None,
        drafted: int,
        accepted: int,
    ) -> None:
        """An answer was decoded to its end; times count from the start of its work, None: it never came to that."""
        for kind, seconds in (("prefill", ttft_prefill_s), ("draft", ttft_draft_s), ("verified", ttft_verified_s)):
            if seconds is not None:
                self._ttft.labels(kind).observe(seconds)
        if answer_tokens > 1 and end_s is not None and ttft_prefill_s is not None:
            self._tpot.observe((end_s - ttft_prefill_s) / (answer_tokens - 1))
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        self._prompt_tokens.inc(prompt_tokens)
        self._answer_tokens.inc(answer_tokens)

    def render(self) -> tuple[bytes, str]:
        """The text of ``/metrics`` and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Readings(Collector):
    """Turns one reading a scrape into samples."""

    def __init__(self, role: str, model: str, read: Callable[[], Reading]) -> None:
        self._info = {"role": role, "model": model, "version": __version__}
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Samples of what is held now."""
        now = self._read()
        yield InfoMetricFamily("lynxkv_build", "What runs here.", value=self._info)
        yield GaugeMetricFamily("lynxkv_running_requests", "Requests in work.", value=now.running)
        yield _gauges("lynxkv_queue_depth", "Requests that wait, by what for.", "queue", now.queues)
        yield _gauges("lynxkv_memory_bytes", "Bytes held, by kind; limit is their bound.", "kind", now.memory)
        yield GaugeMetricFamily("lynxkv_tasks", "Tasks on the event loop.", value=now.tasks)
        yield GaugeMetricFamily("lynxkv_threads", "Python threads.", value=now.threads)
        if now.leases is not None:
            yield GaugeMetricFamily("lynxkv_leases", "Transfers under a lease.", value=now.leases)
            yield _counts("lynxkv_leases_ended", "Leases ended, by why.", "reason", now.leases_ended)
        if now.entries is not None:
            yield GaugeMetricFamily("lynxkv_entries", "Encoded KV caches held.", value=now.entries)
        if now.resends is not None:
            yield CounterMetricFamily("lynxkv_resends", "Segments sent again.", value=now.resends)
        moved = CounterMetricFamily(
            "lynxkv_transfer_bytes", "Payload bytes, by tier and direction.", labels=["tier", "direction"]
        )
        for direction, tiers in (("sent", now.sent), ("received", now.received)):
            for tier, size in tiers.items():
                moved.add_metric([tier, direction], size)
        yield moved
        yield _counts("lynxkv_losses", "Transfers that were lost, by the error's class.", "cause", now.losses)
        yield from _workers(now.workers)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family


def _counts(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family


def _workers(workers: Iterable[Worker]) -> Iterator[Metric]:
    up = GaugeMetricFamily("lynxkv_router_worker_up", "1 if the worker answers.", labels=["role", "worker"])
    tokens = GaugeMetricFamily(
        "lynxkv_router_outstanding_tokens", "Tokens of requests sent to a worker.", labels=["role", "worker"]
    )
    for worker in workers:
        up.add_metric([worker.role, worker.url], worker.up)
        tokens.add_metric([worker.role, worker.url], worker.outstanding_tokens)
    if up.samples:
        yield up
        yield tokens
