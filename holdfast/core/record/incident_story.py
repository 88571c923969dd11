"""The story of each incident: signals, alarms, verdicts, actions and outcomes, in the order of the journal."""

from collections import deque

import msgspec

from holdfast.core.incident.first_cause import ECHOES
from holdfast.core.incident.incident_text import count_ranks, describe_cause, list_some
from holdfast.core.record.open_trouble import strip_number
from holdfast.model.action import Acquire, Action, Block, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.decider_events import Ended, Order, Outcome, Ready
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.incident_record import Record, Remedy
from holdfast.model.job_and_seats import Seat
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.rank_traces import StackRow

_BEFORE_S = 120.0  # signals so long before the first alarm are told with it
_SIGNALS = 20  # of these, the newest
_RANKS = 3  # whose output is told with a story
_MOST_LINES = 200  # of one story; a job that fails again and again before its next step is one incident


class StoryLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One alarm, verdict, action or other line in the story of an incident."""

    at: float
    part: str  # signal, alarm, echo, verdict, action, outcome, order or news
    text: str
    evidence: tuple[str, ...] = ()  # quoted lines and readings
    remarks: tuple[str, ...] = ()  # what else an alarm claims: its class, how sure that is, what to do
    ok: bool | None = None  # of an outcome
    stacks: tuple[StackRow, ...] = ()  # where all ranks were when the alarm was raised


class IncidentStory(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    lines: tuple[StoryLine, ...]
    undone: tuple[str, ...]  # what was not done, and why
    left_out: int = 0  # lines beyond what is told
    generation: int = 0  # that it ended; 0: not known
    ranks: tuple[int, ...] = ()  # whose output may tell more: those of the first cause, or of the nodes that it names


class StoryFold:
    """Takes journal entries one by one. Keeps the story of every past incident and of one in progress."""

    def __init__(self) -> None:
        self.stories: dict[int, IncidentStory] = {}
        self._signals: deque[tuple[float, StoryLine]] = deque(maxlen=_SIGNALS)
        self._alarms: list[Alarm] = []
        self._open: list[StoryLine] | None = None
        self._left_out = 0
        self._ordered: dict[int, tuple[float, Action]] = {}  # actions without an outcome
        self._phase = Phase.NEW
        self._seats: tuple[Seat, ...] = ()  # of the newest launch
        self._struck: tuple[Seat, ...] = ()  # of the launch that the open incident ended

    def add(self, entry: Entry) -> None:
        event, decision = entry.event, entry.decision
        before, self._phase = self._phase, decision.phase
        if self._open is None:
            if decision.phase is Phase.STOPPING and before is not Phase.STOPPING:
                self._open_story(entry.at)
            elif isinstance(event, Alarm):
                self._signals.append((entry.at, _alarm_line(event, entry.at)))
        if self._open is not None or decision.closed:
            self._tell_entry(entry, moved=decision.phase is not before)
        elif isinstance(event, Outcome):
            self._ordered.pop(event.action, None)
        for action in decision.actions:
            if not isinstance(action, Say):
                self._ordered[action.id] = entry.at, action
            if isinstance(action, Launch):
                self._seats = action.seats
        if decision.closed:
            self._close_story(decision.closed)

    def tell_open(self, number: int) -> IncidentStory | None:
        """Return the story so far of an incident that is not over; None if there is none."""
        if self._open is None:
            return None
        first = next((a for a in self._alarms if a.stance is Stance.ACT and a.klass not in ECHOES), None)
        return IncidentStory(
            number=number,
            lines=tuple(self._open),
            undone=(),
            left_out=self._left_out,
            generation=first.generation if first else 0,
            ranks=self._telling_ranks(first.ranks, first.suspects) if first else (),
        )

    def _open_story(self, at: float) -> None:
        self._open, self._left_out, self._alarms, self._struck = [], 0, [], self._seats
        self._open += [line for heard_at, line in self._signals if heard_at >= at - _BEFORE_S]
        self._signals.clear()

    def _close_story(self, record: Record) -> None:
        self.stories[record.number] = IncidentStory(
            number=record.number,
            lines=tuple(self._open or ()),
            undone=tuple(list_undone(record, self._alarms)),
            left_out=self._left_out,
            generation=record.generation,
            ranks=self._telling_ranks(record.ranks, record.suspects or record.evicted),
        )
        self._open = None

    def _telling_ranks(self, ranks: tuple[int, ...], nodes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks whose output a story shows: the named ranks, or else the first rank of each named node."""
        return (ranks or tuple(seat.first_rank for seat in self._struck if seat.node in nodes))[:_RANKS]

    def _put_line(self, line: StoryLine) -> None:
        self._open = [] if self._open is None else self._open
        if len(self._open) < _MOST_LINES:
            self._open.append(line)
        else:
            self._left_out += 1

    def _tell_entry(self, entry: Entry, *, moved: bool) -> None:
        event, decision, at = entry.event, entry.decision, entry.at
        reason = strip_number(decision.reason)
        told = ""
        match event:
            case Alarm():
                line = _alarm_line(event, at)
                self._alarms.append(event)
                self._put_line(line)
                told = line.text
            case Outcome():
                self._put_line(self._outcome_line(event, at))
            case Order():
                self._put_line(
                    StoryLine(at=at, part="order", text=f"{event.who} ordered: {event.verb} {event.node}".strip())
                )
            case Ready() | Ended():
                self._put_line(StoryLine(at=at, part="news", text=_news_text(event)))
        closed = decision.closed.sentence if decision.closed else ""
        started = decision.phase is Phase.STARTING  # which the outcome of the launch has said
        if reason and moved and not closed and not started and not (told and told in reason):
            self._put_line(StoryLine(at=at, part="verdict", text=reason))
        for action in decision.actions:
            if isinstance(action, Say) and (action.text == closed or action.text in reason):
                continue
            part = "news" if isinstance(action, Say) else "action"
            self._put_line(StoryLine(at=at, part=part, text=describe_action(action)))
        if closed:
            self._put_line(StoryLine(at=at, part="outcome", text=closed, ok=_is_mended(decision.closed)))

    def _outcome_line(self, outcome: Outcome, at: float) -> StoryLine:
        ordered_at, action = self._ordered.pop(outcome.action, (at, None))
        what = _action_noun(action) if action else f"action {outcome.action}"
        took = f" after {at - ordered_at:.1f} s" if action else ""
        failed = tuple(f"{node}: {why}" for node, why in outcome.failed.items())
        ended = f"{what} {'done' if outcome.ok else 'failed'}{took}"
        text = f"{ended}: {outcome.detail}" if outcome.detail else ended
        return StoryLine(at=at, part="outcome", text=text, evidence=failed, ok=outcome.ok and not failed)


