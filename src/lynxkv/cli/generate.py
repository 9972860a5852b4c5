"""``lynxkv generate``: one answer from a prefill node's KV."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lynxkv.bench.documents import long_prompt, read_document
from lynxkv.bench.schemes import SCHEMES
from lynxkv.cli.loading import load_engine
from lynxkv.errors import RequestError
from lynxkv.node.decode import DecodeNode, OnLoss, Outcome, Request
from lynxkv.speculation import SamplingParams, Verified, Verify


def answer(
    *,
    prompt: str,
    peer: str,
    model: str,
    document: Path | None,
    tokens: int,
    scheme: str,
    sampling: dict[str, Any],
    verify: Verify,
    cap: int,
    on_loss: OnLoss,
    deadline_s: float,
    dtype: str,
    kv_dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Print the answer as it is verified, and what it took to standard error; or all of it as JSON."""
    address = parse_address(peer)
    if scheme not in SCHEMES:
        raise RequestError(f"--scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    params = SamplingParams(**sampling)
    text = None if document is None else read_document(document)
    engine = load_engine(model, dtype=dtype, kv_dtype=kv_dtype, threads=threads)
    ids = engine.chat(prompt) if text is None else long_prompt(engine, text, prompt, tokens)
    request = Request(
        tuple(ids),
        params,
        spec=SCHEMES[scheme].spec,
        verify=verify,
        cap=cap,
        on_loss=on_loss,
        deadline_s=deadline_s,
    )
    with DecodeNode(engine) as node:
        outcome = _run(node, address, request, show=not as_json)
    if as_json:
        print(json.dumps({"prompt_tokens": len(ids), **asdict(outcome)}))
        return
    print(
        f"\n[{len(ids)} prompt tokens, {len(outcome.tokens)} answer tokens, finish {outcome.finish}, "
        f"drafted {outcome.drafted}, accepted {outcome.accepted}, {outcome.wire_bytes} bytes, seed {outcome.seed}]",
        file=sys.stderr,
    )


def _run(node: DecodeNode, address: tuple[str, int], request: Request, *, show: bool) -> Outcome:
    generation = node.generate(address, request)
    for event in generation:
        if show and isinstance(event, Verified):
            print(event.text, end="", flush=True)
    return generation.outcome


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``; RequestError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"an address like 127.0.0.1:7600 expected, got {text!r}")
    return host.strip("[]"), int(port)
