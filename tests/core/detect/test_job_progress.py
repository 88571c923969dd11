"""Beats by the thousand become the job's few words."""

import math

from msgspec.structs import replace

from holdfast.core.detect.job_progress import LEAD, JobPace, PaceLimits
from holdfast.model.decider_events import Progress
from holdfast.model.job_and_seats import Seat
from holdfast.model.observation import Beat


def pace(*nodes: str) -> JobPace:
    found = JobPace(PaceLimits(progress_s=10.0))
    found.on_launch(1, nodes or ("a", "b"))
    return found


def beat(node: str, step: int, at: float, *, generation: int = 1, first: int = 1, counted: bool = False) -> Beat:
    return Beat(
        node=node, generation=generation, step=step, at=at, first_step=first, first_at=at - (step - first),
        counted=counted,
    )  # fmt: skip


def test_the_first_word_comes_when_every_node_has_stepped() -> None:
    job = pace()
    assert job.on_beat(1.0, beat("a", 2, 1.0)) is None
    assert job.on_beat(1.1, beat("b", -1, 0.0)) is None
    assert job.on_beat(1.2, beat("b", 1, 1.2)) == Progress(
        generation=1, step=1, at=1.2, first_step=1, first_at=1.2, counted=False
    )


def test_it_speaks_when_every_rank_has_left_its_process_group() -> None:
    job = pace()
    job.on_beat(1.0, beat("a", 5, 1.0))
    assert job.on_beat(1.0, beat("b", 5, 1.0)) is not None
    assert job.on_beat(2.0, replace(beat("a", 5, 1.0), parted=True)) is None, "b may make steps"
    left = job.on_beat(2.0, replace(beat("b", 5, 1.0), parted=True))
    assert left is not None and (left.step, left.at, left.parted) == (5, 1.0, True)
    assert job.on_beat(3.0, replace(beat("b", 5, 1.0), parted=True)) is None
    back = job.on_beat(4.0, beat("b", 5, 1.0))
    assert back is not None and not back.parted, "b has a process group again"


def test_the_slowest_speaks_for_the_job() -> None:
    job = pace()
    job.on_beat(1.0, beat("a", 5, 1.0))
    job.on_beat(1.0, beat("b", 3, 0.9))
    job.on_beat(2.0, beat("b", 5, 1.8))
    found = job.flush_progress(2.0)
    assert found is not None
    assert (found.step, found.at) == (5, 1.8)  # reached when the last one reached it


def test_then_it_speaks_now_and_then() -> None:
    job = pace("a")
    said = [step for step in range(1, 101) if job.on_beat(float(step), beat("a", step, float(step)))]
    assert said == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]


def test_the_end_of_the_first_steps_is_told_once() -> None:
    job = pace("a", "b")
    said = []
    for step in range(1, 40):
        for node in "ab":
            found = job.on_beat(step / 100, beat(node, step, step / 100))
            said += [(found.step, found.is_steady)] if found else []
    assert said == [(1, False), (11, True)]


def test_it_is_told_that_some_states_have_fewer_copies_than_they_should() -> None:
    for absent in ("", "c"):
        job = pace("a", "b")
        job.on_beat(1.0, replace(beat("a", 3, 1.0), backed=2))
        found = job.on_beat(1.0, replace(beat("b", 2, 1.0), backed=2, absent=absent))
        assert found and found.backed and found.lone == bool(absent)


def test_work_is_what_all_tell() -> None:
    job = pace("a", "b")
    worked = {"tokens": 300.0, "flops": 6e9, "parameters": 54, "peak_flops": 1e12}
    job.on_beat(1.0, replace(beat("a", 3, 1.0), **worked))
    found = job.on_beat(1.0, replace(beat("b", 2, 1.0), **worked | {"tokens": 200.0, "flops": 4e9}))
    assert found and (found.tokens, found.flops, found.parameters, found.peak_flops) == (200.0, 4e9, 54, 2e12)


