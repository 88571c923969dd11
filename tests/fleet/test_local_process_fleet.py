"""What is the local fleet's own: process trees, found by the mark that all of them carry."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fleet import local_process_fleet
from holdfast.fleet.local_process_fleet import MARK, end_node
from holdfast.linux import own_process_settings
from holdfast.model.fleet_node_reports import FleetState
from holdfast.wire.program_fork_server import ProgramProcess
from tests.cli.driver import below, gone, until
from tests.fleet import places

pytestmark = pytest.mark.e2e


def marked(node_dir: Path, *, posing: bool = False) -> "subprocess.Popen[bytes]":
    """A process that carries the mark of a node; one that poses as such knows its folder and nothing else."""
    mark = {MARK: os.path.realpath(node_dir)} if posing else local_process_fleet._node_mark(node_dir)
    process = subprocess.Popen(["sleep", "60"], env=os.environ | mark, start_new_session=True)
    until(lambda: local_process_fleet._has_mark(process.pid, mark), "its mark")
    return process


async def test_what_outlives_its_holder_is_found_by_its_mark(tmp_path: Path) -> None:
    fleet = places.local(tmp_path)
    [node] = await fleet.acquire(1)
    holder = until(lambda: places.holder(tmp_path, node), "the holder")
    agent = until(lambda: below(holder, "holdfast.agent.main"), "the agent")
    hidden = marked(tmp_path / "nodes" / node)  # as a rank's child that has left its session
    other = marked(tmp_path / "nodes" / f"{node}0")
    os.kill(holder, signal.SIGKILL)
    await fleet.give_back(node, "lost")
    assert agent
    until(lambda: gone(holder, hidden.pid, agent), "their end")  # one that is ending shows no mark any more
    assert not gone(other.pid)
    for process in (hidden, other):
        process.kill()
        process.wait()


async def test_whoever_knows_the_folder_cannot_pose_as_a_process_of_the_node(tmp_path: Path) -> None:
    """Another user of the host can: the path stands in command lines. A node would never be gone, if root runs it."""
    fleet = places.local(tmp_path)
    [node] = await fleet.acquire(1)
    holder = until(lambda: places.holder(tmp_path, node), "the holder")
    poser = marked(tmp_path / "nodes" / node, posing=True)
    assert local_process_fleet.node_processes(tmp_path / "nodes" / node)
    os.kill(holder, signal.SIGKILL)
    await fleet.give_back(node, "lost")
    assert not gone(poser.pid) and not local_process_fleet.node_processes(tmp_path / "nodes" / node)
    poser.kill()
    poser.wait()


async def test_how_the_holder_of_a_lost_node_ended_is_told(tmp_path: Path) -> None:
    fleet = places.local(tmp_path)
    [node] = await fleet.acquire(1)
    holder = until(lambda: places.holder(tmp_path, node), "the holder")
    assert until(lambda: below(holder, "holdfast.agent.main"), "the agent")
    os.kill(holder, signal.SIGKILL)
    until(lambda: fleet._survey_nodes()[node].state is FleetState.GONE, "the loss")
    seen = (await fleet.survey())[node]
    assert seen.reason == "its holder was killed by SIGKILL (sender unknown), and with it all its processes"
    assert (await fleet.survey())[node] == seen, "it says so as long as it is there"
    await fleet.give_back(node, "lost")


async def test_two_runs_with_the_same_id_do_not_hurt_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    ours, theirs = places.local(tmp_path / "a"), places.local(tmp_path / "b")
    assert await ours.acquire(1) == await theirs.acquire(1) == ("n0",)
    holder = until(lambda: places.holder(tmp_path / "b", "n0"), "their holder")
    await ours.give_back("n0", "done")
    assert not gone(holder)
    await theirs.give_back("n0", "done")


async def test_strange_files_are_no_nodes(tmp_path: Path) -> None:
    fleet = places.local(tmp_path)
    (tmp_path / "nodes" / ".trash").mkdir()
    (tmp_path / "nodes" / "notes.txt").touch()
    assert fleet.nodes() == ()


async def test_a_node_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = places.local(tmp_path)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        await fleet.acquire(1)
    assert fleet.nodes() == ()


def test_one_that_does_not_die_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "n0"
    folder.mkdir()
    monkeypatch.setattr(local_process_fleet, "_KILL_S", 0.1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: None)
    process = marked(folder)
    with pytest.raises(OSError, match=rf"\bn0\b.*\b{process.pid}$"):
        end_node(folder)
    process.kill()
    process.wait()


def test_a_stopped_holder_is_not_waited_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "n0"
    folder.mkdir()
    process = marked(folder)
    (folder / "holder.pid").write_text(str(process.pid))
    process.send_signal(signal.SIGSTOP)
    until(lambda: own_process_settings.process_state(process.pid) == "T", "its stop")
    began_at = time.monotonic()
    end_node(folder, grace_s=0.2)
    assert time.monotonic() - began_at < 20
    assert process.wait(10) == -signal.SIGKILL
    assert not (folder / "holder.pid").exists()


async def test_a_node_that_was_never_started_is_none(tmp_path: Path) -> None:
    """A controller died while it waited for the fork server: its successor asks for nodes that will come."""
    folder = tmp_path / "nodes" / "n0"
    folder.mkdir(parents=True)
    half = marked(folder)  # it had just been forked
    fleet = places.local(tmp_path)
    assert half.wait(30) != 0 and fleet.nodes() == ()
    assert await fleet.acquire(1) == ("n0",)
    until(lambda: (folder / "agent.log").exists(), "its agent")
    assert places.local(tmp_path).nodes() == ("n0",), "one that lives is left alone"
    await fleet.give_back("n0", "done")


class WatchedProcess(ProgramProcess):
    """Fails where one thread looks at it while another closes it."""

    def __init__(self) -> None:
        super().__init__(1 << 30)  # nobody has such a pid
        self.lookers, self.most, self.closed = 0, 0, 0

    def is_over(self) -> bool:
        self.lookers += 1
        self.most = max(self.most, self.lookers)
        time.sleep(0.05)
        self.lookers -= 1
        return True

    def close(self) -> None:
        self.closed += 1


def test_nodes_that_are_ended_at_once_close_a_holder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = WatchedProcess()
    monkeypatch.setattr(local_process_fleet, "_holders", {1: process})
    threads = [threading.Thread(target=end_node, args=(tmp_path / f"n{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (process.most, process.closed) == (1, 1)


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    own_process_settings.raise_file_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_a_process_whose_file_has_a_high_number_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    low = os.pidfd_open(child.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 1500)
    os.close(low)
    monkeypatch.setattr(os, "pidfd_open", lambda pid: high)
    process = ProgramProcess(child.pid)
    assert not process.is_over()
    child.kill()
    child.wait()
    assert process.is_over()
    process.close()
