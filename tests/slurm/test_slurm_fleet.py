"""What is the Slurm fleet's own, on a real Slurm: jobs that shrink, hosts that are left out, hosts unheard of."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from holdfast.fleet import slurm_fleet
from holdfast.fleet.slurm_fleet import SlurmFleet
from holdfast.fleet.slurm_node_presence import NodeRecord
from holdfast.fleet.slurm_replies import expand_hosts
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetState
from tests.cli.driver import until
from tests.slurm import places
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # what all fleets do, on the same Slurm, is quick: fleet/test_contract


@pytest.fixture
async def fleet(slurm_lab: SlurmLab, tmp_path: Path, no_orphans: str) -> AsyncIterator[SlurmFleet]:
    yield places.slurm(tmp_path)
    fleet = places.slurm(tmp_path)  # as whoever was the last to open it knows it
    for node in fleet.nodes():
        await fleet.give_back(node, "the test is over")
    slurm_lab.call("scancel", "-u", "root", check=False)
    until(lambda: not slurm_lab.call("squeue", "-h", "-o", "%i").split(), "an empty queue")
    slurm_lab.recover()


def all_up(fleet: SlurmFleet, place: Path) -> None:
    for node in fleet.nodes():
        until(lambda node=node: places.slurm_alive(place, node), f"{node} to be up")  # type: ignore[misc]


def host_of(fleet: SlurmFleet, node: str) -> str:
    return fleet._records[node].host


def hosts_of_job(lab: SlurmLab, job: int) -> tuple[str, ...]:
    return expand_hosts(lab.call("squeue", "-h", "-j", str(job), "-o", "%N").strip())


async def test_the_job_of_the_start_shrinks_and_a_refill_avoids_the_evicted_host(
    fleet: SlurmFleet, slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    first, *others = await fleet.acquire(3)
    all_up(fleet, tmp_path)
    jobs = {fleet._records[node].job for node in fleet.nodes()}
    assert len(jobs) == 1, "a gang"
    bad = others[-1]  # the first host of a job has its script, and Slurm keeps that one
    fleet._plan = msgspec.structs.replace(fleet._plan, drain=True)
    await fleet.give_back(bad, "evicted", Dismissal.EVICTED)
    [job] = jobs
    assert hosts_of_job(slurm_lab, job) == tuple(host_of(fleet, node) for node in (first, *others[:-1]))
    assert slurm_lab.call("sinfo", "-h", "-p", "main", "-n", host_of(fleet, bad), "-o", "%T").startswith("drain")
    slurm_lab.call("scontrol", "update", f"NodeName={host_of(fleet, bad)}", "State=RESUME")
    fleet = places.slurm(tmp_path)  # a successor knows of it
    for _ in range(3):
        await fleet.acquire(1)
    all_up(fleet, tmp_path)
    used = [host_of(fleet, node) for node in fleet.nodes()]
    assert len(set(used)) == len(used) == 5 and host_of(fleet, bad) not in used


async def test_who_may_not_drain_hosts_evicts_all_the_same(
    fleet: SlurmFleet, slurm_lab: SlurmLab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Slurm lets operators change hosts, and nobody else."""
    kept, bad = await fleet.acquire(2)
    all_up(fleet, tmp_path)
    host = host_of(fleet, bad)
    own, nobody = tmp_path / "bin", ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "scontrol")
    own.mkdir()
    (own / "scontrol").write_text(f'#!/bin/sh\nexec {" ".join(slurm_lab.words(*nobody))} "$@"\n')
    (own / "scontrol").chmod(0o755)
    fleet._commands._env["PATH"] = f"{own}:{fleet._commands._env['PATH']}"
    fleet._plan = msgspec.structs.replace(fleet._plan, drain=True)
    with caplog.at_level(logging.WARNING, "holdfast.fleet"):
        await fleet.give_back(bad, "evicted", Dismissal.EVICTED)
    assert [record.args and host in str(record.args) for record in caplog.records] == [True], caplog.text
    assert not slurm_lab.call("sinfo", "-h", "-p", "main", "-n", host, "-o", "%T").startswith("drain")
    assert fleet.nodes() == (kept,) and not places.slurm_alive(tmp_path, bad)
    [new] = await fleet.acquire(1)
    until(lambda: places.slurm_alive(tmp_path, new), "another node")
    assert host_of(fleet, new) != host, "it is left out by its name"


