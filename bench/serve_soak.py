"""Minutes of requests with faults at random: every request ends rightly, and memory stays flat.

Method. One router, two prefill and two decode workers on this machine. Requests of a small pool come all the time;
some are given up by their client at a random moment. Meanwhile, at random: a worker is frozen for some seconds
(SIGSTOP), the second worker of a kind is killed and started again on its ports, or a KV port gets connections that
send noise. Every request has to end, within its deadline, in the answer that the same request had before any fault,
in its client's own abort, or in one typed error. Memory: the resident set of the router and of the first worker of each
kind (they are frozen, never killed), median of the last fifth of the time against that of the second fifth.

    python bench/serve_soak.py [--minutes 10] [--json]
"""

import argparse
import asyncio
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
from openai import AsyncOpenAI
from rich.console import Console

from lynxkv.bench.documents import pydoc_text
from lynxkv.bench.served import Served
from lynxkv.bench.verdict import verdict

LATE_S = 120.0
"""No request may take longer: its KV deadline is 30 s, a worker is given up after 15 s of silence."""

BARS = {"wrong": 0, "untyped": 0, "late": 0, "left": 0, "growth": 0.05}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Node:
    """A process of the cluster that can be started again on the same ports."""

    name: str
    arguments: list[str]
    port: int
    kv_port: int | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        ports = ["--port", str(self.port), *([] if self.kv_port is None else ["--kv-port", str(self.kv_port)])]
        command = [sys.executable, "-m", "lynxkv.cli.main", "serve", *self.arguments, *ports, "--until-stdin-closes"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def send(self, what: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(what)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class Seen:
    """What came of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident: dict[str, list[tuple[float, int]]] = field(default_factory=dict)


@contextmanager
def cluster(model: str, link: str) -> Iterator[list[Node]]:
    """The router comes last; workers are named by role and number."""
    common = ["--model", model]
    short = ["--link", link, "--ttl", "30", "--lease", "10"]
    nodes = [
        Node(
            f"prefill {i}",
            ["prefill", *common, *short],
            free_port(),
            free_port(),
        )
        for i in (1, 2)
    ]
    nodes += [Node(f"decode {i}", ["decode", *common], free_port()) for i in (1, 2)]
    urls = [part for node in nodes for part in (f"--{node.name.split()[0]}", node.url)]
    nodes.append(Node("router", ["router", *urls], free_port()))
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.end()


async def ready(client: aiohttp.ClientSession, router: Node, workers: int, seconds: float = 180) -> None:
    """Wait until the router sees so many workers."""
    async with asyncio.timeout(seconds):
        while True:
            with suppress(aiohttp.ClientError):
                async with client.get(f"{router.url}/health") as response:
                    told = await response.json()
                if sum(worker["up"] for worker in told["workers"]) >= workers:
                    return
            await asyncio.sleep(0.5)


def asks(count: int, model: str) -> list[dict[str, Any]]:
    """Requests of 100 to 700 tokens, greedy and sampled."""
    draw = random.Random(7)
    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": f"{pydoc_text(5 * i, 1)[: draw.randint(300, 2400)]}\n\nSo?"}],
            "max_tokens": draw.randint(4, 24),
            "temperature": i % 2,
            "seed": i,
            "extra_body": {"lynx": {"deadline_s": 30, "on_loss": ("fail", "recompute")[i % 3 == 0]}},
        }
        for i in range(count)
    ]


async def run(client: AsyncOpenAI, ask: dict[str, Any], stream: bool) -> str:
    if not stream:
        whole = await client.chat.completions.create(**ask)
        return whole.choices[0].message.content or ""
    text, finish = "", None
    async for chunk in await client.chat.completions.create(stream=True, **ask):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    if finish is None:
        raise RuntimeError("a stream ended without a finish reason and without an error")
    return text


async def ask_on(client: AsyncOpenAI, pool: list[dict[str, Any]], right: list[str], seen: Seen, until: float) -> None:
    """One client: request after request, some given up."""
    draw = random.Random()
    while time.monotonic() < until:
        i = draw.randrange(len(pool))
        patience = draw.uniform(0, 4) if draw.random() < 0.2 else LATE_S
        begun = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                text = await run(client, pool[i], draw.random() < 0.5)
        except TimeoutError:
            kind = "aborted" if patience < LATE_S else "late"
        except openai.APIConnectionError as error:
            kind = "untyped"
            seen.problems.append(f"{error!r}: {error.__cause__!r}")
        except openai.APIError as error:
            kind = "failed"
            seen.errors[str(error.code)] += 1
            if error.code is None:
                kind = "untyped"
                seen.problems.append(repr(error))
            await asyncio.sleep(0.2)  # as a client that is told to come back later
        else:
            kind = "answered" if text == right[i] else "wrong"
        seen.counts[kind] += 1
        if kind in ("late", "wrong"):
            seen.problems.append(f"{kind}: request {i} after {time.monotonic() - begun:.1f} s")


async def trouble(nodes: list[Node], until: float, seen: Seen, console: Console) -> None:
    """Faults, one after the other; every worker runs again at the end."""
    draw = random.Random()
    workers = nodes[:-1]
    while time.monotonic() < until - 30:
        await asyncio.sleep(draw.uniform(3, 10))
        what = draw.choice(("freeze", "freeze", "long freeze", "kill", "noise"))
        node = draw.choice([each for each in workers if each.name.endswith("2")] if what == "kill" else workers)
        if what == "noise":
            node = draw.choice([each for each in workers if each.kv_port is not None])
        console.print(f"[dim]{what}: {node.name}; so far {dict(seen.counts)}[/dim]")
        seen.counts[f"fault: {what}"] += 1
        match what:
            case "kill":
                node.end()
                await asyncio.sleep(draw.uniform(0, 5))
                node.start()
            case "noise":
                for _ in range(20):
                    with suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", node.kv_port)
                        writer.write(draw.randbytes(draw.randint(0, 2000)))
                        await writer.drain()
                        writer.close()
            case _:
                node.send(signal.SIGSTOP)
                await asyncio.sleep(25 if what == "long freeze" else draw.uniform(0.5, 5))
                node.send(signal.SIGCONT)


async def weigh(nodes: list[Node], until: float, seen: Seen) -> None:
    """Resident memory of those that are never killed."""
    lasting = {node.name: node.process.pid for node in nodes if node.process and not node.name.endswith("2")}
    served = Served(nodes[-1].url, lasting)
    while time.monotonic() < until:
        for name, size in served.resident_bytes().items():
            seen.resident.setdefault(name, []).append((time.monotonic(), size))
        await asyncio.sleep(2)


async def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    seen, pool = Seen(), asks(12, args.model)
    with cluster(args.model, args.link) as nodes:
        async with (
            aiohttp.ClientSession() as plain,
            AsyncOpenAI(base_url=f"{nodes[-1].url}/v1", api_key="none", max_retries=0, timeout=600) as client,
        ):
            await ready(plain, nodes[-1], len(nodes) - 1)
            right = [await run(client, ask, False) for ask in pool]
            begun = time.monotonic()
            until = begun + 60 * args.minutes
            await asyncio.gather(
                *(ask_on(client, pool, right, seen, until) for _ in range(args.at_once)),
                trouble(nodes, until, seen, console),
                weigh(nodes, until, seen),
            )
            await ready(plain, nodes[-1], len(nodes) - 1)
            left = await asyncio.to_thread(Served(nodes[-1].url, {}).left, 90)
    growth = {}
    for name, weights in seen.resident.items():
        shares = [((at - begun) / (60 * args.minutes), size) for at, size in weights]
        early = statistics.median(size for share, size in shares if 0.2 <= share < 0.4)
        growth[name] = statistics.median(size for share, size in shares if share >= 0.8) / early - 1
    return {
        "minutes": args.minutes,
        "requests": dict(seen.counts),
        "errors": dict(seen.errors),
        **{name: seen.counts[name] for name in ("wrong", "untyped", "late")},
        "left": len(left),
        "what_is_left": left,
        "growth_by_process": growth,
        "growth": max(growth.values()),
        "problems": seen.problems[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(measure(args, Console(stderr=True)))
    return verdict(result, BARS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
