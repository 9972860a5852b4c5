"""The demo's decode process: a plan on standard input, what happens as JSON lines on standard output."""

import contextlib
import json
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from lynxkv.bench.compare import Row, equals_plain, prepare, run_scheme
from lynxkv.bench.documents import QUESTION, long_prompt, pydoc_text, read_document
from lynxkv.bench.plan import Plan
from lynxkv.bench.schemes import SCHEMES
from lynxkv.codec import CacheShape, CodecSpec, Tier, plan, segment_bounds
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.errors import LynxError
from lynxkv.node.arrivals import Moment
from lynxkv.node.decode import DecodeNode
from lynxkv.speculation import Drafted, Event, Retracted, SamplingParams, Verified

_speaking = threading.Lock()


def _say(event: str, **fields: Any) -> None:
    with _speaking:  # the link's thread and the decoding one both tell
        print(json.dumps({"event": event, **fields}), flush=True)


def _run(wanted: Plan) -> None:
    document = read_document(Path(wanted.document)) if wanted.document else pydoc_text()
    params = SamplingParams(
        temperature=wanted.temperature,
        seed=wanted.seed,
        max_tokens=wanted.max_tokens,
    ).seeded()
    engine = TransformersEngine.load(wanted.model, dtype=wanted.dtype, kv_dtype=wanted.kv_dtype)
    engine.check_prompt([0] * wanted.tokens, wanted.max_tokens)
    tokens = long_prompt(engine, document, wanted.prompt or QUESTION, wanted.tokens)
    _say("prompt", tokens=len(tokens), seed=params.seed)
    with DecodeNode(engine, stall_s=120) as node:
        schemes = list(SCHEMES.values())
        node.warm([scheme.spec for scheme in schemes])
        prefill_s = prepare(node, wanted.peer, tokens, schemes)
        for scheme in schemes:  # connections, caches and compiled kernels: nothing is timed the first time it runs
            warm = tokens[:256]
            node.prepare(wanted.peer, warm, scheme.spec, deadline_s=600)
            run_scheme(node, wanted.peer, warm, scheme, replace(params, max_tokens=4))
        _say("prepared", prefill_s=prefill_s)
        rows: list[Row] = []
        outcomes = []
        for scheme in schemes:
            _say(
                "scheme", scheme=scheme.name, about=scheme.about, total=_totals(engine.shape(len(tokens)), scheme.spec)
            )

            def watch(name: str, at: float, what: Moment | Event) -> None:
                _tell(engine, name, at, what)

            row, outcome = run_scheme(node, wanted.peer, tokens, scheme, params, watch=watch)
            rows.append(row)
            outcomes.append(outcome)
            _say("ran", row=row.plain(), text=outcome.text)
        for scheme, row, outcome in zip(schemes, rows, outcomes, strict=True):
            equal = equals_plain(engine, wanted.peer, tokens, scheme, params, outcome)
            _say("row", row=replace(row, equal=equal).plain(), text=outcome.text)


def _totals(shape: CacheShape, spec: CodecSpec) -> dict[str, int]:
    totals = dict.fromkeys((tier.name.lower() for tier in Tier), 0)
    for segment in plan(shape, spec):
        totals[segment.tier.name.lower()] += segment_bounds(shape, spec, segment)[0]
    return totals


def _tell(engine: TransformersEngine, scheme: str, at: float, what: Moment | Event) -> None:
    match what:
        case Moment(what="segment", tier=Tier() as tier, size=size):
            _say("segment", scheme=scheme, at=at, tier=tier.name.lower(), size=size)
        case Drafted(position, token):
            _say("draft", scheme=scheme, at=at, position=position, text=engine.decode([token]))
        case Verified(position, draw):
            _say("verified", scheme=scheme, at=at, position=position, text=engine.decode([draw.token]))
        case Retracted(position):
            _say("retract", scheme=scheme, at=at, position=position)


def _end_with_input(finished: threading.Event) -> None:
    """Stop when whoever started this process closes its standard input, or is gone."""

    def watch() -> None:
        with contextlib.suppress(ValueError):
            sys.stdin.read()
        if not finished.is_set():
            # A signal, unlike _thread.interrupt_main(), ends a wait for a lock too.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run the plan on the first line of standard input."""
    wanted = msgspec.json.decode(sys.stdin.readline().encode(), type=Plan)
    finished = threading.Event()
    _end_with_input(finished)
    try:
        _run(wanted)
        finished.set()
        _say("done")
    except LynxError as error:
        finished.set()
        _say("error", message=str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
