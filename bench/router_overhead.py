"""What a router adds to a request: its time through the router minus its time straight to the decode worker.

Method. Stub workers, which answer at once, run in a process of their own, the router (`lynxkv serve router`) in
another. This process asks at a steady rate, open loop, in turn through the router and straight at the stub, and takes
the difference of the medians. Streamed answers have 16 events.

    python bench/router_overhead.py [--rate 50] [--seconds 20] [--json]
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import aiohttp
from aiohttp import web
from rich.console import Console
from rich.table import Table

from lynxkv.bench.processes import READY, child
from lynxkv.bench.served import serve_router

BAR_MS = 5.0
BODY = {"model": "stub", "messages": [{"role": "user", "content": "word " * 1000}], "max_tokens": 16, "seed": 1}
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": null}]}\n\n'


def stub(role: str) -> web.Application:
    """A worker that knows every answer."""
    about = {"role": role, "status": "ok", "model": "stub", "fingerprint": "stub", "context": 8192}
    if role == "prefill":
        about["kv"] = {"host": "127.0.0.1", "port": 1, "epoch": 1, "engine_id": "stub"}  # type: ignore[assignment]

    async def health(_: web.Request) -> web.Response:
        return web.json_response(about)

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": {}, "kv_transfer_params": {}})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(16):
            await response.write(EVENT)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def run_stubs() -> None:
    """Both workers, until standard input closes."""
    urls = []
    for role in ("prefill", "decode"):
        runner = web.AppRunner(stub(role), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    print(READY + " ".join(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def measure(urls: dict[str, str], rate: float, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every request, by where it went and whether it was streamed."""
    took: dict[str, list[float]] = {}

    async def one(client: aiohttp.ClientSession, where: str, stream: bool) -> None:
        begun = time.perf_counter()
        async with client.post(f"{urls[where]}/v1/chat/completions", json=BODY | {"stream": stream}) as response:
            content = await response.read()
        if response.status != 200 or (stream and not content.endswith(b"data: [DONE]\n\n")):
            raise RuntimeError(f"{where} answered {response.status}: {content[:200]!r}")
        took.setdefault(f"{where}{' streamed' if stream else ''}", []).append((time.perf_counter() - begun) * 1e3)

    kinds = [(where, stream) for stream in (False, True) for where in urls]
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        begun = time.perf_counter()
        for i in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + i / rate - time.perf_counter()))
            group.create_task(one(client, *kinds[i % len(kinds)]))
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50, help="requests a second through the router")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--stubs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.stubs:
        asyncio.run(run_stubs())
        return 0
    with ExitStack() as running:
        stubs = running.enter_context(child([__file__, "--stubs"]))
        assert stubs.stdout is not None
        prefill, decode = stubs.stdout.readline().removeprefix(READY).split()
        router = running.enter_context(serve_router(["--prefill", prefill, "--decode", decode]))
        urls = {"router": router, "direct": decode}
        asyncio.run(measure(urls, args.rate, 2))  # connections, caches
        took = asyncio.run(measure(urls, 2 * args.rate, args.seconds))
    median = {kind: statistics.median(values) for kind, values in took.items()}
    result: dict[str, Any] = {
        "rate_per_s": args.rate,
        "requests": sum(len(values) for values in took.values()),
        "median_ms": median,
        "p99_ms": {kind: sorted(values)[int(0.99 * len(values))] for kind, values in took.items()},
        "overhead_ms": median["router"] - median["direct"],
        "overhead_streamed_ms": median["router streamed"] - median["direct streamed"],
        "bar_ms": BAR_MS,
    }
    result["ok"] = max(result["overhead_ms"], result["overhead_streamed_ms"]) <= BAR_MS
    if args.json:
        print(json.dumps(result))
    else:
        table = Table("", "median, ms", "p99, ms", title=f"{args.rate:g} requests a second through the router")
        for kind in median:
            table.add_row(kind, f"{median[kind]:.2f}", f"{result['p99_ms'][kind]:.2f}")
        Console().print(table)
        print(f"overhead {result['overhead_ms']:.2f} ms, streamed {result['overhead_streamed_ms']:.2f} ms")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
