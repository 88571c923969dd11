"""What the benchmark of copies in gaps concludes from its measurements."""

import pytest

from benchmarks.gaps import Measured, is_paced, judge


def job(step_s: float, ages: tuple[int, ...] = (1, 2)) -> Measured:
    return Measured([step_s] * 3, list(ages), 1.0, "")


def test_costs_and_ages_are_judged_where_equal_jobs_are_alike() -> None:
    found = {"again": [job(0.2)], "none": [job(0.2)], "duty": [job(0.21, (3, 4))], "gaps": [job(0.2001)]}
    _, findings = judge(found)
    assert findings.figures["duty_cost"] == pytest.approx(0.05) and findings.figures["duty_age_most"] == 4
    assert findings.goals == {"copy_age_steps <= 2": True, "step_cost <= 0.1 %": True}
    _, findings = judge(found | {"gaps": [job(0.201, (1, 3))]})
    assert findings.goals == {"copy_age_steps <= 2": False, "step_cost <= 0.1 %": False}


def test_noise_that_is_larger_than_the_goal_is_told() -> None:
    _, findings = judge({"again": [job(0.203)], "none": [job(0.2)], "duty": [job(0.2)], "gaps": [job(0.2)]})
    assert "1.50 %" in findings.skipped["step_cost <= 0.1 %"] and len(findings.goals) == 1


def test_a_job_without_copies_is_paced_as_it_is_to_be() -> None:
    assert is_paced("none", "") and is_paced("gaps", "gaps") and not is_paced("gaps", "duty: steps vary too much")
    assert is_paced("duty", "duty: backup.pacing is duty") and not is_paced("duty", "")
