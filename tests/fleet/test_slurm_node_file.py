"""The nodes on Slurm stand in a file that all hosts see: an older controller neither writes there nor acts."""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from holdfast.fleet import slurm_fleet, slurm_node_file
from holdfast.fleet.slurm_commands import ClusterView, SlurmCommands
from holdfast.fleet.slurm_fleet import SlurmFleet, SlurmPlan, end_all
from holdfast.fleet.slurm_node_file import SlurmRecords, read_records, write_records
from holdfast.fleet.slurm_node_presence import NodeRecord
from holdfast.fleet.slurm_replies import SlurmHost, SlurmJob
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.model.action import Dismissal

NODES = {"n0": NodeRecord(job=7, host="c1", srun=1)}


def test_only_the_newest_controller_writes(tmp_path: Path) -> None:
    assert read_records(tmp_path) == SlurmRecords()
    write_records(tmp_path, 1, {})
    write_records(tmp_path, 1, NODES)
    write_records(tmp_path, 2, NODES)
    with pytest.raises(LeaseLostError, match=r"^controller 2 "):
        write_records(tmp_path, 1, {})
    assert read_records(tmp_path) == SlurmRecords(epoch=2, host=socket.gethostname(), nodes=NODES)


def test_records_of_older_versions_are_read_and_those_that_are_damaged_are_not(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(msgspec.json.encode(NODES))
    assert read_records(tmp_path) == SlurmRecords(nodes=NODES) and read_records(tmp_path).is_ours
    write_records(tmp_path, 3, NODES)
    assert read_records(tmp_path).epoch == 3
    for content in (b"", b"{", b'{"epoch":"x"}', b"[]", path.read_bytes()[:-3]):
        path.write_bytes(content)
        with pytest.raises(OSError, match=r"/nodes\.json "):
            read_records(tmp_path)


class Slurm:
    """The commands that a fleet runs, and a job of two hosts that has begun."""

    def __init__(self, fleet: SlurmFleet, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        patch.setattr(fleet._commands, "_run", self._run)
        patch.setattr(fleet._commands, "look", self._look)
        patch.setattr(fleet._commands, "find_jobs", dict)
        patch.setattr(SlurmCommands, "start_step", self._start_step)

    def _run(self, words: Sequence[str], *more: object) -> None:
        self.asked.append(words[0])
        raise OSError("unable to contact")

    def _look(self, jobs: Iterable[int], hosts: Iterable[str]) -> ClusterView:
        job = SlurmJob(id=7, state="RUNNING", hosts=("c1", "c2"))
        up = dict.fromkeys(job.hosts, SlurmHost(answers=True, state="mixed"))
        return ClusterView(asked=frozenset(jobs), jobs={7: job}, steps=(), hosts=up)

    def _start_step(self, *words: object) -> int:
        self.asked.append("srun")
        return os.getpid()


def fleet_of(place: Path, epoch: Callable[[], int]) -> SlurmFleet:
    (place / slurm_fleet.FOLDER).mkdir(exist_ok=True)
    slurm_node_file.write_records(place / slurm_fleet.FOLDER, 1, {"n0": NodeRecord(job=7, job_name="j", order=0)})
    return SlurmFleet(place, SlurmPlan(run_id="r", starts=("true",)), {}, mint=str, epoch=epoch)


async def test_a_controller_that_lost_its_lease_starts_no_step_and_touches_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = False

    def epoch() -> int:
        if lost:
            raise LeaseLostError("another has it")
        return 1

    fleet = fleet_of(tmp_path, epoch)
    slurm = Slurm(fleet, monkeypatch)
    lost = True
    for act in (fleet.survey, lambda: fleet.acquire(1), lambda: fleet.give_back("n0", "bad", Dismissal.EVICTED)):
        with pytest.raises(LeaseLostError):
            await act()
    assert not slurm.asked and sorted(os.listdir(tmp_path / slurm_fleet.FOLDER)) == ["nodes.json"], "and no beat"
    lost = False
    await fleet.survey()
    assert slurm.asked == ["srun"]


@pytest.mark.parametrize("cause", [Dismissal.EVICTED, Dismissal.LATE, Dismissal.GONE])
async def test_hosts_of_evicted_nodes_are_noted_for_later_jobs_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Dismissal
) -> None:
    (tmp_path / slurm_fleet.FOLDER).mkdir()
    record = NodeRecord(job=7, job_name="j", host="c1")
    write_records(tmp_path / slurm_fleet.FOLDER, 1, {"n0": record, "n1": NodeRecord(job=8, host="c2")})
    plan = SlurmPlan(run_id="r", starts=("true",), flags=("--exclude=c[8-9]", "--time=5"))
    fleet = SlurmFleet(tmp_path, plan, {}, mint=str, epoch=lambda: 1)
    monkeypatch.setattr(fleet._commands, "cancel", lambda what: None)
    await fleet.give_back("n0", "bad", cause)
    noted = tmp_path / slurm_fleet.FOLDER / slurm_node_file.EXCLUDED
    assert (noted.read_text() if noted.exists() else "") == ("" if cause is Dismissal.GONE else "c1,c[8-9]")


async def test_one_that_does_not_know_of_its_successor_finds_it_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(tmp_path, lambda: 1)
    slurm = Slurm(fleet, monkeypatch)
    write_records(tmp_path / slurm_fleet.FOLDER, 2, NODES)  # the successor has started the node's step
    with pytest.raises(LeaseLostError):
        await fleet.survey()
    assert not slurm.asked and read_records(tmp_path / slurm_fleet.FOLDER).nodes == NODES


def test_whoever_gives_up_cancels_no_jobs_of_a_controller_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / slurm_fleet.FOLDER
    folder.mkdir()
    cancelled: list[str] = []
    monkeypatch.setattr(SlurmCommands, "cancel", lambda self, what: cancelled.append(what))
    monkeypatch.setattr(
        SlurmCommands, "look", lambda *asked: ClusterView(asked=frozenset(), jobs={}, steps=(), hosts={})
    )
    write_records(folder, 2, NODES)
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another")
        end_all(tmp_path, {})
    assert not cancelled
    end_all(tmp_path, {})
    assert cancelled == ["7"]