async def test_the_end_of_a_reservation_is_that_of_its_nodes(
    fleet: SlurmFleet, slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    slurm_lab.reserve("soon", 20, slurm_lab.nodes[0])
    fleet = places.slurm(tmp_path, "--reservation=soon")  # and --time=30
    [node] = await fleet.acquire(1)
    until(lambda: places.slurm_alive(tmp_path, node), "the node to be up")
    seen = (await fleet.survey())[node]
    assert time.time() + 1100 < seen.ends_at <= time.time() + 1200 and seen.reason == "reservation soon ends"
    slurm_lab.call("scontrol", "update", "ReservationName=soon", "Duration=60")
    seen = (await fleet.survey())[node]
    assert time.time() + 1700 < seen.ends_at <= time.time() + 1800 and not seen.reason, "its time limit is first"


async def test_two_refills_on_one_host_are_one_too_many(fleet: SlurmFleet, tmp_path: Path) -> None:
    """Slurm may give one host to two jobs, and two nodes of a job on one host are lost together."""
    fleet = places.slurm(tmp_path, shared=True)
    [first], [second] = await fleet.acquire(1), await fleet.acquire(1)
    until(lambda: places.slurm_alive(tmp_path, first), "a node")
    seen = await fleet.survey()
    assert host_of(fleet, first) == host_of(fleet, second)
    assert seen[second].state is FleetState.GONE and f" {host_of(fleet, first)}, " in seen[second].reason
    await fleet.give_back(second, "gone")


async def test_refills_wait_in_the_queue_in_bounded_numbers(fleet: SlurmFleet, slurm_lab: SlurmLab) -> None:
    gang = await fleet.acquire(2)
    slurm_lab.call("scontrol", "update", "PartitionName=main", "State=DOWN")
    asked = [*await fleet.acquire(5), *await fleet.acquire(20)]
    assert len(asked) + len(gang) <= slurm_fleet._MOST_QUEUED
    seen = await fleet.survey()
    assert {seen[node].state for node in asked} == {FleetState.QUEUED}
    assert {seen[node].reason for node in asked} == {"PartitionDown"}
    for node in asked:
        await fleet.give_back(node, "not needed")
    until(lambda: len(slurm_lab.call("squeue", "-h", "-o", "%i").split()) == 1, "the end of all but the first job")


async def test_a_host_without_power_proves_nothing(fleet: SlurmFleet, slurm_lab: SlurmLab, tmp_path: Path) -> None:
    [kept, lost] = await fleet.acquire(2)
    all_up(fleet, tmp_path)
    command = psutil.Process(fleet._records[lost].srun)
    slurm_lab.power_off(host_of(fleet, lost))
    until(lambda: not places.slurm_answers(tmp_path, lost), "Slurm to miss the host", 120)
    seen = await fleet.survey()
    assert (seen[lost].state, seen[kept].state) == (FleetState.UNKNOWN, FleetState.UP)
    with pytest.raises(OSError, match="no answer"):
        await fleet.give_back(lost, "evicted", Dismissal.EVICTED)
    slurm_lab.boot(host_of(fleet, lost))
    assert fleet.nodes() == (kept,)
    with contextlib.suppress(psutil.NoSuchProcess):  # it waits for the host's word for minutes
        for process in (*command.children(recursive=True), command):
            process.kill()


async def test_an_allocation_is_used_first_and_stays(slurm_lab: SlurmLab, tmp_path: Path, fleet: SlurmFleet) -> None:
    held = slurm_lab.call("sbatch", "--parsable", "-N2", "-o", "/dev/null", "--wrap", "sleep 900").strip()
    until(lambda: len(hosts_of_job(slurm_lab, int(held))) == 2, "an allocation")
    inside = places.slurm(tmp_path, allocation=int(held))
    nodes = await inside.acquire(3)
    all_up(inside, tmp_path)
    assert [inside._records[node].lent for node in nodes] == [True, True, False]
    for node in nodes:
        await inside.give_back(node, "not needed")
    until(lambda: slurm_lab.call("squeue", "-h", "-o", "%i").split() == [held], "the end of all but the user's own job")
    assert len(await inside.acquire(2)) == 2, "and its hosts may be used again"
    assert {inside._records[node].job for node in inside.nodes()} == {int(held)}
    for node in inside.nodes():
        await inside.give_back(node, "not needed")
    slurm_lab.call("scancel", held)


async def test_a_submission_that_was_cut_short_is_found_by_its_name(
    fleet: SlurmFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_change", lambda news: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fleet._acquire_nodes(1)
    again = places.slurm(tmp_path)
    assert again.nodes() == ("n0",) and again._records["n0"].job == 0
    all_up(again, tmp_path)
    await again.give_back("n0", "not needed")
    assert os.listdir(tmp_path / slurm_fleet.FOLDER)


async def test_a_submission_that_slurm_takes_after_it_was_given_up_is_cancelled(
    fleet: SlurmFleet, slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    """A slurmctld under load says that it does not answer, and answers. The same is left of a controller that was
    killed while it asked."""
    own, come, script = tmp_path / "bin", tmp_path / "come", tmp_path / "script"
    own.mkdir()
    real = f'while [ ! -e {come} ]; do sleep 0.05; done; {slurm_lab.bin}/sbatch "$@" < {script}'
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    lines = ("#!/bin/sh", f"cat > {script}", f"({real}) > /dev/null 2>&1 &", f"echo '{late}' >&2", "exit 1", "")
    (own / "sbatch").write_text("\n".join(lines))
    (own / "sbatch").chmod(0o755)
    path = fleet._commands._env["PATH"]
    fleet._commands._env["PATH"] = f"{own}:{path}"
    with pytest.raises(OSError, match="Socket timed out"):
        await fleet.acquire(1)
    assert fleet.nodes() == ()
    fleet._commands._env["PATH"] = path
    twin = places.slurm(tmp_path / "twin")  # of another folder, and so with other jobs
    [kept], [theirs] = await fleet.acquire(1), await twin.acquire(1)
    come.touch()

    def jobs() -> set[int]:
        return {int(word) for word in slurm_lab.call("squeue", "-h", "-t", "PD,R", "-o", "%A").split()}

    until(lambda: len(jobs()) == 3, "the job that comes late")
    fleet._swept_at -= slurm_fleet._SWEEP_S
    await fleet.survey()
    until(lambda: jobs() == {fleet._records[kept].job, twin._records[theirs].job}, "its end")
    await twin.give_back(theirs, "not needed")


async def test_a_run_of_the_same_name_keeps_its_jobs(fleet: SlurmFleet, slurm_lab: SlurmLab, tmp_path: Path) -> None:
    """Two runs with one --rdzv-id: what one had asked for when its controller ended is not what the other has."""
    (tmp_path / "other" / tmp_path.name).mkdir(parents=True)
    twin = places.slurm(tmp_path / "other" / tmp_path.name)
    [theirs] = await twin.acquire(1)
    name = twin._records[theirs].job_name
    fleet._add({"n0": NodeRecord(job_name=name)})
    fleet = places.slurm(tmp_path)
    seen = await fleet.survey()
    assert seen["n0"].state is FleetState.GONE, "nobody has a job for it"
    await fleet.give_back("n0", "gone")
    job = str(twin._records[theirs].job)
    assert slurm_lab.call("squeue", "-h", "-t", "PD,R", "-o", "%A").split() == [job]
    await twin.give_back(theirs, "not needed")


async def test_a_step_that_is_over_need_not_be_cancelled(slurm_lab: SlurmLab, fleet: SlurmFleet) -> None:
    """Slurm calls that an error, and with --quiet says nothing of it."""
    job = slurm_lab.call("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true").strip()
    until(lambda: not slurm_lab.call("squeue", "-h", "-j", job).strip(), "its end")
    for what in (f"{job}.7", job):
        await asyncio.to_thread(fleet._commands.cancel, what)
