"""Processor time, memory and disk are taken away by cgroups of our own, which go away again."""

import os
import signal
from pathlib import Path

import pytest

from holdfast.chaos import cgroups
from holdfast.chaos.injection_records import CannotInject
from holdfast.chaos.process_handles import start_ticks
from holdfast.chaos.undo_guard import undo_one
from tests.chaos.target import BUSY, GREEDY, target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


def needs(controller: str) -> None:
    if why := cgroups.missing_reason(controller):
        pytest.skip(why)


def throttled(group: cgroups.Cgroup) -> int:
    rows = [line.split() for line in (group.path / "cpu.stat").read_text().splitlines()]
    return next(int(value) for name, value in rows if name == "nr_throttled")


def test_a_quota_holds_a_process_back() -> None:
    needs("cpu")
    with target(BUSY) as process:
        group = cgroups.make_cgroup("cpu", process.pid)
        try:
            cgroups.limit_cpu(group, 0.1)
            group.add_process(process.pid, start_ticks(process.pid))
            until(lambda: throttled(group) > 3, "it is held back")
        finally:
            assert undo_one(group.leave_undo()) == ""
        assert not group.path.exists() and process.poll() is None


def test_the_kernel_kills_who_wants_more_memory() -> None:
    needs("memory")
    with target(GREEDY) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        group = cgroups.make_cgroup("memory", process.pid)
        try:
            group.add_process(process.pid, start_ticks(process.pid))
            cgroups.limit_memory(group, 1 << 20)
            assert process.wait(30) == -signal.SIGKILL
        finally:
            assert undo_one(group.leave_undo()) == ""
        assert not group.path.exists()


def test_a_disk_is_throttled(tmp_path: Path) -> None:
    needs("io")
    with target() as process:
        group = cgroups.make_cgroup("io", process.pid)
        try:
            cgroups.limit_disk(group, tmp_path, 4096)
            name = "io.max" if group.v2 else "blkio.throttle.write_bps_device"
            assert "4096" in (group.path / name).read_text()
        except CannotInject as e:
            pytest.skip(str(e))
        finally:
            assert undo_one(group.leave_undo()) == ""


def test_what_is_no_disk_is_refused() -> None:
    needs("io")
    with target() as process:
        group = cgroups.make_cgroup("io", process.pid)
        try:
            with pytest.raises(CannotInject, match="/proc"):
                cgroups.limit_disk(group, Path("/proc"), 4096)
        finally:
            undo_one(group.leave_undo())
    assert os.path.isdir(group.back)
