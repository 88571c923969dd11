"""Interruptions are counted by what ended them: of whole transcripts, as the report counts them."""

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.solving_rungs import Rung, count_rungs, describe_rungs, rung_of
from tests.core.transcript import Scenario, parse


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("probes_find_a_node", {"restart in place": 1, "eviction after probes": 1}),
        ("slow_node_is_replaced", {"eviction for a hang or slowness": 1}),
        ("same_crash_same_node", {"restart in place": 1, "eviction without proof": 1}),
        ("mixed_restart_goes_back_first", {"eviction on proof": 1, "rollback": 1}),
        ("bad_batch_is_left_out", {"restart in place": 1, "batches left out": 1}),
        ("bad_release_is_rolled_back", {"rollback": 1, "update": 1}),
        ("update_rides_on_a_crash", {"restart in place": 1}),
        ("update_rides_on_an_eviction", {"update": 1}),
        ("evict_by_order", {"a person's order": 1}),
        ("user_code_again", {"none: left to a person": 1, "restart in place": 1}),
    ],
)
def test_what_ended_it(name: str, ended: dict[str, int]) -> None:
    scenario = Scenario(name)
    scenario.play()
    assert report_of(fold_entries(scenario.entries)).rungs == ended


BEGUN = (
    "begin nnodes 2 standbys 2 join",
    "ready a",
    "ready b",
    "ready c",
    "ready d",
    "outcome 1 ok",
    "progress 1 backed",
)
CRASH, HANG = "alarm crash a rank 0 code -11", "alarm hang b rank 2 hard said is stopped"


@pytest.mark.parametrize(
    ("lines", "rung"),
    [
        (("alarm silence b", "outcome 2 ok", "outcome 3 ok", CRASH, "outcome 4 ok", "outcome 5 ok"), Rung.RESTART),
        ((CRASH, "outcome 2 ok", "outcome 3 ok", HANG, "outcome 4 ok", "outcome 6 ok"), Rung.HANG),
        ((HANG, "outcome 2 ok", "outcome 4 ok", "alarm silence a", "outcome 5 ok", "outcome 6 ok"), Rung.EVICTION),
        ((CRASH, "order evict node b by ann", "outcome 2 ok", "outcome 4 ok"), Rung.RESTART),
        (
            (CRASH, "order hold by ann", "outcome 2 ok", "alarm silence b", "order resume", "outcome 3 ok"),
            Rung.EVICTION,
        ),
    ],
)
def test_of_several_the_last_counts(lines: tuple[str, ...], rung: Rung) -> None:
    decider, closed = Decider(), []
    for at, line in enumerate((*BEGUN, *lines, "progress 2")):
        decision = decider.step(at, parse(line, at, decider.view.generation))
        closed += [decision.closed] if decision.closed else []
    assert [rung_of(record) for record in closed] == [rung], closed


def test_a_hold_is_ended_by_the_order_to_go_on() -> None:
    decider, changed = Decider(), []
    held = ("order hold by ann", "outcome 2 ok", "order resume", "outcome 3 ok")
    for at, line in enumerate((*BEGUN, *held, "progress 2")):
        decision = decider.step(at, parse(line, at, decider.view.generation))
        changed += [decision.changed] if decision.changed else []
    [hold] = changed
    grown = msgspec.structs.replace(hold, why="2 more nodes are there")
    assert count_rungs((), (hold, grown, hold)) == {"a person's order": 2, "more nodes": 1}


def test_in_words() -> None:
    assert describe_rungs({"restart in place": 3, "rollback": 1}) == (
        "ended by: restart in place 3 (75 %), rollback 1 (25 %)"
    )
    assert describe_rungs(count_rungs(())) == ""
