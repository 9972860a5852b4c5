"""Is the output what plain decoding on the target gives? Token for token, finish reason included.

Real nodes and sockets in one process; the link is slowed so that a window has about 20 drafts. The oracle is a loop
of its own on transformers' DynamicCache, filled with the decoded KV (lynxkv.bench.oracle). A window without a wrong
draft proves little, so that further prompts follow, twice as many at most, until a quarter as many windows as prompts
were asked for had one.

    python bench/equality.py [--model ...] [--prompts 20] [--dtype float32] [--verify batched] [--json]
"""

import argparse
import asyncio
import inspect
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from lynxkv.bench.documents import MODULES, QUESTION, long_prompt, pydoc_text
from lynxkv.bench.oracle import plain_decode, target_cache
from lynxkv.codec import CodecSpec, Tier, plan, segment_bounds
from lynxkv.engine.models import ALIASES
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.node.admission import tokens_to_bytes
from lynxkv.node.decode import DecodeNode, Outcome, Request
from lynxkv.node.entries import entry_key
from lynxkv.node.prefill import PrefillNode
from lynxkv.speculation import SamplingParams
from lynxkv.wire import token_digest

QUESTIONS = (QUESTION, "List the main functions above, one a line, each with a short remark.", "Write an example.")
SPEC = CodecSpec()


@contextmanager
def running(node: PrefillNode) -> Iterator[tuple[str, int]]:
    """The node on a loop in a thread of its own; its address."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(node.start("127.0.0.1", 0), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(node.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def document(i: int) -> str:
    """Documentation and source code in turn."""
    return inspect.getsource(inspect) if i % 5 == 4 else pydoc_text(first=i * 3 % len(MODULES))


def residual_bytes(engine: TransformersEngine, tokens: int) -> int:
    shape = engine.shape(tokens)
    return sum(segment_bounds(shape, SPEC, s)[0] for s in plan(shape, SPEC) if s.tier is Tier.RESIDUAL)


def step_seconds(engine: TransformersEngine, tokens: int) -> float:
    """A decode step after ``tokens`` tokens; what their KV holds does not matter for that."""
    session = engine.open(tokens + 8, 8)
    session.place(engine.shape(tokens))
    session.forward([5])
    begun = time.monotonic()
    for _ in range(5):
        session.forward([5])
    return (time.monotonic() - begun) / 5


def run(decoder: DecodeNode, peer: tuple[str, int], request: Request) -> Outcome:
    generation = decoder.generate(peer, request)
    for _ in generation:
        pass
    return generation.outcome


def oracle(
    engine: TransformersEngine, node: PrefillNode, tokens: list[int], first: int, params: SamplingParams
) -> tuple[list[int], str]:
    """Plain decoding on the entry as the prefill node holds it."""
    entry = node.store.get(entry_key(engine.fingerprint, token_digest(tokens_to_bytes(tokens)), SPEC))
    assert entry is not None
    data = {k: entry.buffer(k) for k in range(len(entry.segments))}
    node.store.release(entry)
    return plain_decode(engine, target_cache(engine, entry.shape, SPEC, entry.segments, data), tokens, first, params)


def evaluate(
    model: str, dtype: str, verify: str, prompts: int, longest: int, drafts: int, console: Console
) -> dict[str, object]:
    engine = TransformersEngine.load(model, dtype=dtype)
    runs = rejected = drafted = accepted = unequal = 0
    enough = min(5, prompts // 4)
    sizes = [512 + (longest - 512) * i // max(1, prompts - 1) for i in range(prompts)]
    random.Random(0).shuffle(sizes)
    with DecodeNode(engine, stall_s=120) as decoder:
        for i, (size, question) in enumerate(zip(sizes * 2, cycle(QUESTIONS), strict=False)):
            if i >= prompts and rejected >= enough:
                break
            tokens = long_prompt(engine, document(i), question, size)
            step = step_seconds(engine, len(tokens))
            node = PrefillNode(engine, rate=residual_bytes(engine, len(tokens)) / (drafts * step))
            with running(node) as peer:
                decoder.prepare(peer, tokens, SPEC, deadline_s=3600)
                for temperature in (0.0, 1.0):
                    stop = ("\n\n",) if i % 4 == 3 else ()
                    params = SamplingParams(temperature=temperature, seed=i, max_tokens=2 * drafts, stop=stop)
                    request = Request(tuple(tokens), params, SPEC, verify=verify, deadline_s=3600)
                    outcome = run(decoder, peer, request)
                    same = oracle(engine, node, tokens, outcome.tokens[0], params) == (outcome.tokens, outcome.finish)
                    runs += 1
                    unequal += not same
                    rejected += outcome.accepted < outcome.drafted
                    drafted += outcome.drafted
                    accepted += outcome.accepted
                    console.print(
                        f"[dim]{model} {len(tokens)} tokens, temperature {temperature}: {outcome.accepted} of "
                        f"{outcome.drafted} kept, {len(outcome.tokens)} tokens, {outcome.finish}, equal {same}[/dim]"
                    )
    return {
        "model": model,
        "dtype": dtype,
        "verify": verify,
        "prompts": runs // 2,
        "runs": runs,
        "unequal": unequal,
        "windows_with_a_rejected_draft": rejected,
        "drafted": drafted,
        "accepted": accepted,
        "ok": unequal == 0 and rejected >= enough,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(ALIASES))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--drafts", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--verify", default="batched")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    results = [
        evaluate(model, args.dtype, args.verify, args.prompts, args.longest, args.drafts, console)
        for model in args.model
    ]
    ok = all(bool(result["ok"]) for result in results)
    if args.json:
        print(json.dumps({"models": results, "ok": ok}))
    else:
        table = Table(title="lynx against plain decoding on its own target")
        for key in results[0]:
            table.add_column(key.replace("_", " "))
        for result in results:
            table.add_row(*(str(value) for value in result.values()))
        Console().print(table, "ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