def _is_mended(record: Record | None) -> bool:
    return record is not None and record.verdict.remedy is not Remedy.GIVE_UP


def _alarm_line(alarm: Alarm, at: float) -> StoryLine:
    remarks = []
    if alarm.klass:
        sure = f", {alarm.confidence:.0%} sure" if alarm.confidence else ""
        remarks.append(f"class: {alarm.title or alarm.klass.replace('_', ' ')}{sure}")
    remarks += [f"whose: {alarm.group}"] if alarm.group else []
    remarks += ["proof against the node, not only evidence"] if alarm.hard else []
    remarks += [f"what to do: {alarm.hint or alarm.action}"] if alarm.hint or alarm.action else []
    acts = alarm.stance is Stance.ACT
    if not acts:
        remarks.append(f"only noted: the detector's stance is {alarm.stance}")
    return StoryLine(
        at=at,
        part="signal" if not acts else "echo" if alarm.klass in ECHOES else "alarm",
        text=describe_cause(alarm),
        evidence=alarm.evidence,
        remarks=tuple(remarks),
        stacks=alarm.stacks,
    )


def _news_text(event: Ready | Ended) -> str:
    if isinstance(event, Ready):
        return f"{event.node} reports that it is ready" + (
            f", and is refused: {event.blocked}" if event.blocked else ""
        )
    return f"all ranks of {event.node} have ended well"


def _action_noun(action: Action) -> str:
    match action:
        case Launch(generation=generation):
            return f"launch of generation {generation}"
        case Dismiss(node=node):
            return f"dismissal of {node}"
        case Block(host=host):
            return f"block of host {host}"
        case Finish():
            return "end of the job"
        case Stop(generation=generation):
            return f"stop of generation {generation}"
        case Acquire():
            return "request for nodes"
        case Stage(release=release):
            return f"staging of release {release.number}"
    return type(action).__name__.lower()


def describe_action(action: Action) -> str:
    """Return what the decider requests, in words."""
    match action:
        case Acquire(count=count):
            return f"ask the fleet for {count} more node{'' if count == 1 else 's'}"
        case Dismiss(node=node, reason=reason):
            return f"give {node} back to the fleet: {reason}"
        case Block(host=host, reason=reason):
            return f"block host {host}: {reason}"
        case Launch(generation=generation, seats=seats, keep=keep):
            launched = f"launch generation {generation} on {list_some([seat.node for seat in seats])}"
            return f"{launched}, and let ranks that stayed go on" if keep else launched
        case Stop(generation=generation, nodes=nodes, parking=parking) if parking:
            told = f"tell {count_ranks(parking)} to leave generation {generation} and stay"
            return f"{told}, and end what does not, on {list_some(nodes)}"
        case Stop(generation=generation, nodes=nodes):
            return f"stop all ranks of generation {generation} on {list_some(nodes) if nodes else 'no node'}"
        case Stage(release=release, nodes=nodes):
            return f"bring release {release.number} to {list_some(nodes) if nodes else 'no node'}"
        case Probe(nodes=nodes, level=level):
            return f"probe {list_some(nodes)} (level {level})"
        case Replay(seats=seats):
            return f"have {list_some([seat.node for seat in seats])} do the job's own work again, in groups"
        case Finish(code=code, reason=reason):
            return f"end the job with code {code}: {reason}"
        case Say(text=text):
            return text


def list_undone(record: Record, alarms: list[Alarm]) -> list[str]:
    """Return sentences on remedies that were not applied to an incident, with the journal's reasons."""
    verdict, found = record.verdict, []
    if not record.evicted and verdict.remedy is not Remedy.GIVE_UP:
        suspects = f" ({list_some(record.suspects)} under suspicion)" if record.suspects else ""
        found.append(f"No node was evicted{suspects}: {verdict.reason}.")
    stayed = [node for node in record.suspects if record.evicted and node not in record.evicted]
    if stayed:
        found.append(f"{list_some(stayed)} stayed, though suspected: {verdict.reason}.")
    if record.evicted and not record.admitted and verdict.remedy is not Remedy.GIVE_UP:
        found.append("No standby was admitted: the job went on with fewer nodes.")
    if record.echoes:
        count = f"{record.echoes} alarm{'' if record.echoes == 1 else 's'}"
        found.append(f"Nothing was done about {count} that only said that another rank had failed first.")
    noted = sum(alarm.stance is not Stance.ACT for alarm in alarms)
    if noted:
        were = "alarm was" if noted == 1 else "alarms were"
        found.append(f"{noted} {were} only noted, because the detector may not act.")
    return found
