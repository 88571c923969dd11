"""Jobs of our own: small disks and networks that nobody else sees, and nothing of them that stays."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from holdfast.agent.connection.peer_reach import try_peers
from holdfast.chaos import lab_launch, link_faults, linux_namespaces
from holdfast.chaos.injection_records import CannotInject, GroundTruth, InjectedFault, SkippedFault
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.job_observer import JobObserver, ObservedNode, ObservedStatus
from holdfast.chaos.network_switch import LinkFaults, PortFault, merge_faults, port_address
from holdfast.chaos.scenario import Scenario, ScenarioJob
from holdfast.chaos.striker import Striker
from holdfast.chaos.undo_guard import UndoGuard
from tests.cli.driver import ROOT, TRAIN, until

pytestmark = pytest.mark.e2e
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts take root")
needs_lab = pytest.mark.skipif(bool(link_faults.missing_reason()), reason=link_faults.missing_reason())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[list[int], Path]]:
    control = tmp_path / "links.json"
    control.write_text("{}")
    argv = [sys.executable, "-m", "holdfast.chaos.network_switch", "3", str(control)]
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
    with linux_namespaces.in_network(ends[other]):
        heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        heard.bind((port_address(other), 0))
        heard.settimeout(0.2)
    with linux_namespaces.in_network(ends[one]):
        said = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with heard, said:
        for _ in range(int(wait_s / 0.2)):
            said.sendto(b"hello", heard.getsockname())
            try:
                return heard.recv(16) == b"hello"
            except TimeoutError:
                continue
    return False


def obey(control: Path, wanted: LinkFaults) -> None:
    part = control.with_suffix(".part")
    part.write_bytes(msgspec.json.encode({"1": wanted}))
    part.replace(control)


@needs_lab
def test_links_are_cut_and_mended(network: tuple[list[int], Path]) -> None:
    ends, control = network
    assert reaches(ends, 0, 1, 20) and reaches(ends, 2, 1, 20)
    obey(control, LinkFaults(ports={"1": PortFault(loss=1.0)}))
    until(lambda: not reaches(ends, 0, 1, 0.4), "the cut")
    assert reaches(ends, 0, 2, 20), "others are not concerned"
    obey(control, LinkFaults(apart=((0, 2),)))
    until(lambda: not reaches(ends, 0, 2, 0.4), "the partition")
    assert reaches(ends, 0, 1, 20) and reaches(ends, 1, 2, 20)
    obey(control, LinkFaults())
    assert reaches(ends, 0, 2, 20)


@needs_lab
def test_a_node_tells_whom_it_reaches(network: tuple[list[int], Path]) -> None:
    """The agent's own look at its peers, over links that are really cut."""
    ends, control = network
    assert reaches(ends, 0, 1, 20) and reaches(ends, 0, 2, 20)
    peers = {"one": (port_address(1), 9), "two": (port_address(2), 9)}  # nobody listens: who refuses has answered

    def told() -> tuple[tuple[str, ...], tuple[str, ...]]:
        with linux_namespaces.in_network(ends[0]):
            reach = asyncio.run(try_peers("zero", peers))
        return reach.reached, reach.missed

    assert told() == (("one", "two"), ())
    obey(control, LinkFaults(ports={"1": PortFault(loss=1.0)}))
    until(lambda: told() == (("two",), ("one",)), "a peer that is missed")
    obey(control, LinkFaults())
    until(lambda: told() == (("one", "two"), ()), "all peers again")


@needs_lab
def test_frames_are_late(network: tuple[list[int], Path]) -> None:
    ends, control = network
    assert reaches(ends, 0, 1, 20)
    obey(control, LinkFaults(ports={"1": PortFault(delay_s=0.5)}))
    until(lambda: handshake_s(ends, 0, 1) >= 1.0, "a handshake that takes two delays")


def handshake_s(ends: list[int], one: int, other: int) -> float:
    """The kernel shakes hands without us."""
    with linux_namespaces.in_network(ends[other]), socket.create_server((port_address(other), 0)) as server:
        began = time.monotonic()
        with linux_namespaces.in_network(ends[one]), socket.create_connection(server.getsockname(), 20):
            return time.monotonic() - began


class Seen:
    """A job with a node on each host."""

    def read_status(self) -> ObservedStatus:
        nodes = tuple(ObservedNode(node=f"host{port}-a", role="active", ranks=str(port)) for port in range(3))
        return ObservedStatus(phase="training", generation=1, step=5, floor=1, nodes=nodes)


def strike(guard: UndoGuard, control: Path, id: int, fault: InjectedFault) -> InjectionReport:
    scene = InjectionScene(cast(JobObserver, cast(Any, Seen())), guard, random.Random(id))
    scene.links, scene.id = control, id
    return link_faults.strike_link(scene, fault)


