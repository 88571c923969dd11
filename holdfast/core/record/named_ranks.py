"""The ranks of the newest launch that alarms name, from the journal alone: the page marks each in its own cell."""

import msgspec

from holdfast.core.incident.first_cause import is_echo
from holdfast.model.action import Launch
from holdfast.model.decider_events import Progress
from holdfast.model.detector_alarm import OPINION, Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry


class RankNaming(msgspec.Struct, frozen=True, array_like=True):
    """An alarm, and those of its ranks that no newer one names."""

    ranks: tuple[int, ...]
    kind: str
    at: float
    reason: str


class NamedRanks:
    """Takes journal entries one by one. Alarms that only tell of another rank's failure name nobody, and neither do
    those that are only noted."""

    def __init__(self) -> None:
        self._alarms: dict[int, Alarm] = {}  # by rank, the newest
        self._generation = 0

    @property
    def namings(self) -> tuple[RankNaming, ...]:
        found: dict[int, tuple[Alarm, list[int]]] = {}
        for rank, alarm in sorted(self._alarms.items()):
            found.setdefault(id(alarm), (alarm, []))[1].append(rank)
        return tuple(RankNaming(tuple(ranks), one.kind.value, one.at, one.reason) for one, ranks in found.values())

    def add(self, entry: Entry) -> None:
        match entry.event:
            case Alarm(generation=generation) as alarm if generation == self._generation:
                self._add_alarm(alarm)
            case Progress(generation=generation) if generation == self._generation:
                if entry.decision.phase is Phase.TRAINING:  # the steps go on, so nobody keeps the others waiting
                    self._alarms = {rank: one for rank, one in self._alarms.items() if one.kind is not Kind.HANG}
        for action in entry.decision.actions:
            if isinstance(action, Launch):
                self._generation, self._alarms = action.generation, {}

    def _add_alarm(self, alarm: Alarm) -> None:
        if alarm.stance is Stance.OBSERVE or alarm.signature == OPINION or is_echo(alarm):
            return
        self._alarms |= dict.fromkeys(alarm.ranks, alarm)
