"""``lynxkv serve`` in processes of their own, as operators run it."""

import os
import signal
from contextlib import ExitStack, contextmanager

from cli.commands import all_end, children, start
from lynxkv.bench.processes import READY
from serving.apps import ask, until


class Process:
    """One that serves.

    Attributes
    ----------
    url : str
    kv : str or None
        Where a prefill worker serves KV.
    """

    def __init__(self, role, options, secrets, stdin):
        self._role, self._options = role, list(options)
        self._how = {"env": {**os.environ, **(secrets or {})}, "stdin": stdin}
        for port in ("--port", "--kv-port") if role == "prefill" else ("--port",):
            if port not in self._options:
                self._options += [port, "0"]
        self.start()

    def start(self) -> None:
        """Start it, again on the ports it had, and wait for its line."""
        self.process = start("serve", self._role, *self._options, **self._how)
        line = self.process.stdout.readline().strip()
        assert READY in line, self.process.stderr.read()
        self.url, _, rest = line.partition(READY)[2].partition(", ")
        self.kv = rest.rpartition(" ")[2] if self._role == "prefill" else None
        self._keep("--port", self.url)
        if self.kv:
            self._keep("--kv-port", self.kv)

    def _keep(self, option: str, address: str) -> None:
        self._options[self._options.index(option) + 1] = address.rpartition(":")[2]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def health(self) -> dict:
        return ask(self.url, "/health")[2]

    def empties(self) -> bool:
        """Wait until a worker holds nothing of any request; entries may stay."""
        stays = {"links", "connections", "entries", "entry_bytes"}
        stays |= {"memory_bytes"} if self.kv else set()

        def held():
            about = self.health()
            found = about["holdings"] | {"requests": about["requests"]}
            return {name: value for name, value in found.items() if value and name not in stays}

        until(lambda: not held(), 60, held)
        return True


@contextmanager
def served(role, *options, secrets=None, stdin=None):
    """``lynxkv serve ROLE OPTIONS`` on free ports; killed at the end, with its children, if it still runs."""
    it = Process(role, options, secrets, stdin)
    try:
        yield it
    finally:
        left = [] if it.process.poll() is not None else children(it.process.pid)
        it.process.kill()
        it.process.communicate()
        assert all_end(left)


@contextmanager
def fleet(model, *, prefills=1, decodes=1, prefill=(), decode=(), router=(), secrets=None):
    """Workers and a router over them: ``(prefills, decodes, router)``."""
    with ExitStack() as held:

        def workers(role, count, options):
            return [held.enter_context(served(role, "--model", model, *options, secrets=secrets)) for _ in range(count)]

        of_prefill = workers("prefill", prefills, ("--chunk", "128", *prefill))
        of_decode = workers("decode", decodes, decode)
        urls = [part for role, each in _roles(of_prefill, of_decode) for part in (f"--{role}", each.url)]
        yield of_prefill, of_decode, held.enter_context(served("router", *urls, *router, secrets=secrets))


def _roles(prefills, decodes):
    return [*(("prefill", each) for each in prefills), *(("decode", each) for each in decodes)]
