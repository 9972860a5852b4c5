"""What requests held goes back to the system."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import threading, time
from pathlib import Path
import numpy as np
from lynxkv.serving.heap import Trimmed

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

trimmed = Trimmed()
held = [np.ones(100_000, np.uint8) for _ in range(3000)]
pins = held[::100]
del held
before = resident()
trimmed.ended(None)
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_memory_between_what_is_still_held_is_given_back_after_a_request():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200_000_000
