"""What a job waits for and its open incident are told from the journal alone, at every moment of it."""

import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.incident.incident_text import describe_phases, phases_s
from holdfast.core.record.job_account import HOLDS, TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.core.record.lost_time_bill import draw_bill
from holdfast.core.record.open_trouble import Standing
from tests.core.test_ledger import account, entries

CRASH = 'alarm crash a rank 0 code 1 said "TypeError: x"'
CAUSE = "rank 0 on a exited with code 1 (TypeError: x)"
AGAIN = "the script failed the same way again without progress"
AGAIN += "; mend the script, then holdfast update and holdfast approve (docs/RUNBOOK.md, crash)"
ASKS = (
    *("0 begin nnodes 1 join limits ask_s=600", "1 ready a", "1.2 outcome 1 ok", "2 progress 10", f"3 {CRASH}"),
    *("3.1 outcome 2 ok", "3.2 outcome 3 ok", "4 progress 10", f"5 {CRASH}", "5.1 outcome 4 ok"),
)
TWO = ("0 begin nnodes 2 join", "1 ready a", "1 ready b", "1.2 outcome 1 ok", "2 progress 10", "3 alarm silence b")


def standing(*lines: str) -> Standing:
    return account(*lines).standing


def test_a_job_that_asks() -> None:
    stopping, asks = standing(*ASKS[:-1]), standing(*ASKS)
    assert not stopping.asking and stopping.incident and (stopping.incident.number, stopping.incident.why) == (2, "")
    assert (asks.asking, asks.held) == (f"{CAUSE}; {AGAIN}", "")
    assert asks.incident and (asks.incident.number, asks.incident.alarm_at) == (2, 5.0)
    assert (asks.incident.cause, asks.incident.why) == (f"{CAUSE} at step 10", f"{AGAIN}: a person is asked")
    approved = (*ASKS, "10 order approve by ann")
    assert not standing(*approved).asking and standing(*approved).incident, "until it makes a step"
    again = standing(*approved, "11 outcome 5 ok", f"12 {CRASH}").incident
    assert again and (again.number, again.failures) == (2, 2)
    assert standing(*approved, "11 outcome 5 ok", "12 progress 10") == Standing()
    assert standing(*ASKS, "605.1 tick") == Standing(), "the job ends"


def test_a_job_that_is_held_amid_an_incident() -> None:
    held = standing(*ASKS[:5], "3.05 order hold by ann", "3.1 outcome 2 ok")
    assert (held.asking, held.held) == ("", "ann") and held.incident and held.incident.number == 1
    assert held.incident.why.endswith("; held by ann")
    assert not standing(*ASKS[:5], "3.05 order hold by ann", "3.1 outcome 2 ok", "4 order resume by ann").held


def test_a_job_that_waits_for_a_node() -> None:
    waits = standing(*TWO, "3.1 outcome 2 ok")
    assert waits.incident and (waits.incident.number, waits.asking, waits.held) == (1, "", "")
    assert waits.waits and waits.incident.why == waits.waits
    assert not standing(*TWO, "3.1 outcome 2 ok", "9 ready b").waits


def test_the_controller_tells_the_same() -> None:
    for lines in (ASKS, ASKS[:-1], (*TWO, "3.1 outcome 2 ok")):
        decider = Decider()
        for entry in entries(*lines):
            decider.step(entry.at, entry.event)
        told = standing(*lines).incident
        assert told and (decider.view.open_incident, decider.view.open_cause) == (told.number, told.cause)
        assert decider.view.question == standing(*lines).asking


def uses(*lines: str) -> dict[tuple[str, int], float]:
    """The seconds of standing by use and incident."""
    found = account(*lines).spans
    stood = (TimeUse.ASK, TimeUse.HOLD, TimeUse.WAIT)
    return {(span.use.value, span.incident): round(span.seconds, 3) for span in found if span.use in stood}


def test_an_answer_is_waited_for_at_the_cost_of_the_failure() -> None:
    lines = (*ASKS, "65.1 order approve by ann", "66 outcome 5 ok", "67 progress 10")
    *_, record = account(*lines).incidents
    assert record.asked_s == pytest.approx(60.0) and record.held_s == 0.0
    assert phases_s(record)["ask"] == pytest.approx(60.0) and "wait" not in phases_s(record)
    assert uses(*lines) == {("wait", 0): 1.0, ("ask", 2): 60.0}
    again = (*lines[:-1], f"67 {CRASH}", "67.1 outcome 6 ok", "68 outcome 7 ok", "70 progress 10")
    *_, record = account(*again).incidents
    assert record.failures == 2 and phases_s(record)["ask"] == pytest.approx(60.0)


def test_a_hold_amid_an_incident_is_no_cost_of_the_failure() -> None:
    holds = ("3.05 order hold by ann", "3.1 outcome 2 ok", "21.1 order resume by ann", "21.2 outcome 3 ok")
    lines = (*ASKS[:5], *holds, "22 progress 10")
    found = account(*lines)
    [record] = found.incidents
    assert record.asked_s == 0.0 and record.held_s == pytest.approx(18.0)
    assert uses(*lines) == {("wait", 0): 1.0, ("hold", 0): 18.0}
    assert found.mttr_s == pytest.approx(record.resumed_at - record.good_at - 18.0)
    assert found.lost_s()[HOLDS] == pytest.approx(18.0)
    [cost] = report_of(found).restarts
    assert sum(cost.phases_s.values()) - cost.phases_s["hold"] == pytest.approx(cost.lost_s)
    bill = draw_bill(report_of(found))
    assert bill.causes[HOLDS] == 18.0 and TimeUse.HOLD not in bill.incidents[1]
    said = describe_phases(record)
    assert f", held for 18.0 s, lost 1 step and {cost.lost_s:.1f} s ({said})" in record.sentence and "hold" not in said
