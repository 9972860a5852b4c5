"""``lynxkv prefill``: run a prefill node until told to stop."""

import asyncio
import signal
import sys
import threading

import uvloop

from lynxkv.bench.processes import READY
from lynxkv.cli.loading import load_engine
from lynxkv.errors import RequestError
from lynxkv.node.prefill import PrefillNode
from lynxkv.transport import parse_rate

_UNITS = {"GB": 1 << 30, "MB": 1 << 20, "KB": 1 << 10, "B": 1}


def serve(
    *,
    model: str,
    host: str,
    port: int,
    link: str | None,
    dtype: str,
    kv_dtype: str,
    chunk: int,
    memory: str,
    ttl_s: float,
    lease_s: float,
    drain_s: float,
    threads: int,
    until_stdin_closes: bool,
) -> None:
    """Load the model, listen, serve; SIGTERM drains, an interrupt ends at once."""
    rate, bound = read_prefill(link, chunk, memory)
    engine = load_engine(model, dtype=dtype, kv_dtype=kv_dtype, threads=threads)

    async def run() -> bool:
        node = PrefillNode(engine, chunk=chunk, memory_bytes=bound, ttl_s=ttl_s, lease_s=lease_s, rate=rate, name=model)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        loop.add_signal_handler(signal.SIGTERM, end, "drain")
        loop.add_signal_handler(signal.SIGINT, end, "interrupt")
        if until_stdin_closes:
            threading.Thread(
                target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(end, "stdin")), daemon=True
            ).start()
        bound_host, bound_port = await node.start(host, port)
        print(f"lynxkv prefill: {model} {READY}{bound_host}:{bound_port}", flush=True)
        why = await ended
        await node.stop(drain_s if why == "drain" else 0.0)
        return why == "interrupt"

    if uvloop.run(run()):
        raise KeyboardInterrupt


def read_prefill(link: str | None, chunk: int, memory: str) -> tuple[float | None, int]:
    """A prefill node's rate and memory, in bytes; RequestError for options that cannot be."""
    if chunk < 64 or chunk % 64:
        raise RequestError(f"--chunk must be a multiple of 64, got {chunk}")
    return None if link is None else parse_rate(link), parse_bytes(memory)


def parse_bytes(text: str) -> int:
    """``4GB``, ``512MB`` or a plain number of bytes; RequestError for anything else."""
    unit = next((unit for unit in _UNITS if text.upper().endswith(unit)), "")
    try:
        value = int(float(text[: len(text) - len(unit)]) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise RequestError(f"a size like 4GB or 512MB expected, got {text!r}")
    return value
