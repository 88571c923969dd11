"""Interruptions are counted by what ended them: of whole transcripts, as the report counts them."""

import pytest

from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.solving_rungs import count_rungs, describe_rungs
from tests.core.transcript import Scenario


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("probes_find_a_node", {"restart in place": 1, "eviction after probes": 1}),
        ("slow_node_is_replaced", {"eviction for a hang or slowness": 1}),
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


def test_in_words() -> None:
    assert describe_rungs({"restart in place": 3, "rollback": 1}) == (
        "ended by: restart in place 3 (75 %), rollback 1 (25 %)"
    )
    assert describe_rungs(count_rungs(())) == ""
