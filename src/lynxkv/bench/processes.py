"""Processes of their own for nodes, which cannot outlive the one that started them."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from lynxkv.errors import EngineError

READY = "listening on "
"""Comes before the address in the one line a process prints when it serves."""


@contextmanager
def child(
    arguments: Sequence[str], *, grace_s: float = 20.0, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run ``python ARGUMENTS`` with pipes; it is to end when its standard input closes, and is killed if not.

    A session of its own keeps the terminal's interrupt from it: whoever started it decides when it ends.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def listening(process: subprocess.Popen[str], name: str) -> str:
    """The address that a process prints once it serves.

    Raises
    ------
    EngineError
        ``name`` ended before; its own message went to standard error.
    """
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if READY not in line:
        raise EngineError(f"{name} ended before it listened; its own message is above")
    return line.partition(READY)[2].partition(",")[0]


@contextmanager
def prefill_process(
    *, model: str, dtype: str = "float32", kv_dtype: str = "bfloat16", link: str | None = None
) -> Iterator[tuple[str, int]]:
    """Start ``lynxkv prefill`` on a free port of the loopback; its address once it listens.

    Raises
    ------
    EngineError
        It ended before it listened; its own message went to standard error.
    """
    arguments = ["-m", "lynxkv.cli.main", "prefill", "--until-stdin-closes", "--port", "0"]
    arguments += ["--model", model, "--dtype", dtype, "--kv-dtype", kv_dtype]
    if link is not None:
        arguments += ["--link", link]
    with child(arguments) as process:
        host, _, port = listening(process, "the prefill process").rpartition(":")
        yield host, int(port)
