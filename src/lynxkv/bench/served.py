"""``lynxkv serve`` in processes of their own, and what they hold, as programs that measure them see it."""

import json
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lynxkv.bench.processes import child, listening

STAY = frozenset({"links", "connections"})
"""What workers may hold when nothing is going on."""

ROLES = ("prefill", "decode", "router")


@dataclass(frozen=True, slots=True)
class Served:
    """A router and its workers that run.

    Parameters
    ----------
    url : str
        Of the router.
    pids : dict of str to int
        Of its processes, by role or name.
    """

    url: str
    pids: dict[str, int]

    def open_files(self) -> dict[str, int]:
        """Open files and sockets of every process."""
        return {role: len(os.listdir(f"/proc/{pid}/fd")) for role, pid in self.pids.items()}

    def resident_bytes(self) -> dict[str, int]:
        """Memory of every process that is not swapped out."""
        page = os.sysconf("SC_PAGE_SIZE")
        return {role: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for role, pid in self.pids.items()}

    def holdings(self) -> dict[str, int]:
        """What is not at zero of what workers hold and of the requests in flight, as ``"ROLE NAME"``."""
        router = _health(self.url)
        found: Counter[str] = Counter()
        for each in (router, *(_health(worker["url"]) for worker in router["workers"])):
            for name, size in {"requests": each["requests"], **each.get("holdings", {})}.items():
                found[f"{each['role']} {name}"] += size
        return {name: size for name, size in found.items() if size and name.split()[1] not in STAY}

    def left(self, seconds: float) -> dict[str, int]:
        """:meth:`holdings`, once they are empty or after so many seconds."""
        until = time.monotonic() + seconds
        while (held := self.holdings()) and time.monotonic() < until:
            time.sleep(0.1)
        return held


@contextmanager
def serve_all(options: Sequence[str]) -> Iterator[Served]:
    """Run ``lynxkv serve all OPTIONS`` on a free port, which ends with this process at the latest.

    Raises
    ------
    EngineError
        It ended before it listened; its own message went to standard error.
    """
    with _serving(["all", "--port", "0", *options]) as (url, pid):
        yield Served(url, {role: pid for pid in _children(pid) if (role := _role(pid)) in ROLES})


@contextmanager
def serve_router(options: Sequence[str]) -> Iterator[str]:
    """Run ``lynxkv serve router OPTIONS`` on a free port; its URL. Errors as :func:`serve_all`."""
    with _serving(["router", "--port", "0", "--log-level", "warning", *options]) as (url, _):
        yield url


@contextmanager
def _serving(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    with child(["-m", "lynxkv.cli.main", "serve", *arguments, "--until-stdin-closes"], grace_s=60) as process:
        yield listening(process, f"lynxkv serve {arguments[0]}"), process.pid


def _health(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            told: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:  # 503: it says why
        told = json.load(error)
    return told


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("serve") + 1] if "serve" in words else ""
