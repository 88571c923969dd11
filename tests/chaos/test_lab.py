"""Jobs of our own: small disks and networks that nobody else sees, and nothing of them that stays."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.chaos import lab, links, spaces
from holdfast.chaos.fault import Fault, Skipped, Truth
from holdfast.chaos.guard import Guard
from holdfast.chaos.scenario import Job, Scenario
from holdfast.chaos.striking import Striker
from holdfast.chaos.switch import Link, Links, address
from tests.cli.driver import ROOT, TRAIN, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts take root")
needs_lab = pytest.mark.skipif(bool(links.missing()), reason=links.missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[list[int], Path]]:
    control = tmp_path / "links.json"
    control.write_text("{}")
    argv = [sys.executable, "-m", "holdfast.chaos.switch", "3", str(control)]
    switch = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert switch.stdin and switch.stdout
    fds = json.loads(switch.stdout.readline())
    opened = [os.open(f"/proc/{switch.pid}/fd/{fd}", os.O_RDONLY) for fd in fds]
    yield opened, control
    for fd in opened:
        os.close(fd)
    switch.stdin.close()
    assert switch.wait(20) == 0
    switch.stdout.close()


def reaches(ends: list[int], one: int, other: int, wait_s: float) -> bool:
    """Whether a datagram comes through."""
    with spaces.network(ends[other]):
        heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        heard.bind((address(other), 0))
        heard.settimeout(0.2)
    with spaces.network(ends[one]):
        said = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with heard, said:
        for _ in range(int(wait_s / 0.2)):
            said.sendto(b"hello", heard.getsockname())
            try:
                return heard.recv(16) == b"hello"
            except TimeoutError:
                continue
    return False


def obey(control: Path, wanted: Links) -> None:
    part = control.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(wanted))
    part.replace(control)


@needs_lab
def test_links_are_cut_and_mended(network: tuple[list[int], Path]) -> None:
    ends, control = network
    assert reaches(ends, 0, 1, 20) and reaches(ends, 2, 1, 20)
    obey(control, Links(ports={"1": Link(loss=1.0)}))
    until(lambda: not reaches(ends, 0, 1, 0.4), "the cut")
    assert reaches(ends, 0, 2, 20), "others are not concerned"
    obey(control, Links(apart=((0, 2),)))
    until(lambda: not reaches(ends, 0, 2, 0.4), "the partition")
    assert reaches(ends, 0, 1, 20) and reaches(ends, 1, 2, 20)
    obey(control, Links())
    assert reaches(ends, 0, 2, 20)


@needs_lab
def test_frames_are_late(network: tuple[list[int], Path]) -> None:
    ends, control = network
    assert reaches(ends, 0, 1, 20)
    obey(control, Links(ports={"1": Link(delay_s=0.5)}))
    with spaces.network(ends[1]):
        server = socket.create_server((address(1), 0))

    def late() -> float:
        began = time.monotonic()
        with spaces.network(ends[0]), socket.create_connection(server.getsockname(), 20):
            return time.monotonic() - began

    until(lambda: late() >= 1.0, "a handshake that takes two delays")  # the kernel shakes hands without us
    server.close()


@needs_root
@pytest.mark.slow
def test_a_small_disk_fills_up_and_is_read_only(
    tmp_path: Path, port_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    monkeypatch.setenv("PYTHONPATH", f"{port_only}{os.pathsep}{ROOT}")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(TRAIN)
    run = ("--no-zygote", str(tmp_path / "job.py"), str(tmp_path))
    with Guard() as guard, lab.made(Job(run=run, disk_mib=8, shm_mib=4), tmp_path / "made") as made:
        sight = made.sight()
        front = made.fronts[0].pid
        disk = Path(f"/proc/{front}/root{made.disk}")
        striker = Striker(sight, guard, 1, lambda text: None)
        struck = striker.strike(Fault(kind="disk.full"), 60)
        assert isinstance(struck, Truth), struck
        assert os.statvfs(disk).f_bavail == 0
        striker.strike(Fault(kind="shm.full"), 60)
        shm = Path(f"/proc/{front}/root") / "dev/shm"
        assert os.statvfs(shm).f_bavail == 0
        striker.undo()
        assert os.statvfs(disk).f_bavail > 0 and os.statvfs(shm).f_bavail > 0
        striker.strike(Fault(kind="disk.readonly"), 60)
        with pytest.raises(OSError, match="Read-only"):
            (disk / "file").touch()
        striker.undo()
        (disk / "file").touch()
        (tmp_path / "finish").touch()
        assert made.fronts[0].wait(60) == 0
        kinds = [getattr(line, "fault", Fault(kind="")).kind for line in striker.lines]
        assert [kind for kind in kinds if kind] == ["disk.full", "shm.full", "disk.readonly"]
    assert Path("/proc/self/mountinfo").read_text() == before


@needs_root
def test_the_host_is_never_touched(tmp_path: Path, port_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{port_only}{os.pathsep}{ROOT}")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(TRAIN)
    run = ("--no-zygote", str(tmp_path / "job.py"), str(tmp_path))
    with Guard() as guard, lab.made(Job(run=run), tmp_path / "made") as made:
        striker = Striker(made.sight(), guard, 1, lambda text: None)
        faults = (Fault(kind="disk.full", path="/tmp"), Fault(kind="shm.full"), Fault(kind="disk.readonly", path="/"))
        assert striker.run(Scenario(fault=faults)) == []
        skipped = [line.why for line in striker.lines if isinstance(line, Skipped)]
        assert len(skipped) == 3 and all("no small file system that chaos has made" in why for why in skipped), skipped
        (tmp_path / "finish").touch()
        assert made.fronts[0].wait(60) == 0
