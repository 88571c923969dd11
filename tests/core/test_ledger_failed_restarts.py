"""What a planned restart has cost that an incident ended."""

from holdfast.core.incident.incident_text import lost_steps
from holdfast.core.record.job_account import START_AND_END
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.model.incident_record import Record, Remedy, Verdict
from holdfast.model.job_phase import Phase
from tests.core.test_ledger import NEW, Book
from tests.core.transcript import Scenario


def test_a_release_that_makes_no_step_has_a_row_of_its_own() -> None:
    """It is the update that cost the time until its failure, and the incident that cost what came after it."""
    scenario = Scenario("update_fails_at_once")
    scenario.play()
    found = fold_entries(scenario.entries)
    assert [(span.use.value, span.start_at, span.end_at, span.incident, span.change) for span in found.spans[4:]] == [
        ("pause", 31, 31.5, 0, 1),
        ("launch", 31.5, 32, 0, 1),
        ("start-up", 32, 32.5, 0, 1),
        ("detect", 32.5, 33, 1, 0),
        ("stop", 33, 34, 1, 0),
        ("launch", 34, 35, 1, 0),
        ("start-up", 35, 36, 1, 0),
        ("redo", 36, 39, 1, 0),
        ("train", 39, 46, 0, 0),
    ]
    change, record = found.changes[0], found.incidents[0]
    assert change.sentence == "release 2: ended by an incident before its first step, 1.5 s after step 44"
    assert (record.good_step, record.rolled_back, record.verdict.to, record.resumed_from) == (44, 2, 1, 40)
    assert (lost_steps(record), record.resumed_at - record.good_at) == (4, 3.5)
    assert (found.redone_steps(incident=1), found.redone_steps(change=1), found.at_most) == (4, 0, "")
    costs = {(cost.incident, round(cost.lost_s, 1)) for cost in report_of(found).restarts}
    assert costs == {(0, 1.5), (1, 3.5)}


def test_a_failure_amid_a_pause_has_its_time() -> None:
    """Its restart serves what was planned too, so that the pause is no row of its own."""
    book = Book().trains().add(26, Phase.PAUSING).add(27, Phase.STOPPING).launch(28, 2, NEW).add(29, Phase.STARTING)
    record = Record(
        number=1, generation=1, cause="x", kind="crash", klass="", verdict=Verdict(remedy=Remedy.RESTART, reason="x"),
        good_step=21, good_at=25.0, alarm_at=27.0, stopped_at=28.0, launched_at=29.0, resumed_at=30.0, resumed_from=21,
    )  # fmt: skip
    book.add(30, Phase.TRAINING, book.step(30, 22, 2, 22, 30.0), closed=record)
    found = fold_entries(book.entries, 40.0)
    assert found.lost_s() == {START_AND_END: 5.0, "crash": 5.0}
