"""A prefill node on a loop of its own thread, for tests that decode on theirs."""

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from lynxkv.codec import CodecSpec
from lynxkv.errors import LynxError
from lynxkv.node.admission import sampling_to_wire, tokens_to_bytes
from lynxkv.node.decode import Request
from lynxkv.node.prefill import PrefillNode
from lynxkv.speculation import SamplingParams
from lynxkv.wire import Admit
from models import prompt

PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3)


def request(tokens=300, seed=0, **options) -> Request:
    """A small seeded request."""
    return Request(tuple(prompt(tokens, seed)), PARAMS, **{"cap": 8} | options)


def admit_of(wanted: Request) -> Admit:
    """What admits a request's KV under a new id."""
    return Admit(
        transfer=secrets.token_bytes(16),
        tokens=tokens_to_bytes(wanted.tokens),
        spec=wanted.spec,
        sampling=sampling_to_wire(wanted.params),
    )


class Running:
    """A started prefill node."""

    def __init__(self, node: PrefillNode, loop: asyncio.AbstractEventLoop, address: tuple[str, int]) -> None:
        self.node, self.loop, self.address = node, loop, address

    def call(self, function, *args):
        """Run ``function`` on the node's loop and return what it returns."""

        async def run():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def until(self, condition, seconds: float = 90.0) -> None:
        """Let the node's loop run until ``condition()`` holds."""

        async def wait():
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(seconds + 10)

    def admit(self, tokens, spec: CodecSpec | None = None) -> bytes:
        """Admit a transfer that nobody will pull; its id."""
        admit = Admit(transfer=secrets.token_bytes(16), tokens=tokens_to_bytes(tokens), spec=spec or CodecSpec())
        asyncio.run_coroutine_threadsafe(self.node._admit(admit, self.node.server.hello), self.loop).result(30)
        return admit.transfer

    def admitting(self, admit: Admit):
        """The node's own admission, as a future of the test's thread."""
        return asyncio.run_coroutine_threadsafe(self.node.admit(admit), self.loop)

    def idle(self) -> bool:
        """Wait until nothing is held; False after 30 s."""

        async def wait():
            async with asyncio.timeout(90):
                while True:
                    counters = self.node.server.counters()
                    held = self.node.store.check_integrity()
                    if not (counters.leases or counters.parked or counters.admitting or held.readers):
                        self.node.server.check_integrity()
                        return True
                    await asyncio.sleep(0.005)

        try:
            return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(100)
        except TimeoutError:
            return False


@contextmanager
def prefill_node(engine, **options) -> Iterator[Running]:
    """Start a node on a free port of the loopback; stop it afterwards."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    node = PrefillNode(engine, **options)
    address = asyncio.run_coroutine_threadsafe(node.start("127.0.0.1", 0), loop).result(120)
    try:
        yield Running(node, loop, address)
    finally:
        asyncio.run_coroutine_threadsafe(node.stop(), loop).result(30)
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def nothing_is_held(run, node):
    """Both nodes are back where they began; entries may stay."""
    assert run.idle()
    run.until(lambda: node.holdings().pulls == 0)
    held = node.holdings()
    assert (held.running, held.waiting, held.kv_bytes, held.staged_bytes, held.memory_bytes) == (0, 0, 0, 0, 0)
    run.until(lambda: run.node.holdings().running == 0)
    ours = run.call(run.node.holdings)
    assert (ours.queued, ours.readers, ours.leases, ours.deliveries) == (0, 0, 0, 0)
    assert (ours.parked, ours.admitting, ours.queued_bytes) == (0, 0, 0)
    assert not run.node._held
    assert not run.node._waiting
    return True


def finish(generation):
    """Run a generation to its end; (events, outcome)."""
    events = list(generation)
    return events, generation.outcome


def interrupted(generation):
    """Run a generation that fails; (events before it did, error)."""
    events = []
    try:
        for event in generation:
            events.append(event)
    except LynxError as error:
        return events, error
    raise AssertionError("the generation came to its end")


class Asked(threading.Thread):
    """A generation that runs to its end on a thread of its own; ``hear`` gets every event there."""

    def __init__(self, generation, hear=lambda _: None) -> None:
        super().__init__(daemon=True)
        self._generation, self._hear = generation, hear
        self._outcome, self._error = None, None
        self.start()

    def run(self) -> None:
        try:
            for event in self._generation:
                self._hear(event)
            self._outcome = self._generation.outcome
        except LynxError as error:
            self._error = error

    def outcome(self):
        """What came of it; its error is raised."""
        self.join(120)
        assert not self.is_alive(), "the generation hangs"
        if self._error is not None:
            raise self._error
        return self._outcome
