"""What a job that asks a person says of the place of the failure, whose fault it is, and what to do."""

from holdfast.core.decide.waiting_for_people import advise_person
from holdfast.model.detector_alarm import Alarm, Kind
from tests.core.detect.test_crash import TRACEBACK, ended
from tests.core.transcript import Scenario


def test_the_question_names_the_place_the_order_of_work_and_the_runbook() -> None:
    again = "the script failed the same way again without progress"
    assert advise_person(ended(1, *TRACEBACK), again) == (
        "; it was raised at model.py:12; mend the script, then holdfast update and holdfast approve "
        "(docs/RUNBOOK.md, crash)"
    )
    assert advise_person(ended(-9), again) == " (docs/RUNBOOK.md, crash)"
    lost = Alarm(kind=Kind.HEALTH, at=5.0, suspects=("n1",), reason="has lost GPU 3", signature="gpu lost: GPU 3")
    assert advise_person(lost, "same failure again") == " (docs/RUNBOOK.md, health)"


def test_a_job_that_asks_says_so() -> None:
    scenario = Scenario("a_person_is_asked")
    scenario.play()
    told = (entry.decision.reason for entry in scenario.entries)
    asked = [reason for reason in told if "waiting for holdfast approve" in reason]
    assert asked and all(text.endswith("(docs/RUNBOOK.md, crash)") for text in asked)
