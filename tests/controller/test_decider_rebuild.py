"""A decider from its journal: what another version words or times differently is no reason to refuse it."""

from pathlib import Path

import msgspec
import pytest

from holdfast.controller.decider_rebuild import RebuildError, rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.action import Acquire, Action, Finish, Say
from holdfast.model.decider_events import Begin, Event, Order
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Decision, Entry

EVENTS: tuple[Event, ...] = (
    Begin(job=Job(run_id="r", min_nodes=2, max_nodes=2), limits=Limits()),
    Order(verb="stop", who="ann"),
)


def written() -> list[Decision]:
    decider = Decider()
    return [decider.step(float(at), event) for at, event in enumerate(EVENTS, 1)]


def rebuilt(folder: Path, decisions: list[Decision]) -> int:
    """How many entries of a journal with these decisions a decider of this version is led through."""
    journal = SqliteJournal(folder / "journal.db")
    try:
        for seq, (event, decision) in enumerate(zip(EVENTS, decisions, strict=True), 1):
            journal.append(Entry(seq=seq, at=float(seq), event=event, decision=decision), durable=True)
        return len(list(rebuild_decider(journal, Decider())))
    finally:
        journal.close()


def reworded(action: Action) -> Action:
    match action:
        case Finish():
            return msgspec.structs.replace(action, reason="in other words", grace_s=99.0, last_s=0.0)
        case _:
            return action


def test_its_own_journal(tmp_path: Path) -> None:
    found = written()
    assert [type(action) for decision in found for action in decision.actions] == [Acquire, Finish]
    assert rebuilt(tmp_path, found) == 2


def test_other_words_and_times(tmp_path: Path) -> None:
    old = [
        msgspec.structs.replace(
            decision,
            actions=(Say(text="what is no longer said"), *map(reworded, decision.actions)),
            reason="in other words",
            wake_at=7.0,
        )
        for decision in written()
    ]
    assert rebuilt(tmp_path, old) == 2


@pytest.mark.parametrize(
    "other",
    [(), (Acquire(id=1, count=3),), (Acquire(id=2, count=2),), (Acquire(id=1, count=2), Acquire(id=2, count=2))],
)
def test_other_actions_are_refused(tmp_path: Path, other: tuple[Action, ...]) -> None:
    first, second = written()
    with pytest.raises(RebuildError) as refused:
        rebuilt(tmp_path, [msgspec.structs.replace(first, actions=other), second])
    assert refused.value.seq == 1


def test_another_exit_code_is_refused(tmp_path: Path) -> None:
    first, second = written()
    [finish] = second.actions
    other = msgspec.structs.replace(second, actions=(msgspec.structs.replace(finish, code=7),))
    with pytest.raises(RebuildError) as refused:
        rebuilt(tmp_path, [first, other])
    assert refused.value.seq == 2
