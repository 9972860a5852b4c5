"""Whether an anchor asked for late overtakes a residual that fills the link, and whether the residual still moves.

Method: a server and a decode side in two network namespaces joined by veth, with tc's tbf at 1 Gbit/s and a queue of
5 ms on the server's end (without root, or without iproute2: one loopback connection under the server's own rate limit,
and the report says so). First the time of a 32 MB anchor on the idle link (median of ``--rounds``). Then 1 GB of
residual is pulled and, while it fills the link, ``--rounds`` anchors on the same connection, each asked for after at
least 16 MB more of the residual have come. Bar: median time within 1.1 x the idle one. Then a stream of anchors, two
of them always outstanding: the residual's share of the bytes. Bar: more than 1 %. With ``--cert``, ``--key`` and
``--ca`` both sides speak TLS (the certificate has to name the server's address).
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from lynxkv.codec.plan import plan
from lynxkv.codec.shape import CacheShape, LayerShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import LynxError
from lynxkv.transport import Incoming, Link, Outgoing, Security, Server, connect, parse_rate
from lynxkv.wire import Admit, Fingerprint, Hello, Manifest, Pull, segment_digest, token_digest

BAR_RATIO = 1.1
BAR_SHARE = 0.01
RATE = "1gbit"
FINGERPRINT = Fingerprint("bench", 32, (8,), (128, 128), "bfloat16", "", "", "")
TOKENS = {"residual": 30720, "anchor": 768}
GAP = 16 << 20
STREAM = 12


def manifest_of(transfer: bytes, tokens: int) -> Manifest:
    """A cache of 32 layers, 8 heads of 128: 32 KiB of residual and 36 KiB of anchor a token."""
    shape = CacheShape("bfloat16", tuple(LayerShape(8, 128, 128, 0, tokens) for _ in range(32)))
    spec = CodecSpec()
    return Manifest(transfer, FINGERPRINT, tokens, token_digest(b""), shape, spec, plan(shape, spec))


async def serve(host: str, rate: str | None, security: Security) -> None:
    """Announce whatever is admitted, all of it there at once; runs until stdin ends."""
    server = Server(
        Hello(role="prefill", fingerprint=FINGERPRINT),
        rate=None if rate is None else parse_rate(rate),
        tls=security.server_context(),
    )
    block = memoryview(np.random.default_rng(0).bytes(8 << 20))
    digests: dict[int, int] = {}

    async def on_admit(admit: Admit, _: Hello) -> None:
        kind = str(admit.options["kind"])
        manifest = manifest_of(admit.transfer, TOKENS[kind])
        outgoing = Outgoing(manifest)
        for i, segment in enumerate(manifest.segments):
            if segment.tier.name.lower() == kind:
                size = manifest.bounds(i)[0]
                if size not in digests:
                    digests[size] = segment_digest(block[:size])
                outgoing.put(i, block[:size], digest=digests[size])
        server.announce(outgoing)

    server.on_admit = on_admit
    _, port = await server.start(host, 0)
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


class Scratch:
    """A sink that needs the bytes only to have been received."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(8 << 20))

    def manifest(self, manifest: Manifest) -> None: ...

    def buffer(self, segment: int, size: int) -> memoryview:
        return self._buffer[:size]

    def landed(self, segment: int) -> None: ...

    def first_token(self, event: Any) -> None: ...

    def tier_end(self, tier: Tier) -> None: ...

    def ended(self, error: LynxError | None) -> None: ...


async def admitted(link: Link, kind: str) -> bytes:
    """Id of a new transfer that is all there."""
    transfer = os.urandom(16)
    await link.admit(Admit(transfer=transfer, tokens=b"", spec=CodecSpec(), options={"kind": kind}))
    return transfer


async def pull(link: Link, transfer: bytes, tier: Tier) -> Incoming:
    """Ask for one tier."""
    return await link.pull(Pull(transfer=transfer, tiers=(tier,)), Scratch())


async def anchor(link: Link, transfer: bytes) -> tuple[float, int]:
    """Seconds and bytes of one anchor, from its request on."""
    start = time.perf_counter()
    incoming = await pull(link, transfer, Tier.ANCHOR)
    await incoming.wait()
    elapsed = time.perf_counter() - start
    incoming.acknowledge()
    return elapsed, incoming.received[Tier.ANCHOR]


async def more(incoming: Incoming, count: int) -> None:
    """Wait until ``count`` more bytes of the residual are in."""
    target = incoming.received[Tier.RESIDUAL] + count
    while incoming.received[Tier.RESIDUAL] < target:
        await asyncio.sleep(0.002)


async def measure(host: str, port: int, rounds: int, security: Security) -> dict[str, Any]:
    """The three parts; seconds and bytes."""
    link = await connect(host, port, Hello(role="decode", fingerprint=FINGERPRINT), tls=security.client_context())
    await anchor(link, await admitted(link, "anchor"))
    idle = [await anchor(link, await admitted(link, "anchor")) for _ in range(rounds)]
    residual = await pull(link, await admitted(link, "residual"), Tier.RESIDUAL)
    start = time.perf_counter()
    await more(residual, 4 * GAP)
    residual_alone = residual.received[Tier.RESIDUAL] / (time.perf_counter() - start)
    late = []
    for _ in range(rounds):
        transfer = await admitted(link, "anchor")
        await more(residual, GAP)
        late.append(await anchor(link, transfer))
    ids = [await admitted(link, "anchor") for _ in range(STREAM)]
    before, start = residual.received[Tier.RESIDUAL], time.perf_counter()

    async def half(mine: list[bytes]) -> int:
        return sum([(await anchor(link, transfer))[1] for transfer in mine])

    streamed = sum(await asyncio.gather(half(ids[::2]), half(ids[1::2])))
    elapsed, after = time.perf_counter() - start, residual.received[Tier.RESIDUAL]
    over = residual.over
    residual.cancel("measured")
    await link.close()
    return {
        "anchor_bytes": idle[0][1],
        "idle_s": [one[0] for one in idle],
        "late_s": [one[0] for one in late],
        "residual_bytes_s": residual_alone,
        "stream_s": elapsed,
        "stream_anchor_bytes": streamed,
        "stream_residual_bytes": after - before,
        "residual_was_still_running": not over,
    }


