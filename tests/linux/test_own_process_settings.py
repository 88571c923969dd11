"""What is asked of Linux."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.linux import own_process_settings
from tests.cli.driver import ROOT, gone, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def env(no_orphans: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_states() -> None:
    assert own_process_settings.process_state(os.getpid()) == "R"
    child = subprocess.Popen(["sleep", "60"])
    until(lambda: own_process_settings.process_state(child.pid) == "S", "it to sleep")
    assert child.pid in own_process_settings.list_children()
    child.kill()
    until(lambda: own_process_settings.process_state(child.pid) == "Z", "its end")
    assert child.pid in own_process_settings.list_children(), "it is still to be reaped"
    child.wait()
    assert own_process_settings.process_state(child.pid) == ""


PARENT = """
import functools, os, subprocess, sys, time
from holdfast.linux import own_process_settings
tie = functools.partial(own_process_settings.die_with_parent, os.getpid())
print(subprocess.Popen(["sleep", "60"], preexec_fn=tie).pid, flush=True)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent(env: dict[str, str]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE)
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: gone(child), "the child's end")


def test_a_child_whose_parent_is_gone_already_ends(env: dict[str, str]) -> None:
    tied = "from holdfast.linux import own_process_settings as own; own.die_with_parent(1 << 22); print('still here')"
    found = subprocess.run([sys.executable, "-c", tied], env=env, capture_output=True, timeout=30, check=False)
    assert found.returncode == 1 and found.stdout == b""


REAPER = """
import os, subprocess, sys, time
from holdfast.linux import own_process_settings
own_process_settings.become_subreaper()
orphan = int(subprocess.check_output(["sh", "-c", "sleep 60 > /dev/null & echo $!"]))
until = time.monotonic() + 10
while orphan not in own_process_settings.list_children() and time.monotonic() < until:
    time.sleep(0.01)
print(orphan in own_process_settings.list_children())
os.kill(orphan, 9)
print(os.waitpid(orphan, 0)[0] == orphan)
"""


def test_a_subreaper_adopts_orphans(env: dict[str, str]) -> None:
    began_at = time.monotonic()
    out = subprocess.check_output([sys.executable, "-c", REAPER], env=env, timeout=30)
    assert out == b"True\nTrue\n"
    assert time.monotonic() - began_at < 30


def test_what_another_process_reads_from(tmp_path: Path) -> None:
    """A pipe, though it be empty, is read to its end; of a process that is gone, or was another, there is nothing."""
    note = tmp_path / "stdin"
    code = "import time; from pathlib import Path; from holdfast.linux import own_process_settings as p; "
    code += f"p.leave_input_note(Path({str(note)!r})); print('noted', flush=True); time.sleep(600)"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        with open(own_process_settings.open_input(str(note)), "rb") as reads:
            process.stdin.write(b"hello\n")
            process.stdin.close()
            assert reads.read() == b"hello\n"
        pid, started = note.read_text().split()
        note.write_text(f"{pid} {int(started) + 1}")
        with open(own_process_settings.open_input(str(note)), "rb") as reads:
            assert reads.read() == b"" and os.readlink(f"/proc/self/fd/{reads.fileno()}") == os.devnull
        process.kill()
    for nothing in ("", str(note), str(tmp_path)):
        with open(own_process_settings.open_input(nothing), "rb") as reads:
            assert reads.read() == b""


def test_the_age_of_a_process_is_counted_from_its_fork(env: dict[str, str]) -> None:
    code = "import time; from holdfast.linux import own_process_settings as p; print(time.time() - p.own_age_s())"
    before = time.time()
    began_at = float(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
    assert before - 0.1 <= began_at <= time.time(), "in ticks of a hundredth of a second"
    assert own_process_settings.own_age_s() > 0
