"""The first decoding of a type by several threads at once."""

import subprocess
import sys

import pytest

THREADS = """
import sys, threading, msgspec
from holdfast.decoding import from_json

def field(name):
    return name, "dict[str, list[int]]", msgspec.field(default_factory=dict)

def attempt(number):
    inner = msgspec.defstruct(f"I{number}", [field(f"g{i}") for i in range(20)])
    kind = msgspec.defstruct(f"K{number}", [*(field(f"f{i}") for i in range(30)), ("inner", inner, None)])
    gate = threading.Barrier(8)
    def decode():
        gate.wait()
        from_json(b'{"f0": {"a": [1]}, "f29": {"b": [2]}, "inner": {"g19": {"c": [3]}}}', kind)
    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

sys.setswitchinterval(1e-6)
for number in range(300):
    attempt(number)
"""


@pytest.mark.timeout(120)
def test_it_ends_no_process() -> None:
    """With msgspec alone one of these ends by SIGSEGV within seconds."""
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=100)
