"""A job that stands until a person says how it goes on: it asks whether to go on, or somebody holds it."""

from holdfast.core.decide.job_state import JobState
from holdfast.core.incident import incident_text
from holdfast.model.action import Say
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_phase import Phase


def stand_still(state: JobState, now: float) -> None:
    """Launch no rank until a person says so."""
    if state.incident is not None:
        state.incident.stood_at = now
    state.enter(Phase.HELD)


def advise_person(alarm: Alarm, reason: str) -> str:
    """Return where an incident's first cause lies, as far as that is known, and what a person can do before the
    answer. `reason` is the verdict's."""
    place = alarm.signature.split(" ", 2)[2] if alarm.kind is Kind.CRASH and alarm.signature.count(" ") > 1 else ""
    where = f"; it was raised at {place}" if ":" in place else ""
    is_code = alarm.group == "script" and "the script" in reason
    mend = "; mend the script, then holdfast update and holdfast approve" if is_code else ""
    return f"{where}{mend} (docs/RUNBOOK.md, {alarm.kind})"


def ask_person(state: JobState, now: float, question: str) -> str:
    until = now + state.limits.ask_s
    state.requests.ask_question(question, until)
    wait = incident_text.describe_wait(state.limits.ask_s)
    state.emit(Say(text=f"waiting up to {wait} for holdfast approve: {question}", until=until))
    state.next_move = f"{incident_text.ASKS}{question}"
    return state.next_move
