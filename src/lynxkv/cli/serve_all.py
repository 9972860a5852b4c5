"""``lynxkv serve all``: prefill worker, decode worker and router, three processes that live and end together."""

import os
import secrets
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from lynxkv.bench.processes import READY, child, listening
from lynxkv.errors import EngineError


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of the three processes, and what they have in common."""

    prefill: Sequence[object]
    decode: Sequence[object]
    router: Sequence[object]
    model: str
    api_key: str | None = field(repr=False)
    until_stdin_closes: bool


def serve_all(plan: Plan) -> None:
    """Run the three until told to end.

    Raises
    ------
    EngineError
        One of them did not start, or ended by itself.
    KeyboardInterrupt
        It was interrupted.
    """
    secret = secrets.token_urlsafe(32)
    of_workers = _environment(LYNXKV_NODE_SECRET=secret, LYNXKV_API_KEY=None)
    of_router = _environment(LYNXKV_NODE_SECRET=secret, LYNXKV_API_KEY=plan.api_key)
    with ExitStack() as held:
        running: dict[str, subprocess.Popen[str]] = {}

        def start(role: str, options: Sequence[object], environment: Mapping[str, str]) -> None:
            arguments = ["-m", "lynxkv.cli.main", "serve", role, "--until-stdin-closes", *map(str, options)]
            running[role] = held.enter_context(child(arguments, environment=environment))

        def url(role: str) -> str:
            return listening(running[role], f"the {role} process")

        start("prefill", [*plan.prefill, "--port", "0", "--kv-port", "0"], of_workers)
        start("decode", [*plan.decode, "--port", "0"], of_workers)
        workers = [part for role in ("prefill", "decode") for part in (f"--{role}", url(role))]
        start("router", [*plan.router, *workers], of_router)
        at = url("router")
        with _signals() as told:
            print(f"lynxkv serve: {plan.model} {READY}{at}, its page on {at}/ui", flush=True)
            happened = _next(running, told, plan.until_stdin_closes)
            if happened == "drain":
                happened = _drain(running, told, plan.until_stdin_closes)
        if happened in running:
            raise EngineError(f"the {happened} process {_ended(running[happened])}: the others end too")
        if happened == "interrupt":
            raise KeyboardInterrupt


def _environment(**changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that gets a byte, its number, for every SIGTERM and SIGINT."""
    told, wake = socket.socketpair()
    with told, wake:
        told.setblocking(False)
        wake.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno())
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield told
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)


def _next(running: Mapping[str, "subprocess.Popen[str]"], told: socket.socket, stdin: bool) -> str:
    """What happens next: "drain", "interrupt", "end" (of standard input), or the role of a process that ended."""
    with ExitStack() as held:
        poll = select.poll()
        poll.register(told, select.POLLIN)
        if stdin:
            poll.register(0, select.POLLIN)
        ends = {}
        for role, process in running.items():
            ends[pidfd := os.pidfd_open(process.pid)] = role
            held.callback(os.close, pidfd)
            poll.register(pidfd, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready in ends:
                    running[ends[ready]].wait()
                    return ends[ready]
                if ready == told.fileno():
                    return "interrupt" if signal.SIGINT in told.recv(64) else "drain"
                if not os.read(0, 65536):
                    return "end"


def _drain(running: Mapping[str, "subprocess.Popen[str]"], told: socket.socket, stdin: bool) -> str:
    """The router first, so that the requests it has find their workers; what happened in the end."""
    for roles in (("router",), ("decode", "prefill")):
        left = {role: running[role] for role in roles}
        for process in left.values():
            process.terminate()
        while left:
            happened = _next(left, told, stdin)
            if happened in left:
                del left[happened]
            elif happened != "drain":
                return happened
    return "drain"


def _ended(process: "subprocess.Popen[str]") -> str:
    code = process.returncode
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