def test_work_that_not_all_tell_is_not_known() -> None:
    job = pace("a", "b")
    job.on_beat(1.0, replace(beat("a", 2, 1.0), tokens=200.0, parameters=54, peak_flops=1e12))
    found = job.on_beat(1.0, replace(beat("b", 2, 1.0), parameters=27))
    assert found and (found.tokens, found.parameters, found.peak_flops) == (0.0, 0, 0.0)


def test_stages_of_equal_size_are_not_the_model() -> None:
    for mesh, known in (((("dp_shard", 2),), 54), ((("dp", 2), ("tp", 1)), 54), ((("pp", 2),), 0)):
        found = pace("a").on_beat(1.0, replace(beat("a", 2, 1.0), parameters=54, mesh=mesh))
        assert found and found.parameters == known


def test_flush_says_what_is_new_and_nothing_twice() -> None:
    job = pace("a")
    assert job.flush_progress(0.5) is None
    job.on_beat(1.0, beat("a", 1, 1.0))
    assert job.flush_progress(1.5) is None
    job.on_beat(2.0, beat("a", 2, 2.0))
    found = job.flush_progress(2.5)
    assert found is not None
    assert found.step == 2
    assert job.flush_progress(3.0) is None


def test_other_generations_are_not_heard() -> None:
    job = pace("a")
    assert job.on_beat(1.0, beat("a", 1, 1.0, generation=0)) is None
    assert job.on_beat(1.0, beat("a", 1, 1.0, generation=2)) is None
    assert job.flush_progress(2.0) is None


def test_the_end_of_redone_work_is_told_at_once() -> None:
    job = pace("a", "b")
    for node in "ab":
        job.on_beat(1.0, beat(node, 100, 1.0))
    job.on_launch(2, ("a", "c"))
    assert job.on_beat(5.0, beat("a", 91, 5.0, generation=2, first=91)) is None
    first = job.on_beat(5.0, beat("c", 91, 5.0, generation=2, first=91))
    assert first is not None
    assert first.first_step == 91
    assert job.on_beat(6.0, beat("a", 100, 6.0, generation=2, first=91)) is None
    assert job.on_beat(6.0, beat("c", 99, 6.0, generation=2, first=91)) is None
    caught_up = job.on_beat(6.1, beat("c", 100, 6.1, generation=2, first=91))
    assert caught_up is not None
    assert caught_up.step == 100
    assert job.on_beat(6.2, beat("c", 101, 6.2, generation=2, first=91)) is None


def test_the_step_is_the_one_that_everybody_has_made() -> None:
    job = pace()
    assert job.step == -1
    job.on_beat(1.0, beat("a", 5, 1.0))
    assert job.step == -1, "b has made none"
    job.on_beat(1.0, beat("b", 4, 1.0))
    job.on_beat(1.5, beat("a", 9, 1.5))
    job.on_beat(1.6, beat("b", 7, 1.6))
    assert job.step == 7, "it does not wait for the journal"
    job.on_beat(2.0, beat("b", -1, 2.0))
    assert job.step == 7, "a node whose ranks have ended has made its steps"


def test_counted_steps_are_no_measure_of_what_is_redone() -> None:
    job = pace("a")
    job.on_beat(1.0, beat("a", 100, 1.0, counted=True))
    assert job.best == -1


def test_the_last_rank_counts_for_groups_and_states_and_every_one_must_ask() -> None:
    job = pace()
    one = replace(beat("a", 5, 3.0), grouped_at=1.0, restoring_at=1.2, restored_at=2.5, skippable=True, skipped=2)
    one = replace(one, skipped_samples=8)
    job.on_beat(3.0, one)
    found = job.on_beat(
        3.0, replace(one, node="b", grouped_at=1.5, restoring_at=1.9, restored_at=2.0, skipped_samples=7)
    )
    assert found is not None
    assert (found.grouped_at, found.restoring_at, found.restored_at, found.skippable) == (1.5, 1.9, 2.5, True)
    assert (found.skipped, found.skipped_samples) == (2, 15)
    job.on_beat(4.0, replace(one, step=6, skippable=False))
    job.on_beat(4.0, replace(one, node="b", step=6))
    found = job.flush_progress(4.0)
    assert found is not None and not found.skippable


