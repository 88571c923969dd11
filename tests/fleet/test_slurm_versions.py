"""What real Slurms of several versions have printed (tests/slurm/record_output.py), as our parsers read it. Jobs are
named after what they had come to; all forms of one recording tell of the same moment."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.fleet import slurm_replies
from holdfast.fleet.slurm_replies import SlurmJob

RECORDED = sorted((Path(__file__).parent / "slurm").glob("slurm-*.json"))
_ENDS = {"cancelled": "CANCELLED", "completing": "CANCELLED", "preempted": "PREEMPTED", "timeout": "TIMEOUT"}


def recordings() -> list[Any]:
    return [pytest.param(json.loads(path.read_text()), id=path.stem) for path in RECORDED]


def forms() -> list[Any]:
    """The jobs of each recording as `squeue -O` tells them, and as each form of JSON does that we read."""
    found = []
    for path in RECORDED:
        told = json.loads(path.read_text())
        found.append(pytest.param(slurm_replies.parse_jobs(told["jobs"]), id=f"{path.stem}-O"))
        if slurm_replies.parse_version(told["version"]) >= slurm_replies.JSON_FROM:
            for parser, content in told["json"].items():
                jobs = slurm_replies.parse_jobs_json(json.dumps(content).encode())
                found.append(pytest.param(jobs, id=f"{path.stem}-{parser}"))
    return found


def test_versions_of_several_years_are_recorded() -> None:
    versions = {slurm_replies.parse_version(json.loads(path.read_text())["version"]) for path in RECORDED}
    assert min(versions) < slurm_replies.JSON_FROM < max(versions) and len(versions) >= 3


@pytest.mark.parametrize("jobs", forms())
def test_jobs_are_what_they_have_come_to(jobs: dict[int, SlurmJob]) -> None:
    by_name = {job.name: job for job in jobs.values()}
    assert {name for name, job in by_name.items() if job.is_queued} == {name for name in by_name if "queued" in name}
    running = {"running", "unlimited", "told-to-go", "told-to-go-unlimited"}
    assert {name for name, job in by_name.items() if job.is_running} == running
    assert {name for name, job in by_name.items() if job.completing} == {"completing"}
    over = {"cancelled", "completed", "failed", "node-fail", "preempted", "timeout", "urgent"}
    assert {name for name, job in by_name.items() if job.is_over} == over
    assert {name for name, job in by_name.items() if job.failed} == {"node-fail"}
    assert {by_name[f"queued-{why}"].reason for why in ("begin", "reservation", "partition")} == {
        "BeginTime",
        "Reservation",
        "PartitionDown",
    }
    assert by_name["queued-resources"].reason and not by_name["running"].reason
    assert {job.hosts for name, job in by_name.items() if job.is_queued} == {()}
    assert by_name["running"].hosts == ("lab-1",) and by_name["told-to-go-unlimited"].hosts == ("lab-7",)


@pytest.mark.parametrize("jobs", forms())
def test_the_end_of_a_job_is_known_ahead(jobs: dict[int, SlurmJob]) -> None:
    by_name = {job.name: job for job in jobs.values()}
    running, leaving, endless = (by_name[name] for name in ("running", "told-to-go", "told-to-go-unlimited"))
    now = leaving.ends_at - 180.0  # the grace time of their partition
    assert now + 3000 < running.ends_at < now + 3600
    assert not by_name["unlimited"].ends_at or by_name["unlimited"].ends_at > now + 86400 * 30
    assert {name for name, job in by_name.items() if job.is_running and job.preempted} == {leaving.name, endless.name}
    assert leaving.ending == endless.ending == by_name["preempted"].ending == "preempted"
    assert now < endless.ends_at <= leaving.ends_at + 10, "not later than Slurm ends it"
    assert str(by_name["cancelled"].id) in by_name["cancelled"].ending and not running.ending


RESERVED = [one for one in recordings() if "reservations" in one.values[0]]


@pytest.mark.parametrize("told", RESERVED)
def test_the_end_of_a_reservation_is_the_end_of_its_jobs(told: dict[str, Any]) -> None:
    """What it holds is its 30 minutes, of the 60 that the job has asked for; another one lets its jobs go on."""
    [running] = [job for job in slurm_replies.parse_jobs(told["jobs"]).values() if job.name == "running"]
    reservations = slurm_replies.parse_reservations(told["reservations"])
    assert running.reservation == "held" and {*reservations} == {"held", "later"}
    assert "=loose " in told["reservations"]
    found = slurm_replies.end_with_reservation(running, reservations)
    assert found.ending == "reservation held ends" and found.ends_at == reservations["held"].ends_at
    assert running.ends_at - 2000 < found.ends_at < running.ends_at - 1600


def test_one_version_at_least_is_recorded_with_reservations() -> None:
    assert RESERVED


@pytest.mark.parametrize("told", recordings())
def test_steps_hosts_and_refusals(told: dict[str, Any]) -> None:
    [step] = [step for step in slurm_replies.parse_steps(told["steps"]) if step.name == "holdfast-n0"]
    [running] = [job for job in slurm_replies.parse_jobs(told["jobs"]).values() if job.name == "running"]
    assert (step.job, step.id) == (running.id, f"{running.id}.0")
    hosts = slurm_replies.parse_hosts(told["hosts"])
    assert [name for name, host in hosts.items() if not host.answers] == ["lab-5"], "it lost its power"
    assert hosts["lab-5"].reason == "Not responding" and hosts["lab-6"].reason == "a fan | is broken"
    for printed in told["refused"].values():
        sentence = slurm_replies.failure_sentence(1, printed)
        assert sentence.lower().count("invalid") == 1 and not slurm_replies.may_pass(sentence)


@pytest.mark.parametrize("told", recordings())
def test_the_end_of_a_job_is_in_its_output(told: dict[str, Any]) -> None:
    found = {name: slurm_replies.parse_end(log) for name, log in told["logs"].items() if name in _ENDS}
    assert found == _ENDS
    assert not any(slurm_replies.parse_end(told["logs"][name]) for name in ("running", "completed", "failed"))
