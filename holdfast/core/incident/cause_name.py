"""The short names of causes, under which the report adds up what incidents cost, and how certain they are."""

import re
from collections.abc import Iterable

from holdfast.core.incident.incident_case import TOLD
from holdfast.core.incident.incident_text import describe_exit
from holdfast.model.detector_alarm import Alarm
from holdfast.model.incident_record import Record

_UNSURE = re.compile(r" \((\d+)% sure\)$")


def cause_label(alarm: Alarm) -> str:
    """Return the short name of an alarm's cause. The report adds up the cost of incidents with one name. A SIGKILL
    without signs of memory shortage is "of unknown sender", though most come from the OOM killer."""
    guessed = is_guessed_kill(alarm)
    if alarm.full_disk:
        return "full disk"
    if (guessed or not alarm.klass) and (guessed or alarm.code == -9):
        return "probable OOM kill" if alarm.pressed else "SIGKILL of unknown sender"
    if alarm.code is not None and alarm.code < 0 and not alarm.klass:
        return describe_exit(alarm.code).removeprefix("was ")
    title = alarm.title.partition(",")[0]  # these words stand in a list
    sure = f" ({alarm.confidence:.0%} sure)" if 0.0 < alarm.confidence < TOLD else ""
    named = title if title[1:2].isupper() else f"{title[:1].lower()}{title[1:]}"
    return (named or _class_words(alarm.klass)) + sure


def is_guessed_kill(alarm: Alarm) -> bool:
    """Return whether the OOM killer is only guessed from a rank's log, without a report by the kernel."""
    return alarm.klass == "host_oom_kill" and 0.0 < alarm.confidence < TOLD


def record_label(record: Record) -> str:
    """Return the cause to which an incident's cost is charged or, in older journals, its failure class or kind."""
    return record.label or _class_words(record.klass) or record.kind


def split_label(record: Record) -> tuple[str, int]:
    """Return the cause to which an incident's cost is charged, and the certainty of that cause in percent."""
    return split_sureness(record_label(record))


def split_sureness(label: str) -> tuple[str, int]:
    """Return the name of a cause without its certainty, and that certainty in percent."""
    unsure = _UNSURE.search(label)
    return (label[: unsure.start()], int(unsure[1])) if unsure else (label, 100)


def describe_sureness(label: str, sure: Iterable[int]) -> str:
    """Return a cause with the range of its certainty in percent; only the cause if every incident is 100 % sure."""
    least, most = min(sure := list(sure)), max(sure)
    told = f" ({least}{f' to {most}' if most > least else ''}% sure)"
    return label + (told if least < 100 else "")


def _class_words(klass: str) -> str:
    return klass.replace("_", " ")
