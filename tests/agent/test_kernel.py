"""What is asked of Linux."""

import os
import subprocess
import sys
import time

import pytest

from holdfast.agent import kernel
from tests.cli.driver import ROOT, gone, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


@pytest.fixture
def env(no_orphans: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_states() -> None:
    assert kernel.state_of(os.getpid()) == "R"
    child = subprocess.Popen(["sleep", "60"])
    until(lambda: kernel.state_of(child.pid) == "S", "it to sleep")
    assert child.pid in kernel.children()
    child.kill()
    until(lambda: kernel.state_of(child.pid) == "Z", "its end")
    assert child.pid in kernel.children(), "it is still to be reaped"
    child.wait()
    assert kernel.state_of(child.pid) == ""


PARENT = """
import functools, os, subprocess, sys, time
from holdfast.agent import kernel
tie = functools.partial(kernel.die_with_parent, os.getpid())
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
    tied = "from holdfast.agent import kernel; kernel.die_with_parent(1 << 22); print('still here')"
    found = subprocess.run([sys.executable, "-c", tied], env=env, capture_output=True, timeout=30, check=False)
    assert found.returncode == 1 and found.stdout == b""


REAPER = """
import os, subprocess, sys, time
from holdfast.agent import kernel
kernel.become_subreaper()
orphan = int(subprocess.check_output(["sh", "-c", "sleep 60 > /dev/null & echo $!"]))
until = time.monotonic() + 10
while orphan not in kernel.children() and time.monotonic() < until:
    time.sleep(0.01)
print(orphan in kernel.children())
os.kill(orphan, 9)
print(os.waitpid(orphan, 0)[0] == orphan)
"""


def test_a_subreaper_adopts_orphans(env: dict[str, str]) -> None:
    began_at = time.monotonic()
    out = subprocess.check_output([sys.executable, "-c", REAPER], env=env, timeout=30)
    assert out == b"True\nTrue\n"
    assert time.monotonic() - began_at < 30
