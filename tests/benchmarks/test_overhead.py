"""What of a job's processor time counts as holdfast's own, also if one of its processes ends meanwhile."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import overhead
from benchmarks._harness import Job


def test_a_process_that_ends_meanwhile_costs_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as brief:
        job = SimpleNamespace(pids=lambda: [brief.pid, os.getpid(), os.getppid()])
        # While it looks away, the first of these ends.
        monkeypatch.setattr(overhead, "time", SimpleNamespace(sleep=lambda _: brief.communicate(b"\n", timeout=60)))
        assert 0 <= overhead.cpu_beside(cast(Job, job), rank=os.getpid())
    assert overhead.cpu_s(brief.pid) is None
