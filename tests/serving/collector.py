"""A collector of OpenTelemetry spans, as small as one can be."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Takes spans by OTLP over HTTP.

    Attributes
    ----------
    url : str
    spans : list of (str, Span)
        With the name of the service that sent them.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[tuple[str, object]] = []

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]

    def of_trace(self, trace_id: str) -> list[tuple[str, object]]:
        """Spans of one trace."""
        return [(service, span) for service, span in list(self.spans) if span.trace_id.hex() == trace_id]


@contextmanager
def collector():
    """A running collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            made.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Collector(server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield made
        finally:
            server.shutdown()
