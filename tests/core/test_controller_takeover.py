"""A controller takes over: its numbers are new, and what the journal has lost is told and gone on without."""

import pytest

from holdfast.core.decide.action_ids import EPOCH_IDS
from holdfast.core.decide.controller_takeover import lost_journal_sentence
from holdfast.core.decide.decider import Decider
from holdfast.model.action import Action, Finish, Launch, Say, Stop
from holdfast.model.decider_events import Begin, Lost, Outcome, Progress, Ready, Successor, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase

JOB = Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)


def training() -> Decider:
    decider = Decider()
    decider.step(0.0, Begin(job=JOB, limits=Limits()))
    for node in ("a", "b"):
        decider.step(1.0, Ready(node=node, host=node, nproc=1))
    decider.step(2.0, Outcome(action=decider.view.awaited, ok=True))
    decider.step(3.0, Progress(generation=1, step=5, at=3.0, first_step=1, first_at=2.5, counted=True))
    assert decider.view.phase is Phase.TRAINING
    return decider


def lost(**known: object) -> Lost:
    return Lost(**{"kept": 4, "of": 9, "generation": 1, "release": 1, "phase": Phase.TRAINING} | known)  # type: ignore[arg-type]


def of(kind: type[Action], actions: tuple[Action, ...]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: tuple[Action, ...]) -> str:
    [found] = [action.text for action in actions if isinstance(action, Say)]
    return found


def test_numbers_of_actions_are_new_with_every_controller() -> None:
    decider = training()
    decision = decider.step(4.0, Successor(epoch=2))
    assert (decision.actions, decision.phase) == ((), Phase.TRAINING)
    assert next(decider._state.ids) == 2 * EPOCH_IDS + 1
    decider.step(5.0, Successor(epoch=3))
    assert next(decider._state.nodes.standbys._ids) == 3 * EPOCH_IDS + 1, "all who number actions take from the same"
    decider.step(5.0, Successor(epoch=2))
    assert next(decider._state.ids) == 3 * EPOCH_IDS + 2, "they never fall"


@pytest.mark.parametrize("phase", [Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING])
def test_ranks_that_the_journal_knows_run_on(phase: Phase) -> None:
    decision = training().step(4.0, Successor(epoch=2, lost=lost(phase=phase)))
    assert decision.phase is Phase.TRAINING and len(decision.actions) == 1
    assert said(decision.actions).startswith(f"{lost_journal_sentence(lost(phase=phase))}; ")


@pytest.mark.parametrize("known", [{"generation": 4}, {"phase": Phase.STOPPING}, {"phase": Phase.HELD}])
def test_what_the_journal_does_not_know_is_ended_and_said(known: dict[str, object]) -> None:
    decider = training()
    decision = decider.step(4.0, Successor(epoch=2, lost=lost(**known)))
    newest = known.get("generation", 1)
    [stop] = of(Stop, decision.actions)
    assert isinstance(stop, Stop) and (stop.generation, stop.nodes, stop.id > 2 * EPOCH_IDS) == (
        newest,
        ("a", "b"),
        True,
    )
    assert f"generation {newest} " in said(decision.actions)
    decision = decider.step(5.0, Outcome(action=stop.id, ok=True))
    [launch] = of(Launch, decision.actions)
    assert isinstance(launch, Launch) and launch.generation == int(str(newest)) + 1, "above all that was"


def test_a_journal_that_begins_anew_numbers_above_what_was() -> None:
    decider = Decider()
    decider.step(0.0, Begin(job=JOB, limits=Limits()))
    decision = decider.step(0.0, Successor(epoch=5, lost=lost(kept=0, generation=7)))
    assert decision.phase is Phase.WAITING and not of(Stop, decision.actions)
    assert said(decision.actions).startswith(f"{lost_journal_sentence(lost(kept=0, generation=7))}; generation 7 ")
    decider.step(1.0, Ready(node="a", host="a", nproc=1))
    [launch] = of(Launch, decider.step(1.0, Ready(node="b", host="b", nproc=1)).actions)
    assert isinstance(launch, Launch) and (launch.generation, launch.id > 5 * EPOCH_IDS) == (8, True)


def test_a_job_that_was_ending_ends() -> None:
    decision = training().step(4.0, Successor(epoch=2, lost=lost(phase=Phase.ENDING)))
    [finish] = of(Finish, decision.actions)
    assert isinstance(finish, Finish) and finish.reason and decision.phase is Phase.ENDING


def test_code_that_was_newer_is_named() -> None:
    decision = training().step(4.0, Successor(epoch=2, lost=lost(release=3)))
    assert "release 3 ran" in said(decision.actions)


@pytest.mark.parametrize("phase", Phase)
def test_whatever_was_going_on_it_is_taken_over(phase: Phase) -> None:
    """In every phase that the journal may end in, with every phase that the mark may tell."""
    for generation in (1, 3):
        decider = training()
        if phase is Phase.NEW:
            continue
        decider.step(4.0, Successor(epoch=2, lost=lost(phase=phase, generation=generation)))
        again = decider.step(5.0, Successor(epoch=3, lost=lost(phase=phase, generation=generation)))
        assert again.phase in (Phase.TRAINING, Phase.STOPPING, Phase.ENDING)


def test_every_loss_has_its_sentence() -> None:
    told = [
        lost_journal_sentence(lost(kept=1234, of=1240)),
        lost_journal_sentence(lost(kept=4, of=9, damaged=True)),
        lost_journal_sentence(lost(kept=4, of=5, damaged=True)),
        lost_journal_sentence(lost(kept=12, of=0)),
    ]
    assert told == [
        "the journal lost its entries after 1,234 (of at least 1,240)",
        "the journal is damaged: entry 5, of at least 9, and what came after it are lost",
        "the journal is damaged: entry 5, and what came after it are lost",
        "the journal ends at entry 12, and the nodes know of more",
    ]


def begun_anew(*nodes: str) -> Decider:
    decider = Decider()
    decider.step(0.0, Begin(job=JOB, limits=Limits(), fence_s=100.0))
    decider.step(1.0, Successor(epoch=2, lost=lost(generation=7, nodes=nodes)))
    return decider


def test_nothing_is_launched_beside_ranks_that_may_live() -> None:
    decider = begun_anew("x", "y")
    for node in ("a", "b", "x"):
        assert not of(Launch, decider.step(2.0, Ready(node=node, host=node, nproc=1)).actions)
    [launch] = of(Launch, decider.step(3.0, Ready(node="y", host="y", nproc=1)).actions)
    assert isinstance(launch, Launch) and launch.generation == 8
    assert set(launch.astray) == {seat.node for seat in launch.seats} - {"x", "y"}, "others have no part in its line"


def test_where_nobody_knows_who_had_ranks_time_decides() -> None:
    decider = begun_anew()
    decider.step(2.0, Ready(node="a", host="a", nproc=1))
    decision = decider.step(2.0, Ready(node="b", host="b", nproc=1))
    assert (decision.phase, decision.wake_at) == (Phase.WAITING, 101.0)
    [launch] = of(Launch, decider.step(101.0, Tick()).actions)
    assert isinstance(launch, Launch) and launch.astray == ("a", "b"), "nor who has its state"


def test_a_standby_reports_anew_before_it_counts() -> None:
    decider = training()
    decider.step(4.0, Ready(node="c", host="c", nproc=1))
    assert "c" in decider.view.pool
    decider.step(5.0, Successor(epoch=2, lost=lost(generation=3, nodes=("a", "c"))))
    assert not decider.view.pool and "c" in decider.view.coming
