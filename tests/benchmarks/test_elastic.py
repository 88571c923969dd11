"""The benchmark of survivors: who steps again and when, as read from what ranks wrote, and who is ahead."""

import pytest

from benchmarks._elastic_ways import OURS, PLAIN, RESTART, SPARES
from benchmarks._harness import Event
from benchmarks.elastic import (
    SETTLING_STEPS,
    Trial,
    find_seated,
    find_survivors,
    judge,
    kept_of,
    main,
    median_step_s,
    show,
)


def step(pid: int, generation: int, at: float, rank: int = 0) -> Event:
    return Event(at=at, kind=f"step in {generation}", pid=pid, rank=rank, generation=generation)


def test_seats_count_when_four_processes_step_in_the_same_groups() -> None:
    three = [step(pid, 2, 10.0 + pid) for pid in (1, 2, 3)]
    assert find_seated(three, 2) is None
    late = [step(pid, 3, 20.0 + pid) for pid in (1, 2, 3, 4)]
    assert find_seated(three + late, 2) == late
    assert find_seated(three + late, 4) is None
    assert find_seated(late, 3, count=2) is None
    again = [step(pid, 3, 30.0 + pid) for pid in (1, 2, 3, 4)]
    assert find_seated(late + again, 3, count=2) == again


def test_survivors_count_by_process_and_in_new_groups_alone() -> None:
    old = [step(pid, 1, 5.0) for pid in (1, 2, 3, 4)]  # also a step that was under way when the rank was killed
    assert find_survivors(old, 2, {1, 2, 3}) is None
    new = [step(1, 2, 6.0), step(2, 2, 7.0), step(9, 2, 8.0)]
    assert find_survivors(old + new, 2, {1, 2, 3}) is None
    assert find_survivors([*old, *new, step(3, 3, 9.0)], 2, {1, 2, 3}) == [new[0], new[1], step(3, 3, 9.0)]


def test_who_is_kept_takes_part_at_the_end() -> None:
    events = [step(1, 1, 1.0), step(2, 1, 1.0), step(1, 2, 2.0), step(2, 2, 2.0), step(1, 3, 3.0)]
    assert kept_of(events, {1, 2}, 1) == 1
    assert kept_of(events[:2], {1, 2}, 1) == 0


def test_a_step_takes_the_median_of_settled_ones() -> None:
    slow = [step(1, 1, 5.0 * number) for number in range(SETTLING_STEPS + 1)]
    fast = [step(1, 1, slow[-1].at + 0.02 * number) for number in range(1, 30)]
    assert median_step_s(slow + fast, 1) == pytest.approx(0.02)
    assert median_step_s(slow[:3], 1) == 0.0


def trials(ours: float | None, theirs: float | None, spares: float | None = None) -> dict[str, list[Trial]]:
    return {
        OURS: [Trial(survivors_s=ours, seats_s=ours, kept=3, step_s=0.022)],
        SPARES: [Trial(survivors_s=spares, seats_s=spares, kept=3, step_s=0.022)],
        RESTART: [Trial(seats_s=0.9, step_s=0.022)],
        "torchft": [Trial(survivors_s=theirs, seats_s=theirs, kept=3, step_s=0.03)],
        "torchft, a spare": [Trial(survivors_s=theirs, seats_s=theirs, kept=3, step_s=0.03)],
        PLAIN: [Trial(step_s=0.02)],
    }


def test_who_steps_sooner_is_ahead_and_who_never_does_is_last() -> None:
    assert all(judge(trials(0.2, 1.0, 0.1), {}).goals.values())
    assert all(judge(trials(0.2, None, 0.1), {}).goals.values())
    assert not any(one for name, one in judge(trials(None, 1.0), {}).goals.items() if "torchft" in name)
    beaten = judge(trials(0.2, 0.15, 0.1), {}).goals
    assert not beaten["seats_sooner_than_torchft"]
    assert beaten["seats_sooner_than_torchft_a_spare"]  # spares beside spares


def test_a_step_is_told_beside_a_plain_one() -> None:
    figures = judge(trials(0.2, 1.0), {}).figures
    assert figures["plain_step_ms"] == 20.0
    assert figures["torchft_beside_plain"] == 1.5
    assert show(trials(0.2, 1.0)).row_count == 6


def test_a_way_that_did_not_run_is_named() -> None:
    played = {**trials(0.2, 1.0), "in-process": [Trial(failed="it never came to step 100")]}
    findings = judge(played, {"other": "not here"})
    assert findings.skipped == {"other": "not here", "in-process, 1 of 1 jobs": "it never came to step 100"}
    assert "in_process_seats_s" not in findings.figures
    assert show(played).row_count == 7


def test_what_is_asked_for_and_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm"]) == 2
    assert "slurm" in capsys.readouterr().err
