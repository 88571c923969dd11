"""Reads holdfast's own sentences in a saved console log: which lines belong to the last incident, and what it was."""

import re
from collections.abc import Sequence

import msgspec

from holdfast.core.diagnose.suspect_hang_timeout import ENDLESS
from holdfast.core.incident.incident_case import CODE
from holdfast.core.incident.incident_text import WENT_ON
from holdfast.core.incident.open_incident import DEPARTED, JOIN_HINT
from holdfast.core.log_analysis.action_choice import EVICT
from holdfast.core.log_analysis.failure_catalog import UNKNOWN
from holdfast.core.log_analysis.line_prefixes import LogLine
from holdfast.model.last_words_diagnosis import Diagnosis

_OPENED = re.compile(r"^holdfast: incident \d+[^:]*: (?!noted )")
_CLOSED = re.compile(r"^holdfast: .*; (?:restarted in place|evicted |gave up: |release \d+ was rolled back)")
_CAUSE = re.compile(  # ends before the step at which it happened, what came after it, and what was done
    r"^holdfast: (?:incident \d+[^:]*: )?(?P<cause>.*?)(?: at step \d+| before any step was seen| \d+ steps? after its "
    r"launch)?(?:, then failed .*?)?; (?:(?:stopp|tell)ing |restarted in place|evicted |gave up: |release \d+ was roll)"
)
_HUNG = re.compile(
    r"^ranks? (?P<ranks>[\d, andmore-]+?) on (?P<nodes>[\w., -]+?) (?:ha(?:s|ve) stood|keeps? the others waiting)\b"
)
_LOST = re.compile(
    r"^(?P<node>[\w.-]+)(?P<others>(?:, [\w.-]+| and \d+ more| and [\w.-]+)*) (?:ha(?:s|ve) been silent for |"
    r"(?:is gone|has lost its machine), says its fleet\b|(?:are gone|have lost their machines), says their fleet\b)"
)
_LEFT = re.compile(rf"^ranks? (?P<ranks>[\d, andmore-]+?) on (?P<nodes>[\w., -]+?) left .*{WENT_ON}$")
_STOOD = re.compile(
    r"^holdfast: (?:ranks? [\d, andmore-]+ on .* (?:ha(?:s|ve) stood|keeps? the others waiting)\b|no step for )"
)
_WENT_ON = re.compile(r"^holdfast: (?:ranks? [\d, andmore-]+|the job) went on after \d+ s\b")
_ENDED_WELL = re.compile(r"^holdfast: done: 0 incidents\b")
_STOPPED = re.compile(r"\b(?:is|are) stopped\b")
_AFTER_CAUSE = r"(?:[;,]| at step | before any step | \d+ steps? after )"
_RAISED = re.compile(
    rf"\brank (?P<rank>\d+) on (?P<node>[\w.-]+) exited with code \d+ \((?P<raised>.*?)\){_AFTER_CAUSE}"
)
_SHORTAGES = {"(sender unknown)": False, "(the kernel killed for want of memory)": True}
_PRESSED = re.compile(rf"\(probably the OOM killer: (?P<pressed>.*?)\){_AFTER_CAUSE}")
_CONTINUE = "A stopped process runs again after SIGCONT: ask who has sent it SIGSTOP, or attached a debugger to it."
_TRACEBACK = "Traceback (most recent call last)"


class ConsoleIncident(msgspec.Struct, frozen=True, kw_only=True):
    """The last incident of a console log, and whether holdfast saw a shortage of memory at the time."""

    lines: list[LogLine]
    starved: bool | None = None
    pressed: str = ""
    cause: str = ""  # in holdfast's words
    earlier: tuple[str, ...] = ()  # causes of the incidents before it
    went_on: bool = False  # ranks have made steps since