def test_counted_steps_have_numbers_where_every_node_knows_from_where_on() -> None:
    job = pace()
    job.on_beat(1.0, replace(beat("a", 3, 1.0, counted=True), origin=240))
    found = job.on_beat(1.1, replace(beat("b", 2, 1.1, counted=True), origin=240))
    assert found is not None
    assert (found.step, found.first_step, found.counted) == (242, 241, False)
    assert (job.step, job.best) == (242, 242)


def test_counted_steps_have_none_where_nodes_do_not_agree() -> None:
    for origins in ((240, 0), (0, -1), (-1, -1)):  # one rank may have read what it gave to the others
        job = pace()
        job.on_beat(1.0, replace(beat("a", 3, 1.0, counted=True), origin=origins[0]))
        found = job.on_beat(1.1, replace(beat("b", 2, 1.1, counted=True), origin=origins[1]))
        assert found is not None
        assert (found.step, found.first_step, found.counted, job.step, job.best) == (2, 1, True, 2, -1)


def test_told_steps_are_taken_as_told() -> None:
    job = pace("a")
    found = job.on_beat(1.0, replace(beat("a", 3, 1.0), origin=240))
    assert found is not None
    assert (found.step, found.counted) == (3, False)


def test_the_last_step_of_a_lost_node_is_the_one_that_the_others_tell() -> None:
    """Its last word is up to a beat old, and its neighbours tell at their stop how far all had come."""
    job = pace()
    job.on_beat(1.0, beat("a", 20, 1.0))
    job.on_beat(1.0, beat("b", 20, 1.0))
    job.on_beat(2.0, beat("a", 23, 1.9))
    assert job.flush_progress(2.0) is None, "b has told of step 20 alone, and may stand there"
    job.on_silence(("b", "a standby"))
    found = job.flush_progress(4.0)
    assert found is not None and (found.step, found.at, found.first_step) == (23, 1.9, 1)
    job.on_silence(("a",))
    assert job.step == 20, "nobody is left who could tell"


def test_a_lost_node_that_was_behind_the_others_keeps_its_own_step() -> None:
    """Ranks that do not wait for each other go on without it: the job's step is what every rank has made."""
    job = pace()
    for second in range(1, 12):
        job.on_beat(float(second), beat("a", 10 * second, float(second)))
        if second <= 8:
            job.on_beat(second + 0.1, beat("b", 5 * second, second + 0.1))
    job.on_silence(("b",))
    job.on_beat(12.0, beat("a", 120, 12.0))
    assert job.step == 40


def test_a_lost_node_that_trains_on_with_the_others_does_not_hold_them_back() -> None:
    """Its agent alone was cut off: the others, who step together with it, tell how far all came."""
    job = pace()
    for second in range(1, 12):
        job.on_beat(float(second), beat("a", 10 * second, float(second)))
        if second <= 8:
            job.on_beat(second + 0.9, beat("b", 10 * second + 8, second + 0.85))
    job.on_silence(("b",))
    assert job.step == 110


def test_a_node_that_speaks_again_counts_again() -> None:
    job = pace()
    job.on_beat(1.0, beat("a", 20, 1.0))
    job.on_beat(1.0, beat("b", 20, 1.0))
    job.on_silence(("b",))
    job.on_beat(2.0, beat("b", 20, 1.0))
    job.on_beat(2.0, beat("a", 21, 2.0))
    assert job.step == 20
    job.on_launch(2, ("a", "b"))
    job.on_silence(("b",))
    assert job.on_beat(3.0, beat("a", 21, 3.0, generation=2)) is None, "b has made no step of this generation"


