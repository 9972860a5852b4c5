"""``lynxkv demo``: two processes, a slow link, four schemes, one table."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from lynxkv.bench.documents import read_document
from lynxkv.bench.plan import Plan
from lynxkv.bench.processes import child, prefill_process
from lynxkv.cli.display import Display, table
from lynxkv.engine.models import resolve
from lynxkv.errors import LynxError, PeerLost
from lynxkv.transport import parse_rate


class DemoError(LynxError):
    """What the decode process reported."""


def run(
    *,
    model: str,
    link: str,
    tokens: int,
    document: Path | None,
    prompt: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    dtype: str,
    kv_dtype: str,
    as_json: bool,
) -> None:
    """Run the comparison; a table, or one JSON object."""
    parse_rate(link)
    if document is not None:
        read_document(document)
    resolve(model)
    console = Console(stderr=as_json)
    console.print(f"[dim]starting a prefill and a decode process ({model}, link {link}) …[/dim]")
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"model": model, "link": link, "dtype": dtype, "kv_dtype": kv_dtype}
    with (
        prefill_process(model=model, dtype=dtype, kv_dtype=kv_dtype, link=link) as peer,
        child(["-m", "lynxkv.bench.worker"]) as worker,
        Display(console, quiet=as_json) as display,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        wanted = Plan(
            peer=peer,
            model=model,
            dtype=dtype,
            kv_dtype=kv_dtype,
            tokens=tokens,
            document=None if document is None else str(document),
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        worker.stdin.write(msgspec.json.encode(wanted).decode() + "\n")
        worker.stdin.flush()
        for event in _events(worker.stdout):
            display.show(event)
            if event["event"] == "row":
                rows.append(event["row"])
            elif event["event"] == "prompt":
                facts |= {"prompt_tokens": event["tokens"], "seed": event["seed"]}
            elif event["event"] == "prepared":
                facts["prefill_s"] = event["prefill_s"]
    if as_json:
        print(json.dumps({"schemes": rows, **facts}))
    else:
        console.print(table(rows, facts))
    if not all(row["equal"] for row in rows):
        raise DemoError("an output differs from plain decoding on its own target: please report this with the table")


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    """The worker's events up to ``done``; its error, or its silence, raised."""
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise DemoError(event["message"])
        if event["event"] == "done":
            return
        yield event
    sys.stdout.flush()
    raise PeerLost("the decode process ended early; its own message is above")