def drop_survived_stands(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return the lines without stalls that ended by themselves, and without all lines of runs that ended well."""
    ended: dict[int, int] = {}  # by source: the place up to which stands have ended
    well: dict[int, int] = {}
    for place, said in enumerate(lines):
        if _WENT_ON.search(said.text):
            ended[said.source] = place
        elif _ENDED_WELL.search(said.text):
            well[said.source] = place
    if not ended and not well:
        return list(lines)
    return [
        said
        for place, said in enumerate(lines)
        if place > well.get(said.source, -1)
        and not (place <= ended.get(said.source, -1) and (_STOOD.search(said.text) or _WENT_ON.search(said.text)))
    ]


def read_last_incident(lines: Sequence[LogLine]) -> ConsoleIncident | None:
    """Return the last incident in a console log; None if there is none. Training goes on after each incident of a run.
    So the last one has the lines between its end and the end of the incident before, and all lines of other logs."""
    told = [p for p, said in enumerate(lines) if _OPENED.search(said.text) or _CLOSED.search(said.text)]
    if not told:
        return None
    newest = lines[told[-1]]
    closed = [p for p in told if lines[p].source == newest.source and _CLOSED.search(lines[p].text)]
    is_closed = bool(closed) and closed[-1] == told[-1]
    after = closed.pop() + 1 if is_closed else len(lines)
    before = closed[-1] if closed else -1
    kept = [said for p, said in enumerate(lines) if said.source != newest.source or before < p < after]
    pressed = _PRESSED.search(newest.text)
    return ConsoleIncident(
        lines=[*kept, *_spoken_exception(kept, newest)],
        starved=next((starved for words, starved in _SHORTAGES.items() if words in newest.text), None),
        pressed=pressed["pressed"] if pressed else "",
        cause=_find_cause(newest),
        earlier=tuple(_find_cause(lines[p]) for p in closed),
        went_on=is_closed and "; gave up: " not in newest.text,
    )


def is_own_sentence(said: LogLine) -> bool:
    return said.text.startswith("holdfast: ")


def retell_incident(found: Diagnosis, told: ConsoleIncident) -> Diagnosis:
    """Return the diagnosis, extended by what the console log says: which rank hung, earlier incidents, and whether the
    job went on.

    Holdfast has inspected all ranks when it names a rank that hangs. Why that rank hangs stays unknown, unless the
    ranks are in a deadlock: only code can make one.
    """
    hung = _HUNG.search(told.cause) if found.klass == "process_hang" else None
    if hung:
        one = hung["ranks"].isdecimal()
        group, action = ("script", CODE) if ENDLESS in told.cause else ("unknown", "retry")
        found = msgspec.structs.replace(
            found,
            group=group,
            action=action,
            explanation=f"Holdfast said: {told.cause}.",
            root_rank=int(hung["ranks"]) if one else None,
            node=hung["nodes"] if one else "",
            hint=_CONTINUE if _STOPPED.search(told.cause) else found.hint,
        )
    elif found.klass == "node_failure" and (lost := _LOST.search(told.cause)):
        found = msgspec.structs.replace(
            found,
            action=EVICT,
            explanation=f"Holdfast said: {told.cause}.",
            node="" if lost["others"] else lost["node"],
        )
    elif found.klass == UNKNOWN and (left := _LEFT.search(told.cause)):
        one = left["ranks"].isdecimal()
        found = msgspec.structs.replace(
            found,
            klass=DEPARTED,
            title="A rank left early",
            confidence=1.0,
            group="script",
            action=CODE,
            explanation=f"Holdfast said: {told.cause}.",
            root_rank=int(left["ranks"]) if one else None,
            node=left["nodes"] if one else "",
            hint=JOIN_HINT,
        )
    said = found.explanation if found.confidence else f"Holdfast said: {told.cause}."
    explanation = f"{said}{_describe_earlier(told.earlier)}"
    return msgspec.structs.replace(found, explanation=explanation, went_on=told.went_on)


def _describe_earlier(causes: Sequence[str]) -> str:
    if not causes:
        return ""
    many = f"were {len(causes)} incidents before it, the last one" if len(causes) > 1 else "was 1 incident before it"
    return f" There {many}: {causes[-1]}."


def _find_cause(said: LogLine) -> str:
    found = _CAUSE.search(said.text)
    return found["cause"] if found else said.text.removeprefix("holdfast: ")


def _spoken_exception(lines: Sequence[LogLine], said: LogLine) -> list[LogLine]:
    """Return the exception that holdfast quotes in this line, as a line of the rank's own log. Return [] if the line
    quotes no exception, or if the log has a traceback."""
    found = _RAISED.search(said.text)
    if found is None or any(_TRACEBACK in line.text for line in lines):
        return []
    return [msgspec.structs.replace(said, text=found["raised"], rank=int(found["rank"]), node=found["node"])]
