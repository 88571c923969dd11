"""Redone steps: equal ones say nothing, others an alarm as soon as it is known what is usual, and nobody is blamed."""

import re
from collections.abc import Iterable

import msgspec
import pytest

from holdfast.core.detect.loss_spikes import LossLimits
from holdfast.core.detect.redone_losses import SIGNATURE, RedoneLosses
from holdfast.model.code_release import Release
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.loss_response import Ease
from holdfast.model.node_errands import LaunchHere
from holdfast.model.observation import StepValues
from holdfast.model.restore_sources import Restore
from holdfast.model.state_doubt import Doubt

FIRST = LaunchHere(
    id=1,
    generation=1,
    seat=Seat(node="n0", first_rank=0, nproc=1, group_rank=0),
    world_size=4,
    group_world_size=1,
    store_host="",
    store_port=0,
    run_id="",
    max_restarts=0,
    release=Release(number=1),
)


class Job:
    """One rank whose loss at step n is 10 / n, but for what a test changes."""

    def __init__(self, **limits: object) -> None:
        self.detector = RedoneLosses(msgspec.convert(limits, LossLimits))
        self.generation = 0

    def run(self, steps: Iterable[int], factor: float = 1.0, **launch: object) -> list[Alarm]:
        """Make these steps in a new generation; the losses of all are so many times what they should be."""
        self.generation += 1
        self.detector.on_launch(msgspec.structs.replace(FIRST, generation=self.generation, **launch))
        return [alarm for step in steps if (alarm := self.tell(step, 10 / step * factor, resumed=min(steps) - 1))]

    def tell(self, step: int, loss: float, resumed: int | None = None, rank: int = 0) -> Alarm | None:
        told = StepValues(generation=self.generation, rank=rank, step=step, at=5.0, loss=loss)
        return self.detector.on_values(told, resumed)


def settled(alarm: Alarm) -> tuple[int, int]:
    """Return the generation that was right after all, and the one that is taken to have been wrong."""
    assert alarm.signature == "settled"
    right, wrong = re.findall(r"generation (\d+)", alarm.reason)
    return int(right), int(wrong)


def test_equal_losses_say_nothing() -> None:
    job = Job(exact=True)
    assert job.run(range(1, 31)) == job.run(range(21, 41)) == job.run(range(1, 50)) == []


def test_in_an_exact_job_the_last_bit_is_an_alarm_at_once() -> None:
    job = Job(exact=True)
    job.run(range(1, 31))
    [alarm] = job.run(range(21, 31), factor=1 + 1e-15)
    assert (alarm.kind, alarm.stance, alarm.suspects, alarm.ranks) == (Kind.REDONE, Stance.ACT, (), ())
    assert (alarm.signature, alarm.not_after) == (SIGNATURE, 20)
    assert alarm.reason.endswith("the restored state, the code or a machine differs")


@pytest.mark.parametrize("proved", [True, False])
def test_losses_of_states_that_replicas_proved_wrong_say_nothing(proved: bool) -> None:
    job = Job(exact=True)
    job.run(range(1, 11))
    wrong = 10 / 11 * (1 + 1e-9)
    assert job.tell(11, wrong) is None
    doubt = Doubt(generation=1, not_after=10, proved=proved)
    alarms = job.run(range(9, 13), restore=Restore(step=8, doubts=(doubt,)))
    assert [alarm.signature for alarm in alarms] == ([] if proved else [SIGNATURE])
    assert job.tell(13, 10 / 13) is None


def test_the_sentence_has_both_losses() -> None:
    job = Job(exact=True)
    job.run(())
    job.tell(120, 2.29, resumed=119)
    job.run(())
    alarm = job.tell(120, 2.31, resumed=119)
    assert alarm and alarm.reason.startswith("step 120 was made again with loss 2.31, was 2.29: the restored state")


def test_that_a_job_is_exact_is_learned() -> None:
    job = Job()
    job.run(range(1, 31))
    assert job.run(range(21, 31)) == []  # ten redone steps, all equal
    [alarm] = job.run(range(25, 31), factor=1.001)
    assert alarm.stance is Stance.ACT


def test_rounded_losses_prove_no_exact_job() -> None:
    job = Job()
    for _ in range(4):
        job.run(())
        for step in range(1, 31):
            assert job.tell(step, round(10 / step, 2), resumed=0) is None
    job.run(())
    alarm = job.tell(1, 10.01, resumed=0)
    assert alarm and alarm.stance is Stance.OBSERVE


def test_nothing_is_concluded_before_anything_is_known() -> None:
    job = Job()
    job.run(range(1, 31))
    [alarm] = job.run(range(21, 31), factor=1.001)
    assert alarm.stance is Stance.OBSERVE and "not comparable" in alarm.reason and alarm.not_after is None


def test_ranks_that_share_a_loss_are_one_comparison() -> None:
    job = Job()
    job.run(())
    for rank in range(16):
        job.tell(1, 20 / 7, resumed=0, rank=rank)
    job.run(())
    for rank in range(16):
        assert job.tell(1, 20 / 7, resumed=0, rank=rank) is None
    job.run(())
    alarm = job.tell(1, 2.1, resumed=0)
    assert alarm and alarm.stance is Stance.OBSERVE


