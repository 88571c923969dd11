"""A test that hangs with the GIL held ends its own process only."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HANGS = """
import ctypes
from tests.hang_watchdog import hang_watchdog

def stands():
    lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # calls of a PyDLL hold the GIL
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)

with hang_watchdog(60.0, 2):
    print("in time", flush=True)
with hang_watchdog(0.2, 2):
    stands()
"""


def test_a_process_that_holds_the_gil_is_ended() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "in time\n"
    assert "in stands" in ended.stderr
