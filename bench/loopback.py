"""How fast a pull over loopback TCP is, against a bare sendall/recv_into loop of the same bytes.

Method: two processes, one thread each, 1 GiB (``--mib``) of random bytes in memory, buffers touched before. Raw and
pull alternate ``--rounds`` times; the figure is the median of the ratios of each pair. The pull has everything a
transfer has: manifest, ``segment_ready`` events, frames with checksums that both sides compute, digests that the
receiver checks, acknowledge. Segment digests are taken once at the start, as for an entry that is held.
Bar: at least 0.6.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from lynxkv.codec.plan import plan
from lynxkv.codec.shape import CacheShape, LayerShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import LynxError
from lynxkv.transport import Outgoing, Server, connect
from lynxkv.wire import Fingerprint, Hello, Manifest, Pull, segment_digest, token_digest

BAR = 0.6
FINGERPRINT = Fingerprint("bench", 32, (8,), (128, 128), "bfloat16", "", "", "")
CHUNK = 1 << 20


def manifest_of(mib: int) -> Manifest:
    """A raw cache of 32 layers, 8 heads of 128: 128 KiB a token, about 1 MiB a segment."""
    tokens = mib * 8
    shape = CacheShape("bfloat16", tuple(LayerShape(8, 128, 128, 0, tokens) for _ in range(32)))
    spec = CodecSpec(raw=True)
    digest = token_digest(b"")
    return Manifest(os.urandom(16), FINGERPRINT, tokens, digest, shape, spec, plan(shape, spec))


def slices(manifest: Manifest) -> list[slice]:
    """Where each segment lies in one large buffer."""
    sizes = [manifest.bounds(i)[0] for i in range(len(manifest.segments))]
    ends = np.cumsum(sizes)
    return [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]


def produce(pipe: Connection, mib: int) -> None:
    """The producer's process."""
    where = slices(manifest_of(mib))
    data = memoryview(np.random.default_rng(0).bytes(where[-1].stop))
    digests = [segment_digest(data[part]) for part in where]
    pipe.send("ready")
    while (command := pipe.recv()) != "stop":
        if command == "raw":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                pipe.send(listener.getsockname()[1])
                peer, _ = listener.accept()
                with peer:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    peer.recv(1)
                    peer.sendall(data)
        else:
            uvloop.run(serve(pipe, command, data, where, digests))


async def serve(pipe: Connection, manifest: Manifest, data: memoryview, where: list[slice], digests: list[int]) -> None:
    """Serve one transfer until its lease ends."""
    server = Server(Hello(role="prefill", fingerprint=FINGERPRINT))
    _, port = await server.start("127.0.0.1", 0)
    over = asyncio.Event()
    outgoing = Outgoing(manifest, on_released=lambda *_: over.set())
    for i, (part, digest) in enumerate(zip(where, digests, strict=True)):
        outgoing.put(i, data[part], digest=digest)
    server.announce(outgoing)
    pipe.send(port)
    await over.wait()
    server.close()


def raw(port: int, target: memoryview) -> float:
    """Seconds of a bare transfer."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        start, got = time.perf_counter(), 0
        peer.sendall(b"x")
        while got < len(target):
            got += peer.recv_into(target[got : got + CHUNK])
        return time.perf_counter() - start


class Buffers:
    """A sink with one large buffer."""

    def __init__(self, target: memoryview, where: list[slice]) -> None:
        self._target, self._where = target, where

    def manifest(self, manifest: Manifest) -> None: ...

    def buffer(self, segment: int, size: int) -> memoryview:
        return self._target[self._where[segment]]

    def landed(self, segment: int) -> None: ...

    def first_token(self, event: Any) -> None: ...

    def tier_end(self, tier: Tier) -> None: ...

    def ended(self, error: LynxError | None) -> None: ...


async def pull(port: int, manifest: Manifest, target: memoryview, where: list[slice]) -> float:
    """Seconds from the request to the acknowledge."""
    link = await connect("127.0.0.1", port, Hello(role="decode", fingerprint=FINGERPRINT))
    start = time.perf_counter()
    incoming = await link.pull(Pull(transfer=manifest.transfer, tiers=(Tier.ANCHOR,)), Buffers(target, where))
    await incoming.wait()
    incoming.acknowledge()
    elapsed = time.perf_counter() - start
    await link.close()
    return elapsed


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs, options.mib), daemon=True)
    child.start()
    where = slices(manifest_of(options.mib))
    size = where[-1].stop
    target = memoryview(bytearray(b"\x01") * size)
    ours.recv()
    pairs: list[tuple[float, float]] = []
    for round_ in range(options.rounds + 1):
        ours.send("raw")
        bare = raw(ours.recv(), target)
        manifest = manifest_of(options.mib)
        ours.send(manifest)
        full = uvloop.run(pull(ours.recv(), manifest, target, where))
        if round_:
            pairs.append((size / bare / 1e9, size / full / 1e9))
    ours.send("stop")
    child.join()
    ratio = statistics.median(full / bare for bare, full in pairs)
    result = {
        "bytes": size,
        "segments": len(where),
        "rounds": len(pairs),
        "raw_gb_s": statistics.median(bare for bare, _ in pairs),
        "pull_gb_s": statistics.median(full for _, full in pairs),
        "ratio": ratio,
        "ratio_bar": BAR,
        "ok": ratio >= BAR,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{size / 1e9:.2f} GB in {len(where)} segments over loopback TCP, one thread a process")
        print(f"{'round':>5}  {'raw GB/s':>9}  {'pull GB/s':>9}  {'ratio':>6}")
        for i, (bare, full) in enumerate(pairs, 1):
            print(f"{i:>5}  {bare:>9.2f}  {full:>9.2f}  {full / bare:>6.2f}")
        print(f"median ratio {ratio:.2f} (bar {BAR}): {'ok' if result['ok'] else 'below the bar'}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