def test_beyond_its_own_noise_a_job_that_is_not_exact_is_suspicious() -> None:
    job = Job()
    job.run(range(1, 31))
    job.run(range(21, 31), factor=1.001)
    assert job.run(range(21, 31), factor=1.004) == []
    [alarm] = job.run(range(21, 31), factor=1.3)
    assert (alarm.stance, alarm.not_after) == (Stance.ACT, 20)


def test_noise_is_not_known_further_than_it_was_seen() -> None:
    """Small differences grow from step to step."""
    job = Job()
    job.run(range(1, 61))
    job.run(range(21, 31), factor=1.001)
    assert [alarm.stance for alarm in job.run(range(1, 20), factor=1.3)] == [Stance.ACT]
    job = Job()
    job.run(range(1, 61))
    job.run(range(21, 31), factor=1.001)
    job.run(())
    for step in range(31, 50):
        alarm = job.tell(step, 10 / step * 1.3, resumed=20)
        assert alarm is None or alarm.stance is Stance.OBSERVE


def test_a_release_that_came_in_is_the_first_suspect_and_only_told_of() -> None:
    job = Job(exact=True)
    job.run(range(1, 31))
    [alarm] = job.run(range(21, 31), factor=2.0, release=Release(number=2))
    assert (alarm.stance, alarm.signature) == (Stance.NOTIFY, "release") and " release 2 " in alarm.reason
    assert job.run(range(21, 31), factor=2.0, release=Release(number=2)) == []


def test_a_rollback_goes_on_from_what_the_newer_release_has_made() -> None:
    job = Job(exact=True)
    job.run(range(1, 41))
    job.run(range(31, 36), factor=2.0, release=Release(number=2))
    assert [alarm.stance for alarm in job.run(range(34, 41), factor=1.5)] == [Stance.NOTIFY]


@pytest.mark.parametrize("change", [{"world_size": 3}, {"eases": (Ease(first=21, last=30, factor=0.5),)}])
def test_other_conditions_are_not_compared(change: dict[str, object]) -> None:
    job = Job(exact=True)
    job.run(range(1, 31))
    assert job.run(range(21, 31), factor=2.0, **change) == []


def test_the_result_that_comes_again_is_believed() -> None:
    job = Job(exact=True)
    job.run(range(1, 31))
    job.run(range(21, 23), factor=1.5)
    [alarm] = job.run(range(21, 31))
    assert (alarm.stance, settled(alarm)) == (Stance.NOTIFY, (1, 2))


def test_a_third_result_is_an_alarm_again_and_then_the_job_is_not_exact_after_all() -> None:
    job = Job()
    job.run(range(1, 41))
    job.run(range(21, 41))
    stances = [[alarm.stance for alarm in job.run(range(31, 33), factor=1 + n / 100)] for n in (1, 2, 3)]
    assert stances == [[Stance.ACT], [Stance.ACT], [Stance.NOTIFY, Stance.OBSERVE]]
    told = Job(exact=True)
    told.run(range(1, 41))
    assert [told.run(range(31, 33), factor=1 + n / 100)[0].stance for n in (1, 2, 3)] == [Stance.ACT] * 3


def test_a_mean_over_other_steps_is_not_compared() -> None:
    """Megatron logs the mean since its last line, which may begin elsewhere after a restart."""
    job = Job(exact=True)
    job.run(())
    for step in (10, 20, 30):
        job.tell(step, 2.0)
    job.run(())
    assert job.tell(20, 2.5) is None  # the mean since some step that nobody knows
    alarm = job.tell(30, 2.5)
    assert alarm and alarm.stance is Stance.ACT


def test_steps_without_numbers_and_losses_that_are_not_finite_are_left_out() -> None:
    job = Job(exact=True)
    job.run(range(1, 31))
    job.run(())
    assert job.tell(21, float("nan"), resumed=20) is None
    counted = StepValues(generation=2, rank=0, step=22, at=5.0, loss=9.0, numbered=False)
    assert job.detector.on_values(counted, 20) is None


def test_the_user_may_want_to_be_told_only() -> None:
    job = Job(exact=True, redone_stance="notify")
    job.run(range(1, 31))
    [alarm] = job.run(range(21, 31), factor=1.5)
    assert alarm.stance is Stance.NOTIFY


def test_what_only_a_doubted_generation_has_made_is_not_compared() -> None:
    """A script that keeps its own state may go on from what the doubted generation has left."""
    job = Job(exact=True)
    job.run(range(1, 26))
    assert [alarm.stance for alarm in job.run(range(21, 36), factor=1.5)] == [Stance.ACT]
    assert job.run(range(31, 41)) == []
    [alarm] = job.run(range(31, 41))
    assert (alarm.stance, settled(alarm)) == (Stance.NOTIFY, (3, 2))


def test_a_generation_that_proves_right_is_doubted_no_more() -> None:
    job = Job(exact=True)
    job.run(range(1, 26))
    job.run(range(21, 36), factor=1.5)
    [alarm] = job.run(range(21, 30), factor=1.5)
    assert settled(alarm) == (2, 1)
    [alarm] = job.run(range(31, 36))
    assert alarm.stance is Stance.ACT
