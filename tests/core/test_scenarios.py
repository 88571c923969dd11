"""Every scenario reads today as it was written down, and its journal replays to the same decisions."""

import os
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.incident.incident_text import SHOWN_S, phases_s
from holdfast.core.record.job_account import UNSETTLED, TimeUse
from holdfast.core.record.ledger import Ledger, fold_entries
from holdfast.model.incident_record import Change, Record
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim.invariants import InvariantWatch
from tests.core.transcript import Scenario, names


@cache
def played(name: str) -> tuple[Scenario, str]:
    """A scenario that was played, and how it reads today; nobody below changes what it holds."""
    scenario = Scenario(name)
    return scenario, scenario.play()


@pytest.mark.parametrize("name", names())
def test_scenario(name: str) -> None:
    scenario, today = played(name)
    if os.environ.get("PYTEST_HOLDFAST_REWRITE"):
        scenario.path.write_text(today, encoding="utf-8")
    assert today == scenario.path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", names())
def test_its_journal_replays(name: str) -> None:
    scenario, _ = played(name)
    journal = msgspec.json.encode(scenario.entries)
    decider = Decider()
    entries = msgspec.json.decode(journal, type=list[Entry])
    again = [msgspec.structs.replace(e, decision=decider.step(e.at, e.event)) for e in entries]
    assert msgspec.json.encode(again) == journal


@pytest.mark.parametrize("name", names())
def test_it_is_safe(name: str) -> None:
    scenario, _ = played(name)
    decider, watch = Decider(), InvariantWatch()
    for entry in scenario.entries:
        decider.step(entry.at, entry.event)
        watch.check_entry(entry, decider.view)
    fold_entries(scenario.entries)  # asserts that the spans tile


@pytest.mark.parametrize("name", names())
def test_what_is_settled_stays(name: str) -> None:
    """Counters are made of it: no second of a use or a cause is ever taken back, and at the end all are there."""
    scenario, _ = played(name)
    ledger, before = Ledger(), dict[str, float]()
    for entry, after in pairwise([*scenario.entries, None]):
        assert entry is not None
        ledger.add(entry)
        for now in (entry.at, after.at if after else entry.at + 1000.0):
            settled, account = ledger.settle_account(now), ledger.make_account(now)
            found = {use: settled.spent_s(use) for use in TimeUse} | settled.lost_s()
            found.pop(UNSETTLED, None)
            fallen = {what: (before[what], found.get(what)) for what in before if found.get(what, 0) < before[what]}
            assert not fallen, (entry, now)
            assert sum(span.seconds for span in settled.spans) <= account.wall_s
            before = found
    if ledger.phase is Phase.DONE:
        assert ledger.settle_account(0.0) == ledger.make_account()


_PHASES = {"detect": TimeUse.DETECT, "probe": TimeUse.PROBE, "ask": TimeUse.ASK, "hold": TimeUse.HOLD}
_PHASES |= {"wait": TimeUse.WAIT, "launch": TimeUse.LAUNCH, "pause": TimeUse.PAUSE}
_PHASES |= {"silence": TimeUse.STOP, "stop": TimeUse.STOP}  # all others are phases of a start-up
_PLANNED = _PHASES | {"last step": TimeUse.PAUSE, "stop": TimeUse.PAUSE}


def seconds_by_use(record: Record | Change) -> dict[TimeUse, float]:
    """How the console divides the time of a recovery; a hold is a person's."""
    phases, told = _PHASES if isinstance(record, Record) else _PLANNED, dict[TimeUse, float]()
    for phase, seconds in phases_s(record).items():
        use = phases.get(phase, TimeUse.START_UP)
        told[use] = told.get(use, 0.0) + seconds
    return {use: seconds for use, seconds in told.items() if use is not TimeUse.HOLD}


@pytest.mark.parametrize("name", names())
def test_the_console_and_the_report_divide_the_time_of_a_recovery_alike(name: str) -> None:
    scenario, _ = played(name)
    account = fold_entries(scenario.entries)
    records: list[tuple[Record | Change, int, int]] = [(record, record.number, 0) for record in account.incidents]
    for record, incident, change in [*records, *((one, 0, n) for n, one in enumerate(account.changes, 1))]:
        told, spent = seconds_by_use(record), dict[TimeUse, float]()
        for span in account.spans:
            mine = (span.incident, span.change) == (incident, change)
            if mine and span.use not in (TimeUse.REDO, TimeUse.STALL):
                spent[span.use] = spent.get(span.use, 0.0) + span.seconds
        both = {use: (told.get(use, 0.0), spent.get(use, 0.0)) for use in {*told, *spent}}
        assert not {use: pair for use, pair in both.items() if abs(pair[0] - pair[1]) > SHOWN_S}, record.sentence


def test_there_are_scenarios() -> None:
    assert len(names()) > 20