@contextmanager
def namespaces() -> Iterator[tuple[list[str], list[str], str]]:
    """Two namespaces and the shaped link between them: command prefixes of both, and the server's address."""
    a, b = f"lynxkv-a{os.getpid()}", f"lynxkv-b{os.getpid()}"
    va, vb = f"lxa{os.getpid()}"[:15], f"lxb{os.getpid()}"[:15]
    try:
        for line in (
            f"ip netns add {a}",
            f"ip netns add {b}",
            f"ip link add {va} netns {a} type veth peer name {vb} netns {b}",
            f"ip -n {a} addr add 10.231.7.1/30 dev {va}",
            f"ip -n {b} addr add 10.231.7.2/30 dev {vb}",
            f"ip -n {a} link set {va} up",
            f"ip -n {b} link set {vb} up",
            f"tc -n {a} qdisc add dev {va} root tbf rate {RATE} burst 128kb latency 5ms",
        ):
            subprocess.run(line.split(), check=True, capture_output=True, text=True)
        yield ["ip", "netns", "exec", a], ["ip", "netns", "exec", b], "10.231.7.1"
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_pair(
    enter_a: list[str], enter_b: list[str], host: str, rate: str | None, rounds: int, security: Security
) -> dict[str, Any]:
    """Start both sides and return what the decode side measured."""
    me = [sys.executable, os.path.abspath(__file__)]
    for name in ("cert", "key", "ca"):
        if getattr(security, name) is not None:
            me += [f"--{name}", str(getattr(security, name))]
    limited = [] if rate is None else ["--rate", rate]
    server = subprocess.Popen(
        [*enter_a, *me, "--serve", host, *limited], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command = [*enter_b, *me, "--pull", f"{host}:{port}", "--rounds", str(rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
        return dict(json.loads(done.stdout))
    finally:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def measured(rounds: int, security: Security) -> tuple[dict[str, Any], str]:
    """Run over namespaces where that can be, else under the rate limiter; figures and which link it was."""
    why = None
    if os.geteuid() != 0:
        why = "not root"
    elif shutil.which("ip") is None or shutil.which("tc") is None:
        why = "no ip and tc; apt-get install iproute2"
    else:
        try:
            with namespaces() as (enter_a, enter_b, host):
                return run_pair(enter_a, enter_b, host, None, rounds, security), f"veth, tbf {RATE}, 5 ms queue"
        except subprocess.CalledProcessError as e:
            if e.stderr is None:
                raise
            why = f"{' '.join(e.cmd)}: {e.stderr.strip()}"
    link = f"loopback under the server's own rate limit of {RATE} (no namespaces: {why})"
    return run_pair([], [], "127.0.0.1", RATE, rounds, security), link


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--{name}", type=Path, help="PEM file")
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--pull", metavar="HOST:PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    security = Security(options.cert, options.key, options.ca)
    if options.serve:
        uvloop.run(serve(options.serve, options.rate, security))
        return 0
    if options.pull:
        host, port = options.pull.rsplit(":", 1)
        print(json.dumps(uvloop.run(measure(host, int(port), options.rounds, security))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures, link = measured(options.rounds, security)
    idle, late = statistics.median(figures["idle_s"]), statistics.median(figures["late_s"])
    total = figures["stream_anchor_bytes"] + figures["stream_residual_bytes"]
    share = figures["stream_residual_bytes"] / total
    result = figures | {
        "link": link,
        "idle_median_s": idle,
        "late_median_s": late,
        "ratio": late / idle,
        "ratio_worst": max(figures["late_s"]) / idle,
        "ratio_bar": BAR_RATIO,
        "residual_share": share,
        "residual_share_bar": BAR_SHARE,
        "ok": late / idle <= BAR_RATIO and share > BAR_SHARE and figures["residual_was_still_running"],
    }
    if options.json:
        print(json.dumps(result))
    else:
        size = figures["anchor_bytes"] / 1e6
        print(f"link: {link}")
        print(f"{'':<44}{'s':>8}  {'Mbit/s':>8}")
        print(f"{f'anchor of {size:.1f} MB, idle link':<44}{idle:>8.3f}  {8 * size / idle:>8.0f}")
        print(f"{'the same while 1 GB of residual is queued':<44}{late:>8.3f}  {8 * size / late:>8.0f}")
        print(
            f"ratio {late / idle:.3f} (bar {BAR_RATIO}), worst of {len(figures['late_s'])}: {result['ratio_worst']:.3f}"
        )
        print(
            f"residual: {8e-6 * figures['residual_bytes_s']:.0f} Mbit/s alone; under a stream of anchors "
            f"{figures['stream_residual_bytes'] / 1e6:.1f} MB in {figures['stream_s']:.1f} s, "
            f"{100 * share:.1f} % of the bytes (bar {100 * BAR_SHARE:.0f} %)"
        )
        print("ok" if result["ok"] else "below the bar")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
