"""Numbers that are none: whatever a script tells, the journal has it, and its replay decides the same."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.journal.entry_chain import make_row
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Begin, Event, Progress
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Decision, Entry
from tests.model.test_model import EVENTS

AT = st.floats(allow_nan=False).map(lambda at: at + 0.0)  # which is no -0.0


def floats_in(value: Any, found: st.DataObject) -> Any:
    """The same, with every float in it replaced by any."""
    if isinstance(value, float):
        return found.draw(st.floats())
    if isinstance(value, msgspec.Struct):
        changed = {f: floats_in(getattr(value, f), found) for f in value.__struct_fields__}
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, tuple):
        return tuple(floats_in(one, found) for one in value)
    return value


def same(one: object, other: object) -> bool:
    """To the bit."""
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


@settings(max_examples=200)
@given(st.sampled_from(EVENTS), st.data(), AT)
def test_any_event_with_any_floats_comes_back(event: Event, found: st.DataObject, at: float) -> None:
    event = floats_in(event, found)
    entry = Entry(seq=1, at=at, event=event, decision=Decision(wake_at=found.draw(st.floats())))
    assert same(make_row(entry, 1, b"").entry, entry)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(EVENTS), st.data(), AT)
def test_also_through_the_file(tmp_path: Path, event: Event, found: st.DataObject, at: float) -> None:
    path = tmp_path / "journal.db"
    path.unlink(missing_ok=True)
    entry = Entry(seq=1, at=at, event=floats_in(event, found), decision=Decision())
    journal = SqliteJournal(path)
    journal.append(entry, durable=True)
    journal.close()
    reader = SqliteJournal(path, read_only=True)
    assert same(list(reader.read()), [entry])
    reader.close()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_decision_with_such_a_number_is_replayed(tmp_path: Path, number: float) -> None:
    journal, decider = SqliteJournal(tmp_path / "journal.db"), Decider()
    begin = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1), limits=Limits(wait_s=number))
    progress = Progress(generation=0, step=1, at=number, first_step=1, first_at=number, counted=True)
    events: tuple[Event, ...] = (begin, progress)
    for seq, event in enumerate(events, 1):
        journal.append(Entry(seq=seq, at=1.0, event=event, decision=decider.step(1.0, event)), durable=True)
    assert len(list(rebuild_decider(journal, Decider()))) == 2
    journal.close()
