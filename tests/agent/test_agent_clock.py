"""Who reads the clock: in an agent, one module alone."""

import ast
import time
from pathlib import Path

from holdfast.agent.agent_clock import SystemClock

AGENT = Path(__file__).parents[2] / "holdfast" / "agent"
CLOCK = "agent_clock.py"
# Programs of their own, which an agent or a holder starts, and those who time such programs.
OTHERS = (
    "diagnostics/",
    "probes/",
    "process_holder.py",
    "rank/last_words_judge.py",
    "releases/static_import_check.py",
    "zygotes.py",
)
READS = {"monotonic", "monotonic_ns", "time", "time_ns", "perf_counter", "perf_counter_ns"}


def clock_reads(text: str) -> list[int]:
    """Lines that ask the machine for the time."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=attr) if attr in READS:
                found.append(node.lineno)
            case ast.ImportFrom(module="time" | "datetime") | ast.Import(names=[ast.alias(name="datetime")]):
                found.append(node.lineno)
    return sorted(found)


def test_the_agent_reads_the_clock_in_one_place() -> None:
    readers = {path.relative_to(AGENT).as_posix() for path in AGENT.rglob("*.py") if clock_reads(path.read_text())}
    assert {reader for reader in readers if not reader.startswith(OTHERS)} == {CLOCK}


def test_reads_are_seen() -> None:
    assert clock_reads("import time\nx = time.monotonic\ntime.sleep(1)\nfrom time import monotonic\n") == [2, 4]
    assert clock_reads("import datetime\nclock.monotonic()\n") == [1]


def test_it_tells_the_time_of_the_machine() -> None:
    clock = SystemClock()
    assert time.monotonic() <= clock.monotonic() <= time.monotonic()
    assert abs(clock.wall() - time.time()) < 60
