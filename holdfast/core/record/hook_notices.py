"""Notices that hooks send to people: which events are worth one, and how often notices go out."""

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from holdfast.core.incident.incident_text import describe_cause
from holdfast.core.record.job_ending import describe_end
from holdfast.model.action import Finish
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Order, Outcome
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.incident_record import Record, Remedy
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry

FORMATS = ("json", "slack")
_CALL = re.compile(r"@(?=(?:all|channel|here)\b)", re.IGNORECASE)  # what calls a whole channel
_KEPT = 64  # notices that wait for their turn; the rest are only counted
_OTHERS = 16  # of them are told with the one that is


class HookLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for hooks: where notices go, in which format, and how often."""

    command: str = ""  # for the shell; it gets the notice as JSON on its standard input
    url: str = ""  # the notice is posted there
    format: str = "json"  # of what is posted: the notice as it is, or "slack", {"text": ...}
    least_s: float = 30.0  # between two notices; what comes meanwhile is told with the next
    timeout_s: float = 10.0  # a command that runs for longer is ended, with all that it has started


class NoticeTopic(StrEnum):
    """What a notice is about. The most urgent topic comes first."""

    ENDED = "ended"
    GAVE_UP = "gave up"
    ASKING = "asking"
    ROLLED_BACK = "rolled back"
    REFUSED = "refused"
    INCIDENT = "incident"
    SLOW = "slow"


_AT_ONCE = (NoticeTopic.ENDED, NoticeTopic.GAVE_UP)  # nobody is there any more to tell it later
_RANKS = {topic: rank for rank, topic in enumerate(NoticeTopic)}
_FATES = {Fate.REFUSED: NoticeTopic.REFUSED, Fate.ROLLED_BACK: NoticeTopic.ROLLED_BACK}


class HookNotice(msgspec.Struct, frozen=True, kw_only=True):
    topic: NoticeTopic
    text: str
    seq: int  # of the journal's entry
    at: float
    run_id: str = ""
    phase: str = ""
    code: int | None = None  # of a job that has ended
    until: float | None = None  # a question is waited with so long
    incident: Record | None = None
    release: Release | None = None  # that was refused or given up
    owner: str = ""  # whose release it is
    more: int = 0  # notices that are told with this one
    others: tuple[str, ...] = ()  # the first of these


class JobStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What notices need besides decisions: the question to a person, and the state and reason of each release."""

    asking: str = ""
    until: float | None = None
    fates: Mapping[int, Fate] = {}
    told: Mapping[int, str] = {}
    known: Mapping[int, Release] = {}


class HookNotices:
    """Turns journal entries into notices. Needs every entry, old ones included, and the job's state after each."""

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self._asking = ""
        self._finish: Finish | None = None
        self._fates: dict[int, Fate] = {}

    def on_entry(self, entry: Entry, standing: JobStanding) -> tuple[HookNotice, ...]:
        found = [self._release_notice(entry, number, standing) for number in self._newly_fallen(standing.fates)]
        closed = entry.decision.closed
        if closed and closed.verdict.remedy is not Remedy.GIVE_UP:
            found.append(self._make_notice(entry, NoticeTopic.INCIDENT, closed.sentence, incident=closed))
        if isinstance(entry.event, Alarm) and entry.event.kind is Kind.SLOW and entry.event.stance is Stance.NOTIFY:
            found.append(self._make_notice(entry, NoticeTopic.SLOW, describe_cause(entry.event)))
        if standing.asking and standing.asking != self._asking:
            found.append(self._make_notice(entry, NoticeTopic.ASKING, standing.asking, until=standing.until))
        for action in entry.decision.actions:
            if isinstance(action, Finish):
                gave_up = action.code != 0 and not isinstance(entry.event, Order)  # which is no news to who gave it
                text = f"ended with code {action.code}: {action.reason}"
                topic = NoticeTopic.GAVE_UP if gave_up else NoticeTopic.ENDED
                self._finish = action
                found.append(self._make_notice(entry, topic, text, code=action.code, incident=closed))
        storage = entry.event.storage if isinstance(entry.event, Outcome) else None
        code, why = describe_end(self._finish, storage, done=entry.decision.phase is Phase.DONE)
        if self._finish and code != self._finish.code:
            found.append(self._make_notice(entry, NoticeTopic.GAVE_UP, f"ended with code {code}: {why}", code=code))
        self._fates, self._asking = dict(standing.fates), standing.asking
        return tuple(found)

    def _newly_fallen(self, fates: Mapping[int, Fate]) -> list[int]:
        return [n for n, fate in fates.items() if fate in _FATES and self._fates.get(n) is not fate]

    def _release_notice(self, entry: Entry, number: int, standing: JobStanding) -> HookNotice:
        topic, release = _FATES[standing.fates[number]], standing.known.get(number)
        owner = release.who if release else ""
        text = f"release {number}{f' of {owner}' if owner else ''} was {topic}: {standing.told.get(number, '')}"
        return msgspec.structs.replace(self._make_notice(entry, topic, text), release=release, owner=owner)

    def _make_notice(
        self,
        entry: Entry,
        topic: NoticeTopic,
        text: str,
        *,
        code: int | None = None,
        until: float | None = None,
        incident: Record | None = None,
    ) -> HookNotice:
        return HookNotice(
            topic=topic,
            text=text,
            seq=entry.seq,
            at=entry.at,
            run_id=self.run_id,
            phase=entry.decision.phase,
            code=code,
            until=until,
            incident=incident,
        )


class NoticePacer:
    """Lets one notice pass per interval, and urgent notices at once. Each carries the texts of those that waited."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._next_at = 0.0
        self._waiting: list[HookNotice] = []
        self._dropped = 0

    def add_notice(self, notice: HookNotice) -> None:
        self._waiting.append(notice)
        if len(self._waiting) > _KEPT:
            self._waiting.remove(max(self._waiting, key=lambda n: _RANKS[n.topic]))
            self._dropped += 1

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a notice may go out; None if none is waiting."""
        if not self._waiting:
            return None
        urgent = any(notice.topic in _AT_ONCE for notice in self._waiting)
        return 0.0 if urgent else max(0.0, self._next_at - now)

    def next_notice(self, now: float) -> HookNotice | None:
        """Return the most urgent notice with the texts of the others; None if none may go out now."""
        if self.wait_s(now) != 0.0:
            return None
        first = min(self._waiting, key=lambda n: (_RANKS[n.topic], -n.seq))
        others = [notice for notice in self._waiting if notice is not first]
        told = msgspec.structs.replace(
            first, more=len(others) + self._dropped, others=tuple(n.text for n in others[:_OTHERS])
        )
        self._waiting, self._dropped, self._next_at = [], 0, now + self._least_s
        return told

    @property
    def newest_seq(self) -> int:
        """Return the journal sequence number of the newest waiting notice; 0 if none is waiting."""
        return max((notice.seq for notice in self._waiting), default=0)


def format_slack(notice: HookNotice) -> str:
    """Return a notice as text for the {"text": ...} that Slack, Mattermost and similar services accept. Characters with
    a meaning to these services are escaped: words of a script could otherwise call a whole channel (in Mattermost by a
    plain @all) or show a false link."""
    lines = [f"holdfast {notice.run_id}: {notice.text}"]
    lines += [f"also: {text}" for text in notice.others]
    unsaid = notice.more - len(notice.others)
    text = "\n".join([*lines, f"and {unsaid} more"] if unsaid else lines)
    text = _CALL.sub("@\u200b", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
