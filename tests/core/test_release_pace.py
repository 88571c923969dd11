"""Pace and MFU of releases; the numbers here were worked out by hand."""

import pytest

from holdfast.core.record.release_pace import ReleasePace, ReleasePaces, describe_paces
from holdfast.model.action import Action, Launch
from holdfast.model.code_release import Release
from holdfast.model.decider_events import WARM_STEPS, Begin, Event, Progress, SlowTime, Successor, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Dims, Job, Seat
from holdfast.model.journal_entry import Decision, Entry


class Journal:
    """Generations whose steps take a given time, told as the controller tells them."""

    def __init__(self, mesh: Dims = ()) -> None:
        self.paces = ReleasePaces()
        self.now, self._generation, self._seq = 0.0, 0, 0
        job = Job(run_id="r", min_nodes=1, max_nodes=1, mesh=mesh)
        self._add(Begin(job=job, limits=Limits(), release=Release(number=1)))

    def _add(self, event: Event, *actions: Action, stood_since: float | None = None) -> None:
        self._seq += 1
        decision = Decision(actions=actions, stood_since=stood_since)
        self.paces.add(Entry(seq=self._seq, at=self.now, event=event, decision=decision))

    def launch(self, release: int, ranks: int = 8) -> None:
        self._generation += 1
        seats = (Seat(node="n0", group_rank=0, first_rank=0, nproc=ranks),)
        launch = Launch(id=self._seq, generation=self._generation, seats=seats, release=Release(number=release))
        self._add(Tick(), launch)

    def succeed(self) -> None:
        self._add(Successor(epoch=2))

    def train(self, step_s: float, steps: int = 20, first: int = 1, warm_s: float = 30.0, **a_step: float) -> None:
        """Make the first steps, which take `warm_s`, and then steady ones; `a_step` is what each takes of work."""
        began_at = self.now
        for made in (1, 1 + WARM_STEPS, 1 + WARM_STEPS + steps // 2, 1 + WARM_STEPS + steps):
            self.now = began_at + warm_s + max(0, made - 1 - WARM_STEPS) * step_s
            self.tell(first, first + made - 1, **{name: amount * made for name, amount in a_step.items()})

    def tell(self, first: int, step: int, stood_since: float | None = None, **sums: float) -> None:
        progress = Progress(
            generation=self._generation,
            step=step,
            at=self.now,
            first_step=first,
            first_at=0.0,
            counted=False,
            tokens=sums.get("tokens", 0.0),
            flops=sums.get("flops", 0.0),
            parameters=1000 if "parameters" in sums else 0,
            peak_flops=1e15 if "peak_flops" in sums else 0.0,
        )
        self._add(progress, stood_since=stood_since)


def test_first_steps_are_no_measure() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5, warm_s=300.0)
    [pace] = journal.paces.list_paces()
    assert (pace.release, pace.ranks, pace.steps, pace.seconds) == pytest.approx((1, 8, 20, 10.0))
    assert pace.steps_s == pytest.approx(2.0)
    assert (pace.tokens_s, pace.flops_s, pace.mfu) == (None, None, None), "what nobody told is not known"


def test_slow_steps_are_none_of_steady_training() -> None:
    """That they were slow is known only after some of them."""
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5)  # of its 20 steady steps 10 are told at 35 s and 10 at 40 s
    journal._add(SlowTime(generation=1, since=36.0, until=38.0, cost_s=1.0))
    [pace] = journal.paces.list_paces()
    assert (pace.steps, pace.seconds) == (10, 5.0)
    journal._add(SlowTime(generation=1, since=36.0, until=39.0, cost_s=1.5))
    journal.now += 5000.0
    journal.tell(1, 9000)
    journal.now += 5000.0
    journal.tell(1, 19000)
    [pace] = journal.paces.list_paces()
    assert (pace.steps, pace.seconds) == (10 + 18969, 10005.0), "nor are they long after"


def test_generations_of_a_release_add_up_and_the_time_between_does_not_count() -> None:
    journal = Journal()
    for _ in range(2):
        journal.launch(1)
        journal.train(step_s=0.5)
        journal.now += 1000.0
    [pace] = journal.paces.list_paces()
    assert (pace.steps, pace.seconds) == pytest.approx((40, 20.0))


