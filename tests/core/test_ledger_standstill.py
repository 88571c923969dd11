"""A job that stands does not train, whoever is named for it: in the account of a live job and afterwards."""

import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.ledger import fold_entries
from holdfast.model.action import Say
from holdfast.model.decider_events import Event, Order, Outcome, Progress
from holdfast.model.detector_alarm import NO_STEP, Alarm, Kind, Stance
from holdfast.model.journal_entry import Entry
from tests.core.test_ledger import START, account, spans
from tests.core.transcript import parse


def entries(*heard: tuple[float, Event]) -> list[Entry]:
    """A job that has made step 16 at 20, and what it hears afterwards, as a journal."""
    decider = Decider()
    journal: list[Entry] = []
    for line in (*START, "20 progress 16 at 20"):
        at, text = line.split(" ", 1)
        event = parse(text, float(at), decider.view.generation)
        journal.append(Entry(seq=len(journal) + 1, at=float(at), event=event, decision=decider.step(float(at), event)))
    for heard_at, event in heard:
        decision = decider.step(heard_at, event)
        journal.append(Entry(seq=len(journal) + 1, at=heard_at, event=event, decision=decision))
    return journal


def stands(since: float, stance: Stance) -> Alarm:
    why = "no step for 12 s at step 16: all 2 ranks are in load (train.py)"
    return Alarm(
        kind=Kind.HANG,
        at=since,
        suspects=(),
        reason=why,
        signature=NO_STEP,
        stance=stance,
        generation=1,
    )


@pytest.mark.parametrize("stance", [Stance.OBSERVE, Stance.NOTIFY])
def test_a_stand_for_which_nobody_is_named_is_no_training(stance: Stance) -> None:
    """Neither in the account of a job that still stands, nor when it has gone on."""
    told = entries((25.0, stands(20.0, stance)))
    assert spans(fold_entries(told, 60.0))[-2:] == [("train", 5, 20, 0), ("stall", 20, 60, 0)]
    assert fold_entries(told, 60.0).ettr == pytest.approx(15 / 60)
    went = Progress(generation=1, step=17, at=440.0, first_step=1, first_at=5.0, counted=False)
    told = entries((25.0, stands(20.0, stance)), (440.5, went))
    found = fold_entries(told, 450.0)
    assert spans(found)[-3:] == [("train", 5, 20, 0), ("stall", 20, 440, 0), ("train", 440, 450, 0)]
    place = "all 2 ranks are in load (train.py)"
    assert [span.place for span in found.spans if span.use is TimeUse.STALL] == [place]
    said = [action.text for entry in told for action in entry.decision.actions if isinstance(action, Say)]
    expected = [stands(20.0, stance).reason, "the job went on after 420 s at step 16"]
    assert said[-2:] == expected if stance is Stance.NOTIFY else not set(said) & set(expected)


def test_a_stand_that_is_named_does_not_count_as_training_while_it_lasts() -> None:
    """Nor while the ranks are stopped for it, though nobody has closed the incident yet."""
    named = ("20 progress 16 at 20", "24 alarm hang n1 since 20 stance notify said standing")
    assert account(*START, *named, now=33.0).ettr == pytest.approx(15 / 33)
    acted = (*named, "34 alarm hang n0 since 20 said standing")
    found = account(*START, *acted, now=36.0)
    assert spans(found)[-3:] == [("train", 5, 20, 0), ("detect", 20, 34, 1), ("stop", 34, 36, 1)]
    back = account(*START, *acted, "36 outcome 3 ok", "38 outcome 4 ok", "41 progress 17 at 40", now=42.0)
    assert spans(back)[3:5] == spans(found)[3:5]


def test_a_stand_that_a_person_ends_stays_a_stall() -> None:
    stop = Order(verb="stop", who="a person")
    told = entries((25.0, stands(20.0, Stance.OBSERVE)), (60.0, stop), (61.0, Outcome(action=3, ok=True)))
    found = fold_entries(told)
    assert spans(found)[-3:] == [("train", 5, 20, 0), ("stall", 20, 60, 0), ("stop", 60, 61, 0)]
    assert found.ettr == pytest.approx(15 / 61)
    assert found.spans[-2].place == "all 2 ranks are in load (train.py)"


def test_what_ranks_did_before_one_ended_is_no_detection_of_its_end() -> None:
    """An evaluation of ten seconds after step 16, and a rank that is killed after it."""
    killed = ("20 progress 16 at 20 from 1 since 5", "30.5 alarm crash n0 rank 0 code -9 since 30")
    found = account(*START, *killed, "31 outcome 3 ok", "32 outcome 4 ok", "34 progress 17 at 33", now=40.0)
    assert spans(found)[3:6] == [("train", 5, 20, 0), ("stall", 20, 30, 1), ("detect", 30, 30.5, 1)]
    assert found.mttr_s == pytest.approx(3.0)
    lost = "lost 0 steps and 3.0 s (detect 0.5, stop 0.5, launch 1.0, first step 1.0), after 10.0 s without a step"
    assert found.incidents[0].sentence.endswith(lost)


def test_a_step_that_was_under_way_is_lost_with_the_rank() -> None:
    killed = ("20 progress 16 at 20 from 1 since 5", "22.5 alarm crash n0 rank 0 code -9 since 22")
    found = account(*START, *killed, "23 outcome 3 ok", "24 outcome 4 ok", "26 progress 17 at 25", now=40.0)
    assert spans(found)[3:5] == [("train", 5, 20, 0), ("detect", 20, 22.5, 1)]


def test_steps_that_one_rank_made_beyond_the_others_are_no_detection_either() -> None:
    journal = entries(
        (30.0, Progress(generation=1, step=16, at=20.0, first_step=1, first_at=5.0, counted=False, last_at=29.0)),
        (30.5, parse("alarm crash n0 rank 0 code -9 since 30", 30.5, 1)),
        (31.0, Outcome(action=3, ok=True)),
        (32.0, Outcome(action=4, ok=True)),
        (34.0, Progress(generation=2, step=17, at=33.0, first_step=17, first_at=33.0, counted=False)),
    )
    assert spans(fold_entries(journal))[3:5] == [("train", 5, 29, 0), ("detect", 29, 30.5, 1)]
