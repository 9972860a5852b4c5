"""Many requests at once over a slow link: right answers, nothing left behind, and short ones not held up by long ones.

Method. `lynxkv serve all` (three processes, one compute thread each, a rate-limited link) takes requests of mixed
lengths through the official `openai` client, ``--at-once`` at a time, streamed and not, greedy and sampled at
temperature 1. Three passes:

1. *shorts*: only the short requests of the workload, on servers of their own.
2. *mixed*: all requests, on fresh servers, so that prefill is under load too.
3. *alone*: the same requests one after the other on the same servers, those of a prompt together so that its KV is
   held. Each answer of pass 2 has to be the same text with the same finish reason.

The wait of a request is its draft TTFT counted from its KV being ready: ``ttft_draft_s - ttft_prefill_s`` of its
``lynx`` object. Then every gauge of the workers has to return to zero, entries included (their time to live is
short here), and each process to the number of open files that it had after a first request.

    python bench/serve_load.py [--requests 200] [--at-once 16] [--longest 4096] [--link 200mbit] [--json]
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console

from lynxkv.bench.documents import pydoc_text
from lynxkv.bench.served import Served, serve_all
from lynxkv.bench.verdict import verdict

SHORTEST = 200
CHARACTERS = 3.6
"""Of the documentation's text, about, to a token."""
BARS = {"unequal": 0, "left": 0, "short_wait_ratio": 2.0}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the workload."""

    number: int
    prompt: str
    tokens: int
    temperature: float
    stream: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it."""

    text: str
    finish: str | None
    lynx: dict[str, Any]
    seconds: float

    @property
    def wait_s(self) -> float:
        """Draft TTFT from the moment its KV was ready."""
        return max(0.0, float(self.lynx["ttft_draft_s"]) - float(self.lynx["ttft_prefill_s"]))


def workload(count: int, longest: int, short: int, distinct: int, seed: int) -> list[Ask]:
    """``count`` requests over ``distinct`` prompts: half of them short, the others of up to ``longest`` tokens."""
    draw = random.Random(seed)
    prompts = []
    for i in range(distinct):
        tokens = draw.randint(SHORTEST, short) if i % 2 == 0 else draw.randint(short + 1, longest)
        head = pydoc_text(3 * i, 2)[: int(tokens * CHARACTERS)]
        prompts.append((f"{head}\n\nWhat is this text about?", tokens))
    asks = []
    for number in range(count):
        prompt, tokens = prompts[number % distinct]
        asks.append(Ask(number, prompt, tokens, float(number // distinct % 2), number % 3 == 0))
    draw.shuffle(asks)
    return asks


async def run(client: AsyncOpenAI, model: str, ask: Ask, max_tokens: int) -> Answer:
    """One request through the official client."""
    begun = time.perf_counter()
    wanted: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": max_tokens,
        "temperature": ask.temperature,
        "seed": ask.number,
    }
    if not ask.stream:
        whole = await client.chat.completions.create(**wanted)
        choice = whole.choices[0]
        return Answer(
            choice.message.content or "", choice.finish_reason, whole.model_extra["lynx"], time.perf_counter() - begun
        )
    text, finish, lynx = "", None, {}
    async for chunk in await client.chat.completions.create(**wanted, stream=True):
        lynx = (chunk.model_extra or {}).get("lynx", lynx)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return Answer(text, finish, lynx, time.perf_counter() - begun)


async def run_all(
    served: Served, asks: list[Ask], at_once: int, max_tokens: int, console: Console
) -> dict[int, Answer]:
    """Every request, ``at_once`` at a time; answers by number."""
    answers: dict[int, Answer] = {}
    queue = iter(asks)
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=1800) as client:
        model = (await client.models.list()).data[0].id

        async def work() -> None:
            for ask in queue:
                answers[ask.number] = await run(client, model, ask, max_tokens)
                if len(answers) % 20 == 0:
                    console.print(f"{len(answers)} of {len(asks)}")

        await asyncio.gather(*(work() for _ in range(at_once)))
    return answers


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of ``values`` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def more_files(served: Served, before: dict[str, int], seconds: float) -> dict[str, int]:
    """Files that processes have open beyond those of ``before``; connections that are kept alive end meanwhile."""
    until = time.monotonic() + seconds
    while True:
        now = served.open_files()
        more = {f"{role} files": now[role] - files for role, files in before.items() if now[role] > files}
        if not more or time.monotonic() >= until:
            return more
        time.sleep(1)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All passes."""
    asks = workload(args.requests, args.longest, args.short, args.distinct, args.seed)
    shorts = [ask for ask in asks if ask.tokens <= args.short]
    options = ["--model", args.model, "--link", args.link, "--ttl", "20", "--max-running", str(args.at_once)]

    def go(served: Served, some: list[Ask], at_once: int) -> dict[int, Answer]:
        return asyncio.run(run_all(served, some, at_once, args.max_tokens, console))

    with serve_all(options) as served:
        go(served, shorts[:1], 1)
        console.print(f"shorts: {len(shorts)} requests, {args.at_once} at a time")
        only = go(served, shorts, args.at_once)
    with serve_all(options) as served:
        go(served, shorts[:1], 1)
        before = served.open_files()
        console.print(f"mixed: {len(asks)} requests, {args.at_once} at a time")
        begun = time.perf_counter()
        mixed = go(served, asks, args.at_once)
        mixed_s = time.perf_counter() - begun
        console.print("alone")
        alone = go(served, sorted(asks, key=lambda ask: ask.prompt), 1)
        left = served.left(seconds=90) | more_files(served, before, seconds=90)
    unequal = [n for n, answer in mixed.items() if (answer.text, answer.finish) != (alone[n].text, alone[n].finish)]
    numbers = [ask.number for ask in shorts]
    waits = [mixed[n].wait_s for n in numbers]
    base = [only[n].wait_s for n in numbers]
    return {
        "requests": len(asks),
        "at_once": args.at_once,
        "short_requests": len(shorts),
        "mixed_s": mixed_s,
        "drafted": sum(answer.lynx["drafted"] for answer in mixed.values()),
        "accepted": sum(answer.lynx["accepted"] for answer in mixed.values()),
        "unequal": len(unequal),
        "left": len(left),
        "what_is_left": left,
        "short_wait_p50_s": statistics.median(waits),
        "short_wait_p95_s": percentile(waits, 0.95),
        "short_wait_p95_without_long_s": percentile(base, 0.95),
        "short_wait_ratio": percentile(waits, 0.95) / percentile(base, 0.95),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--short", type=int, default=600, help="most tokens of a short request")
    parser.add_argument("--distinct", type=int, default=20, help="different prompts; others differ in their seed")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args, Console(stderr=True))
    return verdict(result, BARS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