@needs_lab
def test_hosts_are_parted_and_a_link_made_slow_by_faults(network: tuple[list[int], Path]) -> None:
    ends, control = network
    assert reaches(ends, 0, 1, 20) and reaches(ends, 0, 2, 20)
    with UndoGuard() as guard:
        struck = strike(guard, control, 1, InjectedFault(kind="partition", node="host1-a"))
        assert struck.nodes == ("host1-a",)
        until(lambda: not reaches(ends, 0, 1, 0.4), "the partition")
        assert reaches(ends, 2, 1, 20) and reaches(ends, 0, 2, 20), "others reach both"
        strike(guard, control, 2, InjectedFault(kind="link.slow", node="host2-a", delay_s=0.5))
        until(lambda: handshake_s(ends, 0, 2) >= 1.0, "the slow link")
        assert guard.run_undo(1) == ""
        assert reaches(ends, 0, 1, 20), "together again"
        assert handshake_s(ends, 0, 2) >= 1.0, "and the other link as slow as before"
    until(lambda: handshake_s(ends, 0, 2) < 0.5, "a link as it was")


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_an_undone_link_fault_takes_away_its_own_alone(tmp_path: Path, order: tuple[int, ...]) -> None:
    control = tmp_path / "links.json"
    control.write_text("{}")
    faults = {
        1: InjectedFault(kind="link.cut", node="host1-a"),
        2: InjectedFault(kind="link.slow", node="host1-a", delay_s=0.5),
        3: InjectedFault(kind="partition", node="host2-a"),
    }
    own = {
        1: LinkFaults({"1": PortFault(loss=1.0)}),
        2: LinkFaults({"1": PortFault(delay_s=0.5)}),
        3: LinkFaults(apart=((0, 2),)),
    }
    left = set(faults)
    with UndoGuard() as guard:
        for id, fault in faults.items():
            strike(guard, control, id, fault)
        for id in order:
            assert guard.run_undo(id) == ""
            left.remove(id)
            found = msgspec.json.decode(control.read_bytes(), type=dict[str, LinkFaults])
            assert found == {str(one): own[one] for one in left}


def test_the_controllers_host_is_not_parted_from_itself(tmp_path: Path) -> None:
    control = tmp_path / "links.json"
    control.write_text("{}")
    with UndoGuard() as guard:
        with pytest.raises(CannotInject, match="host0-a"):
            strike(guard, control, 1, InjectedFault(kind="partition", node="host0-a"))
        for id in range(1, 9):
            assert strike(guard, control, id, InjectedFault(kind="partition")).nodes != ("host0-a",), "nor by lot"
    assert control.read_text() == "{}"


def test_faults_of_one_link_add_up() -> None:
    both = merge_faults(
        [
            LinkFaults({"1": PortFault(loss=0.3, delay_s=0.5)}),
            LinkFaults({"1": PortFault(loss=0.1, delay_s=0.2)}, ((0, 2),)),
        ]
    )
    assert both == LinkFaults({"1": PortFault(loss=0.3, delay_s=0.7)}, ((0, 2),))


@needs_root
@pytest.mark.slow
def test_a_small_disk_fills_up_and_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(TRAIN)
    run = ("--no-zygote", str(tmp_path / "job.py"), str(tmp_path))
    with (
        UndoGuard() as guard,
        lab_launch.run_lab_job(ScenarioJob(run=run, disk_mib=8, shm_mib=4), tmp_path / "made") as made,
    ):
        sight = made.observe_job()
        front = made.fronts[0].pid
        disk = Path(f"/proc/{front}/root{made.disk}")
        striker = Striker(sight, guard, 1, lambda text: None)
        struck = striker.strike_fault(InjectedFault(kind="disk.full"), 60)
        assert isinstance(struck, GroundTruth), struck
        assert os.statvfs(disk).f_bavail == 0
        striker.strike_fault(InjectedFault(kind="shm.full"), 60)
        shm = Path(f"/proc/{front}/root") / "dev/shm"
        assert os.statvfs(shm).f_bavail == 0
        striker.undo_all()
        assert os.statvfs(disk).f_bavail > 0 and os.statvfs(shm).f_bavail > 0
        striker.strike_fault(InjectedFault(kind="disk.readonly"), 60)
        with pytest.raises(OSError, match="Read-only"):
            (disk / "file").touch()
        striker.undo_all()
        (disk / "file").touch()
        (tmp_path / "finish").touch()
        assert made.fronts[0].wait(60) == 0
        kinds = [getattr(line, "fault", InjectedFault(kind="")).kind for line in striker.lines]
        assert [kind for kind in kinds if kind] == ["disk.full", "shm.full", "disk.readonly"]
    assert Path("/proc/self/mountinfo").read_text() == before


@needs_root
@pytest.mark.slow
def test_the_host_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(TRAIN)
    run = ("--no-zygote", str(tmp_path / "job.py"), str(tmp_path))
    with UndoGuard() as guard, lab_launch.run_lab_job(ScenarioJob(run=run), tmp_path / "made") as made:
        striker = Striker(made.observe_job(), guard, 1, lambda text: None)
        faults = (
            InjectedFault(kind="disk.full", path="/tmp"),
            InjectedFault(kind="shm.full"),
            InjectedFault(kind="disk.readonly", path="/"),
        )
        assert striker.run(Scenario(fault=faults)) == []
        skipped = [line.why for line in striker.lines if isinstance(line, SkippedFault)]
        assert len(skipped) == 3 and all(linux_namespaces.NOT_SMALL in why for why in skipped), skipped
        (tmp_path / "finish").touch()
        assert made.fronts[0].wait(60) == 0
