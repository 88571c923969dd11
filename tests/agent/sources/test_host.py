"""The host from a root that tests make, and the real one."""

import os
import threading
import time
from pathlib import Path

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.sources import host
from holdfast.agent.sources.host import HostSource
from holdfast.model.observation import Gauge

MEMINFO = "MemTotal:       32000000 kB\nMemFree: 1000 kB\nMemAvailable:    2097152 kB\n"


def fake_root(root: Path) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text("")
    (root / "proc/pressure").mkdir()
    (root / "proc/pressure/memory").write_text(
        "some avg10=0.00 avg60=3.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=1.50 avg300=0.00 total=1\n"
    )
    (root / "job").mkdir()
    return root


def numbers(source: HostSource) -> dict[tuple[str, str], float]:
    return {(s.of, s.name): s.value for s in source.read() if isinstance(s, Gauge)}


def test_memory_pressure_and_clock(tmp_path: Path) -> None:
    source = HostSource(
        lambda: 7.0, SystemClock(), lambda: -80.0, lambda: ["/job", "s3://bucket/x", "file:///job"], fake_root(tmp_path)
    )
    read = numbers(source)
    assert read["memory", "memory.available_gib"] == 2.0
    assert read["memory", "memory.pressure"] == 1.5
    assert read["clock", "clock.offset_s"] == 80.0
    assert 0 < read["/job", "disk.free"]
    assert read["/job", "mount.stuck_s"] == 0.0
    assert not any("bucket" in of for of, _ in read), "an object store is no disk of ours"


def test_several_paths_on_one_disk_are_told_once(tmp_path: Path) -> None:
    (fake_root(tmp_path) / "job/logs").mkdir()
    read = numbers(HostSource(lambda: 0.0, SystemClock(), lambda: 0.0, lambda: ["/job", "/job/logs"], tmp_path))
    assert len([name for _, name in read if name == "disk.free"]) == 1


def test_disks_that_the_job_uses(tmp_path: Path) -> None:
    root = fake_root(tmp_path)
    number = os.stat(root / "job").st_dev
    part = root / "sys/devices/nvme0n1/nvme0n1p2"
    part.mkdir(parents=True)
    (part / "partition").write_text("2")
    block = root / "sys/dev/block"
    block.mkdir(parents=True)
    (block / f"{os.major(number)}:{os.minor(number)}").symlink_to(part)
    source = HostSource(lambda: 0.0, SystemClock(), lambda: 0.0, lambda: ["/job"], root)
    read = numbers(source)
    assert source.disks == {"nvme0n1", "nvme0n1p2"}
    assert read["/job", "disk.readonly"] == 0.0


def test_a_mount_that_hangs_takes_one_thread_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heal = threading.Event()
    real = os.statvfs

    def stuck(path: Path) -> os.statvfs_result:
        if path.name == "gone":
            heal.wait(30.0)
        return real(tmp_path)

    monkeypatch.setattr(os, "statvfs", stuck)
    monkeypatch.setattr(host, "_WAIT_S", 0.05)
    (fake_root(tmp_path) / "gone").mkdir()
    source = HostSource(lambda: 0.0, SystemClock(), lambda: 0.0, lambda: ["/gone", "/job"], tmp_path)
    before = threading.active_count()
    for _ in range(4):
        source.read()
    read = numbers(source)
    assert threading.active_count() <= before + 1
    assert read["/gone", "mount.stuck_s"] > 0
    assert ("/job", "disk.free") in read, "the others are read all the same"
    heal.set()
    until = time.monotonic() + 10
    while numbers(source)["/gone", "mount.stuck_s"] and time.monotonic() < until:
        time.sleep(0.01)
    assert numbers(source)["/gone", "mount.stuck_s"] == 0.0


def test_a_bare_root_is_no_error(tmp_path: Path) -> None:
    read = numbers(HostSource(lambda: 0.0, SystemClock(), lambda: 0.0, lambda: ["/nowhere"], tmp_path))
    assert set(read) == {("clock", "clock.offset_s"), ("/nowhere", "mount.stuck_s")}


def test_this_machine() -> None:
    read = numbers(HostSource(lambda: 0.0, SystemClock(), lambda: 0.0, lambda: ["/tmp", "/dev/shm"]))
    assert read["memory", "memory.available_gib"] > 0
    assert ("/dev/shm", "shm.free") in read
