"""How far the job has come, in time, when some of its steps turn out to lead nowhere."""

from holdfast.core.incident.failure_history import FailureHistory
from holdfast.model.event import Limits, Progress
from holdfast.model.job_and_seats import Job


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
