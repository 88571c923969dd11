"""What a record and Slurm's answers together say about a node."""

import msgspec

from holdfast.fleet.slurm_commands import ClusterView, split_exclusions
from holdfast.fleet.slurm_node_presence import NodeRecord, find_strays, is_cut_off, judge_node, step_name
from holdfast.fleet.slurm_replies import SlurmHost, SlurmJob, SlurmStep
from holdfast.model.fleet_node_reports import FleetState

RUNNING = SlurmJob(id=7, state="RUNNING", hosts=("c1", "c2"), ends_at=500.0)
UP = SlurmHost(answers=True, state="mixed")
AWAY = SlurmHost(answers=False, state="down", reason="Not responding")
STARTED = NodeRecord(job=7, host="c1", srun=99, seen=True)


def view(job: SlurmJob | None, host: SlurmHost = UP, *, step: bool = True) -> ClusterView:
    steps = (SlurmStep(id="7.0", job=7, name=step_name("n0")),) if step else ()
    return ClusterView(asked=frozenset({7}), jobs={7: job} if job else {}, steps=steps, hosts={"c1": host})


def state_of(record: NodeRecord, seen: ClusterView, *, launching: bool = False) -> FleetState:
    return judge_node("n0", record, seen, launching=launching).state


def changed(job: SlurmJob, **fields: object) -> SlurmJob:
    return msgspec.structs.replace(job, **fields)


def test_jobs_that_no_record_tells_of_are_strays() -> None:
    asked = NodeRecord(job_name="holdfast-r-n1")
    given_up = NodeRecord(job_name="holdfast-r-n2", released="gone")
    records = (STARTED, NodeRecord(job=8, released="evicted"), asked, given_up)
    jobs = {7: "holdfast-r-n0", 8: "holdfast-r-n3", 9: "holdfast-r-n1", 10: "holdfast-r-n2", 11: "holdfast-r-n4"}
    assert find_strays(jobs, records) == (10, 11)


def test_a_node_from_the_queue_to_its_step() -> None:
    asked, empty = NodeRecord(job_name="j"), ClusterView(asked=frozenset(), jobs={}, steps=(), hosts={})
    assert state_of(asked, empty, launching=True) is FleetState.QUEUED
    assert state_of(asked, empty) is FleetState.GONE, "no job of its name was found"
    record = msgspec.structs.replace(asked, job=7)
    assert state_of(record, empty) is FleetState.QUEUED, "it was submitted after this look"
    waiting = judge_node(
        "n0", record, view(changed(RUNNING, state="PENDING", reason="Priority"), step=False), launching=False
    )
    assert (waiting.state, waiting.reason) == (FleetState.QUEUED, "Priority")
    assert state_of(record, view(changed(RUNNING, state="CONFIGURING"), step=False)) is FleetState.STARTING
    given = msgspec.structs.replace(record, host="c1")
    assert state_of(given, view(RUNNING, step=False)) is FleetState.STARTING
    begun = msgspec.structs.replace(given, srun=99)
    assert state_of(begun, view(RUNNING, step=False), launching=True) is FleetState.STARTING
    assert state_of(begun, view(RUNNING, step=False)) is FleetState.GONE, "srun failed"
    up = judge_node("n0", begun, view(RUNNING), launching=True)
    assert (up.state, up.host, up.ends_at) == (FleetState.UP, "c1", 500.0)


def test_only_an_end_that_slurm_has_seen_is_one() -> None:
    assert state_of(STARTED, view(RUNNING, step=False), launching=True) is FleetState.GONE
    assert state_of(STARTED, view(changed(RUNNING, state="COMPLETING", completing=True))) is FleetState.UP
    ended = judge_node("n0", STARTED, view(changed(RUNNING, state="TIMEOUT"), step=False), launching=False)
    assert (ended.state, ended.failed, ended.reason) == (FleetState.GONE, False, "job 7 has ended: timeout")
    assert state_of(STARTED, view(None, step=False)) is FleetState.GONE
    for lost in (
        view(RUNNING, AWAY),
        view(changed(RUNNING, state="NODE_FAIL"), AWAY, step=False),
        view(None, AWAY, step=False),
    ):
        assert state_of(STARTED, lost) is FleetState.UNKNOWN, "behind a cut cable it may run on"
        assert is_cut_off(STARTED, lost)
    back = msgspec.structs.replace(STARTED, cut_off=True)
    assert state_of(back, view(changed(RUNNING, state="NODE_FAIL"), step=False)) is FleetState.UNKNOWN
    assert not is_cut_off(NodeRecord(job=7, host="c1"), view(RUNNING, AWAY)), "nothing of it was ever there"


def test_a_second_node_on_one_host_is_none() -> None:
    assert state_of(NodeRecord(job=7, host="c1", doubled=True), view(RUNNING, step=False)) is FleetState.GONE


def test_a_preemption_is_told_with_its_end() -> None:
    taken = judge_node("n0", STARTED, view(changed(RUNNING, preempted=True, ends_at=430.0)), launching=True)
    assert (taken.state, taken.reason, taken.ends_at) == (FleetState.UP, "preempted", 430.0)


def test_a_job_that_is_being_ended_says_so_and_by_whom_if_that_is_known() -> None:
    for state, by, told in (
        ("CANCELLED", "ann", "job 7 was cancelled by ann"),
        ("CANCELLED", "", "job 7 was cancelled"),
        ("COMPLETING", "", "Slurm ends job 7, and has not said why"),
        ("TIMEOUT", "", ""),
    ):
        job = changed(RUNNING, state=state, completing=True, cancelled_by=by)
        seen = judge_node("n0", STARTED, view(job), launching=True)
        assert (seen.state, seen.reason) == (FleetState.UP, told)
    over = changed(RUNNING, state="CANCELLED", cancelled_by="ann")
    ended = judge_node("n0", STARTED, view(over, step=False), launching=False)
    assert (ended.state, ended.reason) == (FleetState.GONE, "job 7 has ended: cancelled by ann")


def test_the_users_own_exclusions_stay() -> None:
    flags = ("--partition=gpu", "-x", "c1", "--exclude=c2,c3", "--exclude", "c4", "-xc5", "--exclusive")
    assert split_exclusions(flags) == (["--partition=gpu", "--exclusive"], {"c1", "c2,c3", "c4", "c5"})
