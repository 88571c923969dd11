"""How far the job has come, in time, when some of its steps turn out to lead nowhere."""

from itertools import count

from msgspec.structs import replace

from holdfast.core.incident.failure_history import FailureHistory
from holdfast.core.incident.open_incident import open_incident
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.release.job_releases import JobReleases
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Progress
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job, Seat


def told(step: int, at: float) -> Progress:
    return Progress(generation=1, step=step, at=at, first_step=1, first_at=0.0, counted=False)


def test_of_what_was_told_at_once_the_good_part_counts() -> None:
    failures = FailureHistory(Job(run_id="r", min_nodes=2, max_nodes=2), Limits())
    for step, at in ((10, 10.0), (20, 20.0), (30, 30.0), (40, 40.0)):
        failures.on_progress(told(step, at))
    failures.discount_steps(24)
    assert failures.trained_s == 24.0
    failures.discount_steps(24)
    assert failures.trained_s == 24.0
    failures.discount_steps(22)
    assert failures.trained_s == 22.0, "a part of a part"
    failures.discount_steps(20)
    assert failures.trained_s == 20.0
    failures.discount_steps(3)
    assert failures.trained_s == 0.0, "of the first nobody knows where it began"


def test_nodes_are_bound_as_with_one_copy_while_some_states_have_no_second() -> None:
    job = Job(run_id="r", min_nodes=4, max_nodes=4, copies=2)
    failures, nodes = FailureHistory(job, Limits()), JobNodes(job, Limits(), count())
    nodes.take_seats(tuple(Seat(node=name, group_rank=at, first_rank=at, nproc=1) for at, name in enumerate("abcd")))
    alarm = Alarm(kind=Kind.HANG, at=5.0, suspects=("a", "b"), reason="keeps the others waiting")
    releases = JobReleases(Release(number=1), 10)
    for lone, bound in ((False, 2), (True, 1)):
        progress = replace(told(3, 3.0), backed=True, lone=lone)
        failures.on_progress(progress)
        incident = open_incident(5.0, 1, 1, progress, alarm)
        incident.add_alarm(alarm)
        case = failures.make_case(5.0, incident, releases, nodes=nodes, lost=set())
        assert {len(others) for all_of in case.bonds.values() for others in all_of} == {bound}
