"""The commands and their options."""

import logging
import sys
from typing import Annotated

import typer

from lynxkv import __version__
from lynxkv.cli.options import (
    DEFAULT_MODEL,
    Chunk,
    Document,
    Dtype,
    EntryMemory,
    Json,
    KvDtype,
    Lease,
    LinkRate,
    MaxTokens,
    Model,
    OnLoss,
    Seed,
    Temperature,
    Threads,
    Ttl,
    UntilStdinCloses,
    Verify,
    reported,
)
from lynxkv.cli.serve import serve_app
from lynxkv.errors import RequestError

app = typer.Typer(
    help="Progressive KV-cache transfer: decode on 4 bits, verify on 8.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(serve_app, name="serve")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")] = False,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    # A node's warnings are for its operator; what a command meets, its own last line says.
    quiet = logging.WARNING if context.invoked_subcommand == "prefill" else logging.ERROR
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else quiet,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


@app.command()
@reported
def prefill(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; there is no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 7600,
    link: LinkRate = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "bfloat16",
    chunk: Chunk = 512,
    memory: EntryMemory = "4GB",
    ttl: Ttl = 600,
    lease: Lease = 30,
    drain: Annotated[float, typer.Option(help="Seconds that SIGTERM gives running transfers.")] = 10,
    threads: Threads = 1,
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Run a prefill node: it prefills prompts, holds their encoded KV and serves it."""
    from lynxkv.cli.prefill import serve

    serve(
        model=model,
        host=host,
        port=port,
        link=link,
        dtype=dtype,
        kv_dtype=kv_dtype,
        chunk=chunk,
        memory=memory,
        ttl_s=ttl,
        lease_s=lease,
        drain_s=drain,
        threads=threads,
        until_stdin_closes=until_stdin_closes,
    )


@app.command()
@reported
def generate(
    prompt: Annotated[str, typer.Option(help="What is asked; with --document, about that text.")],
    peer: Annotated[str, typer.Option("--prefill", help="HOST:PORT of the prefill node.")] = "127.0.0.1:7600",
    model: Model = DEFAULT_MODEL,
    document: Document = None,
    tokens: Annotated[int, typer.Option(help="Most prompt tokens to take of the document.")] = 4096,
    scheme: Annotated[str, typer.Option(help="bf16, int8, int4 or lynx.")] = "lynx",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens of at least this share of the likeliest one's.")] = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    verify: Annotated[Verify, typer.Option(help="One pass, or a token at a time (bit for bit).")] = "batched",
    cap: Annotated[int, typer.Option(help="Most drafts before verification.")] = 64,
    on_loss: Annotated[OnLoss, typer.Option(help="When the KV does not come: fail, or prefill here.")] = "fail",
    deadline: Annotated[float, typer.Option(help="Seconds by which the KV has to be here.")] = 300,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "bfloat16",
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """Decode one answer from a prefill node's KV, verified on its target."""
    from lynxkv.cli.generate import answer

    answer(
        prompt=prompt,
        peer=peer,
        model=model,
        document=document,
        tokens=tokens,
        scheme=scheme,
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": tuple(stop or ()),
        },
        verify=verify,
        cap=cap,
        on_loss=on_loss,
        deadline_s=deadline,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=threads,
        as_json=json,
    )


@app.command()
@reported
def demo(
    model: Model = DEFAULT_MODEL,
    link: Annotated[str, typer.Option(help="Rate of the link between the two processes.")] = "100mbit",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    document: Document = None,
    prompt: Annotated[str | None, typer.Option(help="What is asked about the document.")] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "bfloat16",
    json: Json = False,
) -> None:
    """Compare bf16, int8, int4 and lynx between two processes and a slow link on this machine."""
    from lynxkv.cli.demo import run

    if tokens < 1 or max_tokens < 1:
        raise RequestError(f"--tokens and --max-tokens must be at least 1, got {tokens} and {max_tokens}")
    run(
        model=model,
        link=link,
        tokens=tokens,
        document=document,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        kv_dtype=kv_dtype,
        as_json=json,
    )
