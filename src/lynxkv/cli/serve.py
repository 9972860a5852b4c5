"""``lynxkv serve``: workers and router with an OpenAI API. Whatever is not given keeps to the loopback."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lynxkv.cli.options import (
    DEFAULT_MODEL,
    Chunk,
    Dtype,
    EntryMemory,
    KvDtype,
    Lease,
    LinkRate,
    Model,
    Threads,
    Ttl,
    UntilStdinCloses,
    reported,
)

serve_app = typer.Typer(help="Serve an OpenAI API: a router, prefill workers and decode workers.", no_args_is_help=True)

Host = Annotated[str, typer.Option(help="Address to listen on; beyond the loopback it has to be protected.")]
Port = Annotated[int, typer.Option(help="Port of HTTP; 0: any free one.", min=0, max=65535)]
Drain = Annotated[float, typer.Option(help="Seconds that SIGTERM gives requests in flight.", min=0)]
Body = Annotated[str, typer.Option("--max-body", help="Largest request body, e.g. 8MB.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond the loopback without protection.")]
LogFormat = Annotated[Literal["text", "json"], typer.Option(help="Of log lines, on standard error.")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Least level of log lines.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Keys of clients, several by comma; one is then needed. Better given by the variable, which no list of "
        "processes shows.",
        envvar="LYNXKV_API_KEY",
    ),
]
NodeSecret = Annotated[
    str | None,
    typer.Option(help="Shared by workers and routers; without it no KV is told.", envvar="LYNXKV_NODE_SECRET"),
]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain of this process, PEM.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key, PEM.")]
TlsCa = Annotated[Path | None, typer.Option(help="Authority of the nodes, PEM: each verifies the others against it.")]
MaxQueue = Annotated[int, typer.Option(help="Requests that may wait for that; one more is refused.", min=0)]
Sequential = Annotated[
    bool, typer.Option("--sequential", help="Prefill first, then decode, as vLLM's routers do; else both at once.")
]
MaxOutstanding = Annotated[int, typer.Option(help="Tokens of all requests in flight together; more is refused.", min=1)]


@serve_app.command()
@reported
def prefill(
    model: Model = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    kv_port: Annotated[int, typer.Option(help="Port of the KV; 0: any free one.", min=0, max=65535)] = 7600,
    advertise: Annotated[str | None, typer.Option(help="Host that decode workers are told, if not --host.")] = None,
    link: LinkRate = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "bfloat16",
    chunk: Chunk = 512,
    memory: EntryMemory = "4GB",
    ttl: Ttl = 600,
    lease: Lease = 30,
    max_running: Annotated[int, typer.Option(help="Prompts in work at a time, a chunk each in turn.", min=1)] = 4,
    max_queue: MaxQueue = 64,
    threads: Threads = 1,
    max_body: Body = "8MB",
    api_key: ApiKey = None,
    node_secret: NodeSecret = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
    drain: Drain = 30,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Prefill prompts for a router and serve their KV to decode workers."""
    from lynxkv.cli.serving import Common, Compute, serve_prefill

    serve_prefill(
        Common(
            host, port, max_body, api_key, node_secret, tls_cert, tls_key, tls_ca, insecure, drain, log_format,
            log_level, until_stdin_closes,
        ),
        Compute(model, dtype, kv_dtype, threads),
        kv_port=kv_port,
        advertise=advertise,
        link=link,
        chunk=chunk,
        memory=memory,
        ttl_s=ttl,
        lease_s=lease,
        max_running=max_running,
        max_queue=max_queue,
    )  # fmt: skip


