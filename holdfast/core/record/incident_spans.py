"""A closed incident as a trace: one span for the whole, and below it one for each phase, without gap or overlap."""

import msgspec

from holdfast.core.incident.incident_text import phases_s
from holdfast.model.incident_record import Record, is_given_up

_JUDGE = "judge"  # in which nodes are probed, or the verdict is known at once

SpanValue = str | int | tuple[str | int, ...]


class IncidentSpan(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    start_at: float
    end_at: float
    attributes: dict[str, SpanValue] = {}
    failure: str = ""  # why the job ended with it; "": it was mended


def trace_incident(record: Record) -> tuple[IncidentSpan, ...]:
    """Return an incident's spans: the whole, from the last good step until training resumed, and then its phases."""
    verdict = record.verdict
    judged: dict[str, SpanValue] = {"verdict": verdict.remedy.value, "reason": verdict.reason}
    spans, at = list[IncidentSpan](), record.good_at
    phases = phases_s(record)
    if "probe" not in phases:  # the verdict is known as soon as all ranks have stopped
        names = list(phases)
        place = names.index("stop") + 1 if "stop" in names else len(names)
        phases = {name: phases.get(name, 0.0) for name in (*names[:place], "probe", *names[place:])}
    for name, lasted_s in phases.items():
        judges = name == "probe"
        found = judged if judges else {}
        spans.append(IncidentSpan(name=_JUDGE if judges else name, start_at=at, end_at=at + lasted_s, attributes=found))
        at += lasted_s
    whole: dict[str, SpanValue] = {
        "incident": record.number,
        "kind": record.kind,
        "class": record.klass,
        "cause": record.cause,
        "nodes": record.evicted or record.suspects,
        "ranks": record.ranks,
        "evicted": record.evicted,
        "admitted": record.admitted,
        "failures": record.failures,
        "generation": record.generation,
        "step": record.good_step,
        **judged,
    }
    if record.resumed_from is not None:
        whole["resumed_from"] = record.resumed_from
    given_up = verdict.reason if is_given_up(record) else ""
    end_at = max(at, record.resumed_at)
    root = IncidentSpan(name="incident", start_at=record.good_at, end_at=end_at, attributes=whole, failure=given_up)
    return root, *spans
