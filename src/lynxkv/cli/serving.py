"""Makes the services of ``lynxkv serve`` from their options, and runs them."""

import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import APIRouter

from lynxkv.bench.processes import READY
from lynxkv.cli.loading import load_engine
from lynxkv.cli.prefill import parse_bytes, read_prefill
from lynxkv.errors import RequestError
from lynxkv.node.decode import DecodeNode
from lynxkv.node.prefill import PrefillNode
from lynxkv.serving import logs, observing, page, state
from lynxkv.serving.access import refuse_open
from lynxkv.serving.decode import DecodeService
from lynxkv.serving.heap import Trimmed
from lynxkv.serving.metrics import Reading
from lynxkv.serving.prefill import PrefillService
from lynxkv.serving.router import RouterService
from lynxkv.serving.running import Listening, run
from lynxkv.serving.service import Service, application
from lynxkv.serving.tracing import Tracing
from lynxkv.transport import Security, identified


@dataclass(frozen=True, slots=True)
class Common:
    """Options of every process."""

    host: str
    port: int
    max_body: str
    api_key: str | None = field(repr=False)
    node_secret: str | None = field(repr=False)
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    insecure: bool
    drain_s: float
    log_format: logs.LogFormat
    log_level: str
    until_stdin_closes: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """Clients' keys. RequestError if one is empty."""
        if self.api_key is None:
            return ()
        keys = tuple(key.strip() for key in self.api_key.split(","))
        if not all(keys):
            raise RequestError("--api-key must hold keys separated by commas; one of them is empty")
        return keys

    @property
    def node_tokens(self) -> tuple[str, ...]:
        """Bearer tokens of a worker."""
        return (*(() if self.node_secret is None else (self.node_secret,)), *self.keys)

    def security(self) -> Security:
        """What nodes know each other by."""
        return Security(self.tls_cert, self.tls_key, self.tls_ca, self.node_secret)

    def listening(self, tls: ssl.SSLContext | None) -> Listening:
        """How the process is reached and ends."""
        return Listening(self.host, self.port, tls, self.drain_s, self.until_stdin_closes)

    def begin(self, role: str) -> Tracing:
        """Begin logs and traces."""
        logs.configure(role, style=self.log_format, level=logging.getLevelNamesMapping()[self.log_level.upper()])
        return Tracing.from_environment(role)


@dataclass(frozen=True, slots=True)
class Compute:
    """Options of workers."""

    model: str
    dtype: str
    kv_dtype: str
    threads: int


def read_router(common: Common) -> tuple[ssl.SSLContext | None, int]:
    """A router's TLS towards its clients, who have keys and no certificates, and its largest body.

    RequestError for options that cannot be, or that leave it open to others.
    """
    refuse_open(common.host, guarded=bool(common.keys), insecure=common.insecure, what="--api-key")
    max_body = parse_bytes(common.max_body)
    if common.tls_cert is None and common.tls_key is None:
        return None, max_body
    if common.tls_cert is None or common.tls_key is None:
        raise RequestError("--tls-cert and --tls-key go together")
    return identified(ssl.PROTOCOL_TLS_SERVER, common.tls_cert, common.tls_key), max_body


def serve_prefill(
    common: Common,
    compute: Compute,
    *,
    kv_port: int,
    advertise: str | None,
    link: str | None,
    chunk: int,
    memory: str,
    ttl_s: float,
    lease_s: float,
    max_running: int,
    max_queue: int,
) -> None:
    """Run a prefill worker."""
    rate, memory_bytes = read_prefill(link, chunk, memory)
    max_body = parse_bytes(common.max_body)
    if advertise is None and common.host in ("0.0.0.0", "::"):
        raise RequestError(f"--host {common.host} is no address that others can reach: give --advertise as well")
    security, tls = _of_worker(common, kv=True)
    engine = load_engine(compute.model, dtype=compute.dtype, kv_dtype=compute.kv_dtype, threads=compute.threads)
    node = PrefillNode(
        engine,
        chunk=chunk,
        memory_bytes=memory_bytes,
        ttl_s=ttl_s,
        rate=rate,
        lease_s=lease_s,
        max_queue=max_queue,
        max_running=max_running,
        name=compute.model,
        security=security,
    )
    service = PrefillService(
        node,
        model=compute.model,
        host=common.host,
        port=kv_port,
        advertise=advertise,
        name=_name("prefill"),
        tokens=common.node_tokens,
        max_body=max_body,
    )

    def ready(url: str) -> str:
        host, port = service.kv
        return f"lynxkv prefill: {compute.model} {READY}{url}, its KV on {host}:{port}"

    _run(service, common, tls, compute.model, lambda: observing.of_prefill(service), ready)


def serve_decode(common: Common, compute: Compute, *, memory: str, max_running: int, max_queue: int) -> None:
    """Run a decode worker."""
    memory_bytes, max_body = parse_bytes(memory), parse_bytes(common.max_body)
    security, tls = _of_worker(common, kv=False)
    engine = load_engine(compute.model, dtype=compute.dtype, kv_dtype=compute.kv_dtype, threads=compute.threads)
    node = DecodeNode(engine, memory_bytes=memory_bytes, max_queue=max_running, name=compute.model, security=security)
    service = DecodeService(
        node,
        model=compute.model,
        max_running=max_running,
        max_queue=max_queue,
        name=_name("decode"),
        tokens=common.node_tokens,
        max_body=max_body,
    )

    def ready(url: str) -> str:
        return f"lynxkv decode: {compute.model} {READY}{url}"

    _run(service, common, tls, compute.model, lambda: observing.of_decode(service), ready)


def serve_router(
    common: Common,
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    sequential: bool,
    max_outstanding: int,
) -> None:
    """Run a router."""
    for url in (*prefill, *decode):
        _check_url(url)
    tls, max_body = read_router(common)
    tokens = common.node_tokens
    service = RouterService(
        prefill,
        decode,
        sequential=sequential,
        max_outstanding=max_outstanding,
        upstream_token=tokens[0] if tokens else None,
        tls=None if common.tls_ca is None else common.security().client_context(),
        tokens=common.keys,
        max_body=max_body,
    )

    def ready(url: str) -> str:
        return f"lynxkv router: {READY}{url}, its page on {url}/ui"

    routes = (page.routes(), state.routes(service))
    _run(service, common, tls, "", lambda: observing.of_router(service), ready, routes)


def _run(
    service: Service,
    common: Common,
    tls: ssl.SSLContext | None,
    model: str,
    read: Callable[[], Reading],
    ready: Callable[[str], str],
    routes: Iterable[APIRouter] = (),
) -> None:
    tracing = common.begin(service.role)
    try:
        metrics = observing.observe(service, model, read, tracing)
        service.activity.observers.append(Trimmed())
        run(service, application(service, (metrics, *routes)), common.listening(tls), ready)
    finally:
        tracing.close()


def _of_worker(common: Common, *, kv: bool) -> tuple[Security, ssl.SSLContext | None]:
    """Whom a worker trusts, and its HTTP's TLS. Whoever is refused KV is told so before a model is loaded."""
    security = common.security()
    tls = security.server_context()
    guarded = tls is not None or common.node_secret is not None or (bool(common.keys) and not kv)
    refuse_open(common.host, guarded=guarded, insecure=common.insecure, what="--node-secret, or --tls-cert with a CA")
    return security, tls


def _name(role: str) -> str:
    """Of this process, for those who look for it."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise RequestError(f"a worker's URL like http://127.0.0.1:8100 expected, got {url!r}")