@serve_app.command()
@reported
def decode(
    model: Model = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8200,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "bfloat16",
    memory: Annotated[str, typer.Option(help="Bound of all answers' KV and compressed bytes together.")] = "4GB",
    max_running: Annotated[int, typer.Option(help="Answers in work at a time, a token each in turn.", min=1)] = 16,
    max_queue: MaxQueue = 64,
    threads: Threads = 1,
    max_body: Body = "8MB",
    api_key: ApiKey = None,
    node_secret: NodeSecret = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
    drain: Drain = 30,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Pull KV from prefill workers and decode answers for a router."""
    from lynxkv.cli.serving import Common, Compute, serve_decode

    serve_decode(
        Common(
            host, port, max_body, api_key, node_secret, tls_cert, tls_key, tls_ca, insecure, drain, log_format,
            log_level, until_stdin_closes,
        ),
        Compute(model, dtype, kv_dtype, threads),
        memory=memory,
        max_running=max_running,
        max_queue=max_queue,
    )  # fmt: skip


@serve_app.command()
@reported
def router(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill worker; may be repeated.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode worker; may be repeated.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    sequential: Sequential = False,
    max_outstanding: MaxOutstanding = 1 << 20,
    max_body: Body = "8MB",
    api_key: ApiKey = None,
    node_secret: NodeSecret = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
    drain: Drain = 30,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Take requests of OpenAI clients and spread them over workers; the page is at /ui."""
    from lynxkv.cli.serving import Common, serve_router

    serve_router(
        Common(
            host, port, max_body, api_key, node_secret, tls_cert, tls_key, tls_ca, insecure, drain, log_format,
            log_level, until_stdin_closes,
        ),
        prefill=prefill,
        decode=decode,
        sequential=sequential,
        max_outstanding=max_outstanding,
    )  # fmt: skip


@serve_app.command("all")
@reported
def everything(
    model: Model = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    link: LinkRate = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "bfloat16",
    chunk: Chunk = 512,
    memory: Annotated[str, typer.Option(help="Bound of held entries, and as much again for answers.")] = "4GB",
    ttl: Ttl = 600,
    lease: Lease = 30,
    max_running: Annotated[int, typer.Option(help="Answers in work at a time, a token each in turn.", min=1)] = 16,
    max_queue: MaxQueue = 64,
    sequential: Sequential = False,
    max_outstanding: MaxOutstanding = 1 << 20,
    threads: Threads = 1,
    max_body: Body = "8MB",
    api_key: ApiKey = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = False,
    drain: Drain = 30,
    log_format: LogFormat = "text",
    log_level: LogLevel = "warning",
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Run a prefill worker, a decode worker and a router on this machine, until interrupted."""
    from lynxkv.cli.prefill import read_prefill
    from lynxkv.cli.serve_all import Plan, serve_all
    from lynxkv.cli.serving import Common, read_router
    from lynxkv.engine.models import resolve

    read_prefill(link, chunk, memory)  # what cannot be is told once, before anything is started
    read_router(
        Common(
            host, port, max_body, api_key, None, tls_cert, tls_key, None, insecure, drain, log_format, log_level,
            until_stdin_closes,
        )
    )  # fmt: skip
    resolve(model)
    common = ["--max-body", max_body, "--drain", drain, "--log-format", log_format, "--log-level", log_level]
    compute = ["--model", model, "--dtype", dtype, "--kv-dtype", kv_dtype, "--threads", threads]
    tls = [part for name, path in (("--tls-cert", tls_cert), ("--tls-key", tls_key)) if path for part in (name, path)]
    serve_all(
        Plan(
            prefill=[
                *common, *compute, *(["--link", link] if link else []), "--chunk", chunk, "--memory", memory,
                "--ttl", ttl, "--lease", lease, "--max-queue", max_queue,
            ],
            decode=[*common, *compute, "--memory", memory, "--max-running", max_running, "--max-queue", max_queue],
            router=[
                *common, "--host", host, "--port", port, "--max-outstanding", max_outstanding, *tls,
                *(["--sequential"] if sequential else []), *(["--insecure"] if insecure else []),
            ],
            api_key=api_key,
            model=model,
            until_stdin_closes=until_stdin_closes,
        )
    )  # fmt: skip
