"""Processor time, memory and disk are taken away by cgroups of our own, which go away again."""

import os
import signal
from pathlib import Path

import pytest

from holdfast.chaos import cgroups
from holdfast.chaos.fault import Cannot
from holdfast.chaos.guard import undone
from holdfast.chaos.hold import started
from tests.chaos.target import BUSY, GREEDY, target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


def needs(controller: str) -> None:
    if why := cgroups.missing(controller):
        pytest.skip(why)


def throttled(group: cgroups.Group) -> int:
    rows = [line.split() for line in (group.path / "cpu.stat").read_text().splitlines()]
    return next(int(value) for name, value in rows if name == "nr_throttled")


def test_a_quota_holds_a_process_back() -> None:
    needs("cpu")
    with target(BUSY) as process:
        group = cgroups.make("cpu", process.pid)
        try:
            cgroups.slow(group, 0.1)
            group.join(process.pid, started(process.pid))
            until(lambda: throttled(group) > 3, "it is held back")
        finally:
            assert undone(group.leave()) == ""
        assert not group.path.exists() and process.poll() is None


def test_the_kernel_kills_who_wants_more_memory() -> None:
    needs("memory")
    with target(GREEDY) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        group = cgroups.make("memory", process.pid)
        try:
            group.join(process.pid, started(process.pid))
            cgroups.starve(group, 1 << 20)
            assert process.wait(30) == -signal.SIGKILL
        finally:
            assert undone(group.leave()) == ""
        assert not group.path.exists()


def test_a_disk_is_throttled(tmp_path: Path) -> None:
    needs("io")
    with target() as process:
        group = cgroups.make("io", process.pid)
        try:
            cgroups.slow_disk(group, tmp_path, 4096)
            name = "io.max" if group.v2 else "blkio.throttle.write_bps_device"
            assert "4096" in (group.path / name).read_text()
        except Cannot as e:
            pytest.skip(str(e))
        finally:
            assert undone(group.leave()) == ""


def test_what_is_no_disk_is_refused() -> None:
    needs("io")
    with target() as process:
        group = cgroups.make("io", process.pid)
        try:
            with pytest.raises(Cannot, match="no disk of this host"):
                cgroups.slow_disk(group, Path("/proc"), 4096)
        finally:
            undone(group.leave())
    assert os.path.isdir(group.back)
