"""``lynxkv serve`` in processes of their own, as operators run it."""

import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cli.commands import all_end, children, start
from lynxkv.bench.processes import READY
from serving.apps import ask, until


@dataclass
class Process:
    """One that serves.

    Attributes
    ----------
    url : str
    kv : tuple or None
        Where a prefill worker serves KV.
    """

    process: subprocess.Popen
    url: str
    kv: tuple[str, int] | None

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
    """``lynxkv serve ROLE OPTIONS`` from its line on; killed at the end, with its children, if it still runs."""
    ports = () if "--port" in options else ("--port", "0")
    ports += ("--kv-port", "0") if role == "prefill" and "--kv-port" not in options else ()
    process = start("serve", role, *ports, *options, env={**os.environ, **(secrets or {})}, stdin=stdin)
    try:
        line = process.stdout.readline().strip()
        assert READY in line, process.stderr.read()
        url, *more = line.partition(READY)[2].split(", ")
        host, _, port = more[0].rpartition(" ")[2].rpartition(":") if role == "prefill" else ("", "", "")
        yield Process(process, url, (host, int(port)) if role == "prefill" else None)
    finally:
        left = [] if process.poll() is not None else children(process.pid)
        process.kill()
        process.communicate()
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
