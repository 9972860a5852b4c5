"""Traces of requests across processes: W3C ``traceparent`` in and out, spans to an OpenTelemetry collector.

Off, and without any import of OpenTelemetry, unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or the one of traces) is set.
A span is an explicit object rather than the current context: a request's work crosses tasks, threads and generators.
"""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from lynxkv import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

Attribute = str | bool | int | float

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Trace(Protocol):
    """One request's span in this process."""

    @property
    def trace_id(self) -> str | None:
        """32 hex digits, for log lines; None where tracing is off."""
        ...

    def elapsed(self) -> float:
        """Seconds since the span began."""
        ...

    def headers(self) -> dict[str, str]:
        """What an outgoing request carries so that its spans become children of this one."""
        ...

    def note(self, **attributes: Attribute | None) -> None:
        """Attach facts; None is left out. Never a prompt or an answer."""
        ...

    def phase(self, name: str, begin_s: float | None, end_s: float | None, **attributes: Attribute | None) -> None:
        """Add a child span of known times, in seconds since this span began; nothing where one is None."""
        ...

    def end(self, error: str | None = None) -> None:
        """End the span, with what went wrong; idempotent. Never a prompt or an answer."""
        ...


class Tracing:
    """Spans of one process. Make it with :meth:`from_environment`."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("lynxkv", __version__) if provider is not None else None

    @classmethod
    def from_environment(cls, role: str) -> "Tracing":
        """Tracing as OpenTelemetry's own variables configure it; off if they name no endpoint.

        Parameters
        ----------
        role : str
            The service is named ``lynxkv-<role>`` unless ``OTEL_SERVICE_NAME`` says otherwise.
        """
        if not any(os.environ.get(name) for name in _ENDPOINTS):
            return cls()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or f"lynxkv-{role}"
        resource = Resource.create({"service.name": name, "service.version": __version__, "lynxkv.role": role})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, name: str, headers: Mapping[str, str]) -> Trace:
        """Begin the span of one incoming request, a child of the caller's if ``headers`` carry a ``traceparent``."""
        if self._tracer is None:
            return _Off()
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carried = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        begun_ns = time.time_ns()
        context = TraceContextTextMapPropagator().extract(carried)
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=begun_ns)
        return _On(self, span, begun_ns)

    def _child(self, span: "Span", name: str, begin_ns: int, end_ns: int, attributes: dict[str, Attribute]) -> None:
        from opentelemetry.trace import set_span_in_context

        if self._tracer is not None:
            child = self._tracer.start_span(name, set_span_in_context(span), attributes=attributes, start_time=begin_ns)
            child.end(end_ns)

    def close(self) -> None:
        """Send what is left; returns within the exporter's own timeout."""
        if self._provider is not None:
            self._provider.shutdown()


class _Off:
    """Tracing is not configured."""

    trace_id = None

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self._begun

    def headers(self) -> dict[str, str]:
        """Nothing is carried on."""
        return {}

    def note(self, **attributes: Attribute | None) -> None:
        """Nothing is kept."""

    def phase(self, name: str, begin_s: float | None, end_s: float | None, **attributes: Attribute | None) -> None:
        """Nothing is kept."""

    def end(self, error: str | None = None) -> None:
        """Nothing ends."""


class _On:
    """A span that is recorded."""

    def __init__(self, tracing: Tracing, span: "Span", begun_ns: int) -> None:
        self._tracing, self._span, self._begun_ns = tracing, span, begun_ns
        self._begun = time.monotonic()
        self._ended = False

    @property
    def trace_id(self) -> str | None:
        """32 hex digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def elapsed(self) -> float:
        """Seconds since the span began."""
        return time.monotonic() - self._begun

    def headers(self) -> dict[str, str]:
        """``traceparent``, and ``tracestate`` where the caller sent one."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return carrier

    def note(self, **attributes: Attribute | None) -> None:
        """Attach facts under ``lynxkv.``."""
        self._span.set_attributes(_named(attributes))

    def phase(self, name: str, begin_s: float | None, end_s: float | None, **attributes: Attribute | None) -> None:
        """Add a child span."""
        if begin_s is None or end_s is None:
            return
        begin, end = (self._begun_ns + int(at * 1e9) for at in (begin_s, max(begin_s, end_s)))
        self._tracing._child(self._span, name, begin, end, _named(attributes))

    def end(self, error: str | None = None) -> None:
        """End the span; an error becomes its status."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def _named(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {f"lynxkv.{name}": value for name, value in attributes.items() if value is not None}
