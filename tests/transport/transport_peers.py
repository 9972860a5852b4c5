"""Manifests, sinks and hand-made peers for the transport's tests."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import uvloop

from lynxkv.codec.plan import plan
from lynxkv.codec.shape import CacheShape, LayerShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.transport import Outgoing, Released, Server, connect
from lynxkv.wire import (
    HANDSHAKE_VERSION,
    Fingerprint,
    Frame,
    FrameReader,
    Hello,
    Manifest,
    SegmentReady,
    SegmentWriter,
    control_frame,
    segment_digest,
    token_digest,
)

T = TypeVar("T")

FINGERPRINT = Fingerprint("TestForCausalLM", 2, (2,), (64, 64), "bfloat16", "theta=10000", "w0", "t0")
SERVER = Hello(role="prefill", name="p", fingerprint=FINGERPRINT)
CLIENT = Hello(role="decode", name="d", fingerprint=FINGERPRINT)


def run(main: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
    """Run on uvloop; a hang is a failure."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await main

    return uvloop.run(bounded())


def make_manifest(tokens: int = 512, layers: int = 2, *, spec: CodecSpec | None = None, **more: Any) -> Manifest:
    """A manifest of a small cache, one segment a layer and kind for every 128 tokens."""
    spec = CodecSpec() if spec is None else spec
    shape = CacheShape("bfloat16", tuple(LayerShape(2, 64, 64, 0, tokens) for _ in range(layers)))
    fields: dict[str, Any] = {
        "transfer": os.urandom(16),
        "fingerprint": FINGERPRINT,
        "tokens": tokens,
        "digest": token_digest(bytes(4 * tokens)),
        "shape": shape,
        "spec": spec,
        "segments": plan(shape, spec, segment_tokens=128, segment_bytes=1),
    }
    return Manifest(**(fields | more))


def make_data(manifest: Manifest, seed: int = 0) -> list[bytes]:
    """Bytes of every segment, of a size the geometry allows."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(manifest.bounds(i)[0]) for i in range(len(manifest.segments))]


class Recorder:
    """A sink that keeps everything, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.buffers: dict[int, bytearray] = {}
        self.got: dict[int, bytes] = {}
        self.sent_manifest: Manifest | None = None
        self.endings: list[Any] = []
        self.end = asyncio.Event()
        self.started = asyncio.Event()
        self.on_landed: Callable[[int], None] = lambda _: None

    def manifest(self, manifest: Manifest) -> None:
        self.sent_manifest = manifest
        self.log.append(("manifest",))
        self.started.set()

    def buffer(self, segment: int, size: int) -> memoryview:
        self.buffers[segment] = bytearray(size)
        return memoryview(self.buffers[segment])

    def landed(self, segment: int) -> None:
        assert segment not in self.got
        self.got[segment] = bytes(self.buffers[segment])
        self.log.append(("landed", segment))
        self.on_landed(segment)

    def first_token(self, event: Any) -> None:
        self.log.append(("token", event.token))

    def tier_end(self, tier: Tier) -> None:
        self.log.append(("tier_end", tier))

    def ended(self, error: Any) -> None:
        self.endings.append(error)
        self.log.append(("ended",))
        self.end.set()

    @property
    def error(self) -> Any:
        assert len(self.endings) == 1
        return self.endings[0]


class Lease:
    """An outgoing transfer of ready data, and how its lease ended."""

    def __init__(self, manifest: Manifest, data: list[bytes] | None = None) -> None:
        self.reasons: list[tuple[Released, str]] = []
        self.end = asyncio.Event()
        self.outgoing = Outgoing(manifest, on_released=self._ended)
        for i, one in enumerate(data or []):
            self.outgoing.put(i, one)

    def _ended(self, reason: Released, detail: str) -> None:
        self.reasons.append((reason, detail))
        self.end.set()

    @property
    def reason(self) -> Released:
        assert len(self.reasons) == 1
        return self.reasons[0][0]


@asynccontextmanager
async def serving(hello: Hello = SERVER, **options: Any) -> Any:
    """A server and its port; nothing may be left when the test is over."""
    server = Server(hello, **options)
    _, port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
        server.check_integrity()
    finally:
        server.close()
    counters = server.counters()
    assert (counters.leases, counters.deliveries, counters.parked, counters.flows) == (0, 0, 0, 0)
    assert counters.queued_bytes == 0


@asynccontextmanager
async def linked(port: int, hello: Hello = CLIENT) -> Any:
    """A link that is closed at the end."""
    link = await connect("127.0.0.1", port, hello)
    try:
        yield link
    finally:
        await link.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds (the test's own timeout bounds it)."""
    while not condition():
        await asyncio.sleep(0.001)


class Wire:
    """A hand-made peer on raw streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._frames = FrameReader(lambda _: None, versions=(0, 1))
        self._waiting: list[Frame] = []

    async def frame(self) -> Frame:
        while not self._waiting:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._waiting += self._frames.feed(data)
        return self._waiting.pop(0)

    async def expect(self, kind: type[T]) -> T:
        """Next event of ``kind``; others are passed over."""
        while True:
            event = (await self.frame()).event
            if isinstance(event, kind):
                return event

    def say(self, event: Any, transfer: bytes = bytes(16), generation: int = 0, version: int = 1) -> None:
        self.writer.write(control_frame(version, event, transfer, generation))

    def segment(self, manifest: Manifest, index: int, data: bytes, *, announce: bool = True, **change: Any) -> None:
        """Send a whole segment; ``change`` replaces what the frames say."""
        generation = change.get("generation", manifest.generation)
        if announce:
            ready = SegmentReady(index, len(data), change.get("digest", segment_digest(data)))
            self.say(ready, manifest.transfer, generation)
        tier = change.get("tier", manifest.segments[index].tier)
        number = change.get("segment", index)
        cutter = SegmentWriter(1, manifest.transfer, generation, tier, number, memoryview(data), segment_digest(data))
        while cutter.left:
            out = cutter.cut(4096)
            payload = bytearray(out.payload)
            if "flip" in change and cutter.sent - len(payload) <= change["flip"] < cutter.sent:
                payload[change["flip"] - cutter.sent + len(payload)] ^= 1
            self.writer.write(out.header + payload)


async def raw_client(port: int, hello: Hello | None = CLIENT) -> Wire:
    """A hand-made decode node, greeted unless ``hello`` is None."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    if hello is not None:
        wire.say(hello, version=HANDSHAKE_VERSION)
        await wire.expect(Hello)
    return wire


@asynccontextmanager
async def bad_server(talk: Callable[[Wire], Awaitable[None]], hello: Hello | None = None) -> Any:
    """A hand-made prefill node that greets and then does ``talk``; yields its port."""
    greeting = hello or Hello(role="prefill", name="bad", epoch=7, fingerprint=FINGERPRINT)
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        wire = Wire(reader, writer)
        await wire.expect(Hello)
        wire.say(greeting, version=HANDSHAKE_VERSION)
        await talk(wire)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
