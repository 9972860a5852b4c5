"""Workers and router in this process, on a loop of their own thread and free ports, and plain HTTP to talk to them."""

import asyncio
import http.client
import json
import threading
import time
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import uvicorn
import uvloop

from lynxkv.node.decode import DecodeNode
from lynxkv.node.prefill import PrefillNode
from lynxkv.serving import state
from lynxkv.serving.access import bind
from lynxkv.serving.decode import DecodeService
from lynxkv.serving.prefill import PrefillService
from lynxkv.serving.router import RouterService
from lynxkv.serving.service import application

MODEL = "tiny"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self):
        yield


class Site:
    """A loop that serves applications."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work, timeout=60):
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    @contextmanager
    def serving(self, app):
        """The URL of an application while it is served."""
        listener = bind("127.0.0.1", 0)
        config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
        config.timeout_graceful_shutdown = 1
        server = _Server(config)
        task = asyncio.run_coroutine_threadsafe(server.serve([listener]), self.loop)
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            task.result(30)

    @contextmanager
    def running(self, service, *routes):
        """The URL of a service from its start to its close."""
        self.call(service.start())
        try:
            with self.serving(application(service, routes)) as url:
                yield url
                self.call(service.stop())
        finally:
            self.call(service.close())

    def close(self) -> None:
        async def rest():
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self.loop.shutdown_default_executor()

        self.call(rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def site():
    """A site that is closed at the end."""
    it = Site()
    try:
        yield it
    finally:
        it.close()


class Cluster:
    """One or more prefill and decode workers and a router."""

    def __init__(self, where, prefills, decodes, router, urls, url):
        self.site, self.prefills, self.decodes, self.router = where, prefills, decodes, router
        self.urls, self.url = urls, url

    @property
    def prefill(self):
        return self.prefills[0]

    @property
    def decode(self):
        return self.decodes[0]

    def on_loop(self, function):
        """``function()`` on the services' loop."""

        async def run():
            return function()

        return self.site.call(run())

    def left(self):
        """What is still held of requests, by name; empty when all is free. Entries may stay."""
        found = {}
        for i, prefill in enumerate(self.prefills):
            held = self.on_loop(prefill.node.holdings)
            for name in ("running", "queued", "readers", "leases", "deliveries", "parked", "admitting", "queued_bytes"):
                if getattr(held, name):
                    found[f"prefill {i} {name}"] = getattr(held, name)
        for i, decode in enumerate(self.decodes):
            held = decode.node.holdings()
            for name in ("running", "waiting", "kv_bytes", "staged_bytes", "memory_bytes", "pulls"):
                if getattr(held, name):
                    found[f"decode {i} {name}"] = getattr(held, name)
            if decode.slots.asked:
                found[f"decode {i} slots"] = decode.slots.asked
        for service in (*self.prefills, *self.decodes, self.router):
            if service.activity.running:
                found[f"{service.role} requests"] = service.activity.running
        for worker in self.router.fleet.workers:
            if worker.outstanding:
                found[f"{worker!r} outstanding"] = worker.outstanding
        return found

    def empties(self):
        """Wait until nothing is held."""
        until(lambda: not self.left(), 60, self.left)

    def chat(self, content="What is it?", **body):
        """The body of a chat."""
        return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **body}

    def last(self):
        """The router's newest request."""
        return self.router.activity.requests()[0]


@contextmanager
def cluster(engine, *, prefills=1, decodes=1, prefill_engine=None, prefill=None, decode=None, router=None, node=None):
    """A running :class:`Cluster`; ``prefill`` and ``node`` are options of prefill and decode nodes."""
    with site() as where, ExitStack() as held:
        services = [
            PrefillService(
                PrefillNode(prefill_engine or engine, **{"chunk": 128, **(prefill or {})}),
                model=MODEL, host="127.0.0.1", port=0, name=f"prefill-{i}",
            )
            for i in range(prefills)
        ]  # fmt: skip
        decoders = [
            DecodeService(DecodeNode(engine, **(node or {})), model=MODEL, name=f"decode-{i}", **(decode or {}))
            for i in range(decodes)
        ]
        urls = [held.enter_context(where.running(service)) for service in (*services, *decoders)]
        routing = RouterService(urls[:prefills], urls[prefills:], **(router or {}))
        url = held.enter_context(where.running(routing, state.routes(routing)))
        yield Cluster(where, services, decoders, routing, urls, url)


def until(condition, seconds=60, shown=lambda: "it"):
    """Wait until ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not after {seconds} s: {shown()}"
        time.sleep(0.005)


def connect(url, timeout=120):
    """A connection to a URL's host."""
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


def ask(url, path, body=None, headers=None, *, method=None):
    """``(status, headers, body)``, the body read as JSON where it is JSON."""
    connection = connect(url)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        response = connection.getresponse()
        content = response.read()
        told = {name.lower(): value for name, value in response.getheaders()}
        return response.status, told, json.loads(content) if "json" in told.get("content-type", "") else content
    finally:
        connection.close()


def events(content):
    """The data of server-sent events, as ``(event name or None, JSON or text)``."""
    found = []
    for block in content.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


class Stream:
    """A streamed answer that is read as it comes."""

    def __init__(self, url, path, body):
        self.connection = connect(url)
        self.connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
        self.response = None

    def begin(self):
        """Wait for the status."""
        self.response = self.connection.getresponse()
        return self.response.status

    def event(self):
        """The next event's ``(name, data)``; None at the end."""
        block = b""
        while not block.endswith(b"\n\n"):
            line = self.response.readline()
            if not line:
                return None
            block += line
        (found,) = events(block)
        return found

    def rest(self):
        """All further events."""
        found = []
        while (event := self.event()) is not None:
            found.append(event)
        return found

    def vanish(self):
        """Close the connection at once."""
        if self.response is not None:
            self.response.close()
        self.connection.close()
