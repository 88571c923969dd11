"""A process to do things to."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.chaos import process_handles

BUSY = "while True: pass"
GREEDY = """
import time
held = []
print("up", flush=True)
while True:
    held.append(bytearray(1 << 16))
    time.sleep(0.001)
"""


@contextmanager
def target(code: str = "import time; time.sleep(600)") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def stands(pid: int) -> bool:
    return process_handles.process_state(pid) in ("T", "t")
