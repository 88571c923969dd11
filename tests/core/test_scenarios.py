"""Every scenario reads today as it was written down, and its journal replays to the same decisions."""

import os

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import fold_entries
from holdfast.model.event import Entry
from holdfast.sim.invariants import InvariantWatch
from tests.core.transcript import Scenario, names


@pytest.mark.parametrize("name", names())
def test_scenario(name: str) -> None:
    scenario = Scenario(name)
    today = scenario.play()
    if os.environ.get("PYTEST_HOLDFAST_REWRITE"):
        scenario.path.write_text(today, encoding="utf-8")
    assert today == scenario.path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", names())
def test_its_journal_replays(name: str) -> None:
    scenario = Scenario(name)
    scenario.play()
    journal = msgspec.json.encode(scenario.entries)
    decider = Decider()
    entries = msgspec.json.decode(journal, type=list[Entry])
    again = [msgspec.structs.replace(e, decision=decider.step(e.at, e.event)) for e in entries]
    assert msgspec.json.encode(again) == journal


@pytest.mark.parametrize("name", names())
def test_it_is_safe(name: str) -> None:
    scenario = Scenario(name)
    scenario.play()
    decider, watch = Decider(), InvariantWatch()
    for entry in scenario.entries:
        decider.step(entry.at, entry.event)
        watch.check_entry(entry, decider.view)
    fold_entries(scenario.entries)  # asserts that the spans tile


def test_there_are_scenarios() -> None:
    assert len(names()) > 20
