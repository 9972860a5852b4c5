"""Runs ``lynxkv`` as a user does, on a tiny model with a tokenizer of bytes."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lynxkv.bench.processes import READY
from models import _llama

COMMAND = [sys.executable, "-m", "lynxkv.cli.main"]


def save_model(folder: Path, seed: int = 0) -> str:
    """A tiny random model that reads and writes bytes; its folder."""
    torch.manual_seed(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = _llama(vocab_size=len(alphabet), num_key_value_heads=1, max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def start(*arguments, **options) -> subprocess.Popen:
    """Start ``lynxkv ARGUMENTS`` with pipes."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def ended(process: subprocess.Popen, timeout_s: float = 90) -> tuple[int, str, str]:
    """Exit code, output and errors of a process that comes to its end by itself; never a traceback."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert "Traceback" not in err, err
    return process.returncode, out, err


def lynxkv(*arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of ``lynxkv ARGUMENTS``; never a traceback, never a process left."""
    process = start(*arguments, start_new_session=True)
    result = ended(process)
    assert not alive_in_session(process.pid)
    return result


def complaint(*arguments) -> str:
    """The one line that ``lynxkv ARGUMENTS`` says before it ends with exit code 1."""
    code, out, err = lynxkv(*arguments)
    assert (code, out) == (1, "")
    return the_line(err)


def the_line(err: str) -> str:
    """The one line of ``err``, without the command's name."""
    (line,) = err.strip().splitlines()
    assert line.startswith("lynxkv: ")
    return line.removeprefix("lynxkv: ")


@contextmanager
def prefill(model: str, *options):
    """A running ``lynxkv prefill`` and its address; killed at the end if it still runs."""
    process = start("prefill", "--model", model, "--port", "0", "--chunk", "128", *options)
    try:
        line = process.stdout.readline().strip()
        assert READY in line, process.stderr.read()
        yield process, line.partition(READY)[2]
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has started and that run."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int], seconds: float = 60) -> bool:
    """Wait until none of ``pids`` runs."""
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def alive_in_session(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == session and is_alive(int(entry)):
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found