def test_ranks_that_go_on_after_the_others_are_told_of() -> None:
    job = pace()
    assert job.on_beat(1.0, beat("a", 30, 1.0)) is None and job.on_beat(1.0, beat("b", 30, 1.0))
    assert job.on_beat(2.0, beat("b", 36, 1.9)) is None and job.flush_progress(2.0) is None, (
        "that is no more than a lead"
    )
    for at in (20.0, 31.0):
        job.on_beat(at - 0.5, beat("a", 30, 1.0))
        told = job.on_beat(at, beat("b", int(6 * at), at))
        assert told and (told.step, told.at, told.last_at) == (30, 1.0, at)
    assert job.on_beat(32.0, replace(beat("a", 30, 1.0), last_at=31.5)) is None
    told = job.flush_progress(32.0)
    assert told and told.last_at == 31.5, "of another rank of that node"
    assert job.flush_progress(33.0) is None
    assert (told := job.on_beat(34.0, beat("a", 240, 33.9))) is None or told.last_at == 0.0


def test_the_loss_is_the_mean_of_what_nodes_told_unless_one_is_not_finite() -> None:
    for losses, mean in (((1.0, 3.0), 2.0), ((None, 3.0), 3.0), ((None, None), None), ((1.0, math.nan), None)):
        job = JobPace(PaceLimits())
        job.on_launch(1, ("a", "b"))
        found = [
            job.on_beat(1.0, replace(beat(node, 1, 0.5), loss=loss)) for node, loss in zip("ab", losses, strict=True)
        ][1]
        assert found is not None and found.loss == mean


def mute(node: str, *, running: int = 1) -> Beat:
    return replace(beat(node, -1, 0.0), running=running)


def test_a_stage_without_an_optimizer_does_not_hide_the_steps_of_the_others() -> None:
    job = pace()
    job.on_beat(0.9, mute("a"))
    said = [job.on_beat(float(step), beat("b", step, float(step))) for step in range(1, LEAD + 1)]
    assert said[:-1] == [None] * (LEAD - 1) and job.step == LEAD
    assert (last := said[-1]) and (last.step, last.first_step, last.first_at) == (LEAD, 1, 1.0)
    assert job.on_beat(9.0, mute("a")) is None
    assert job.on_beat(30.0, beat("b", 30, 30.0)) and job.step == 30
    seats = [Seat(node=node, group_rank=i, first_rank=2 * i, nproc=2) for i, node in enumerate("ab")]
    assert job.find_mute(seats) == (0, 1)
    job.on_beat(31.0, replace(beat("b", 31, 31.0), mute=(3,)))
    assert job.find_mute(seats) == (0, 1, 3)
    job.on_beat(32.0, beat("a", 31, 32.0))
    assert job.find_mute(seats) == (3,), "who has caught up tells of steps"


def test_a_node_that_is_late_by_some_steps_is_waited_for() -> None:
    job = pace()
    job.on_beat(0.9, mute("a"))
    assert not any(job.on_beat(float(step), beat("b", step, float(step))) for step in range(1, LEAD))
    assert (found := job.on_beat(6.0, beat("a", 1, 6.0))) and found.step == 1


def test_a_node_that_is_later_still_counts_once_it_has_caught_up() -> None:
    job = pace()
    job.on_beat(0.9, mute("a"))
    for step in range(1, LEAD + 3):
        job.on_beat(float(step), beat("b", step, float(step)))
    job.on_beat(12.0, beat("a", 1, 12.0))
    assert job.step == LEAD + 2, "the job does not go back"
    job.on_beat(13.0, beat("a", LEAD + 1, 13.0))
    assert job.step == LEAD + 1
    job.on_beat(14.0, beat("b", LEAD + 9, 14.0))
    assert job.step == LEAD + 1, "the slowest that tells of steps"


def test_a_node_of_which_nothing_runs_or_is_heard_is_waited_for() -> None:
    for job, told in ((pace(), mute("a", running=0)), (pace(), beat("a", -1, 0.0)), (pace(), beat("b", -1, 0.0))):
        job.on_beat(0.9, told)
        assert job.on_beat(50.0, beat("b", 50, 50.0)) is None and job.step == -1