def test_a_release_that_is_faster() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.56, tokens=1000.0)
    journal.launch(2)
    journal.train(step_s=1.0, tokens=2000.0)  # larger batches: fewer steps, and more tokens
    old, new = journal.paces.list_paces()
    assert (old.tokens_s, new.tokens_s) == pytest.approx((1000 / 0.56, 2000.0))
    assert describe_paces((old, new))[-1] == "release 2 is 1.12 times as fast as release 1, by tokens/s"


def test_told_flops_give_mfu() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5, flops=2e14, peak_flops=1.0)
    [pace] = journal.paces.list_paces()
    assert (pace.flops_s, pace.mfu, pace.estimated) == pytest.approx((4e14, 0.4, False))
    assert "MFU 40.0 %" in describe_paces((pace,))[0]


def test_flops_are_estimated_from_parameters_and_tokens_and_that_is_said() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5, tokens=1e10, parameters=1.0, peak_flops=1.0)  # a thousand parameters
    [pace] = journal.paces.list_paces()
    assert pace.flops_s == pytest.approx(6 * 1000 * 1e10 / 0.5)
    assert pace.estimated and pace.mfu == pytest.approx(6 * 1000 * 1e10 / 0.5 / 1e15)
    assert "estimated" in describe_paces((pace,))[0]


def test_of_a_model_that_ranks_divide_nothing_is_estimated() -> None:
    journal = Journal(mesh=(("pp", 2), ("dp", 4)))
    journal.launch(1)
    journal.train(step_s=0.5, tokens=1e10, parameters=1.0, peak_flops=1.0)
    [pace] = journal.paces.list_paces()
    assert (pace.tokens_s, pace.flops_s, pace.mfu) == pytest.approx((2e10, None, None))


def test_without_a_peak_there_is_no_mfu_and_it_is_said_how_to_have_one() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5, flops=2e14)
    [pace] = journal.paces.list_paces()
    assert (pace.flops_s, pace.mfu) == pytest.approx((4e14, None))
    assert "pace.peak_flops" in describe_paces((pace,))[0]


def test_a_stretch_in_which_the_job_stood_does_not_count() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5)
    journal.now += 600.0
    journal.tell(1, 40, stood_since=journal.now - 590.0)
    journal.now += 5.0
    journal.tell(1, 50)
    [pace] = journal.paces.list_paces()
    assert (pace.steps, pace.seconds) == pytest.approx((30, 15.0))


def test_time_without_a_controller_does_not_count() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5)
    journal.now += 600.0  # nobody knows whether ranks stood meanwhile
    journal.succeed()
    journal.tell(1, 40)
    journal.now += 5.0
    journal.tell(1, 50)
    [pace] = journal.paces.list_paces()
    assert (pace.steps, pace.seconds) == pytest.approx((30, 15.0))


def test_fewer_ranks_are_kept_apart_and_not_compared() -> None:
    journal = Journal()
    journal.launch(1, ranks=8)
    journal.train(step_s=0.5, steps=40)
    journal.launch(1, ranks=6)
    journal.train(step_s=0.7, steps=20)
    [pace] = journal.paces.list_paces()
    assert (pace.ranks, pace.steps_s) == pytest.approx((8, 2.0)), "the number that it trained on longest"
    journal.launch(2, ranks=6)
    journal.train(step_s=0.7, steps=20)
    assert describe_paces(journal.paces.list_paces())[-1] == "releases 1 and 2 are not compared: 8 and 6 ranks"


def test_few_steps_are_not_compared() -> None:
    old = ReleasePace(release=1, ranks=1, steps=100, seconds=10.0)
    new = ReleasePace(release=2, ranks=1, steps=19, seconds=1.0)
    assert len(describe_paces((old, new))) == 2
    assert len(describe_paces(())) == 0


def test_steps_that_are_renumbered_are_no_stretch() -> None:
    journal = Journal()
    journal.launch(1)
    journal.train(step_s=0.5)
    journal.now += 1.0
    journal.tell(1, 12)  # less than before: the script now tells its own numbers
    [pace] = journal.paces.list_paces()
    assert pace.steps == 20


def test_one_steady_step_is_one() -> None:
    pace = ReleasePace(release=1, ranks=1, steps=1, seconds=0.5)
    assert describe_paces((pace,)) == ("release 1 makes 2 steps/s, measured over 1 steady step on 1 rank",)
