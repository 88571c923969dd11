"""slow: one rank makes the others wait, or the whole job has lost its pace.

After a collective all of its ranks go on together, so who comes late to the next has been slow in between. A round of
several steps tells for how much of the time the others waited for each rank; it takes the same rank at the head of most
of five rounds, and a distance to the second that noise does not make, to name one. "Nobody" is the usual answer.

Refuses to judge ranks whose collectives it has not heard of from all of their group, and a pace that it has not known
to be better for a while.
"""

from collections import Counter, deque
from statistics import median

import msgspec

from holdfast.core.lateness import Lateness
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.signal import Beat
from holdfast.model.stacks import Arrival

_LEAST = 4  # collectives in a round
_ROADS = 64  # beats of which the fastest tells how far a node's clock is off


class SlowLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: str = "notify"
    round_s: float = 1.0  # at least; and at least so many steps
    round_steps: float = 5.0
    rounds: int = 5
    votes: int = 4  # of the rounds
    margin: float = 0.08  # of a step, ahead of the second latest
    pace: float = 1.25  # steps that take so many times as long as they did
    pace_s: float = 30.0  # for so long
    again_s: float = 600.0  # the same is not told again before


class Round(msgspec.Struct, frozen=True):
    rank: int  # the latest
    late: float  # part of the time that the others waited for it
    ahead: float  # of the second latest


class Slow:
    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self.generation = 0
        self.rounds: deque[Round] = deque(maxlen=limits.rounds)
        self._node_of: dict[int, str] = {}
        self._heard: dict[int, float] = {}  # rank -> when it came to the newest collective that it told of
        self._groups: dict[str, Lateness] = {}
        self._roads: dict[str, deque[float]] = {}  # node -> seconds that beats took to come, by its clock and ours
        self._round_at = 0.0
        self._pace = Pace(limits)
        self._told: dict[tuple[int, ...], float] = {}

    def launched(self, now: float, generation: int) -> None:
        self.generation = generation
        for kept in (self._node_of, self._heard, self._groups, self._told):
            kept.clear()
        self.rounds.clear()
        self._round_at = now
        self._pace = Pace(self.limits)

    def heard(self, now: float, beat: Beat, arrivals: dict[int, tuple[Arrival, ...]]) -> Alarm | None:
        if beat.generation != self.generation:
            return None
        self._pace.heard(now, beat)
        off_s = self._off_s(now, beat)
        for rank, came in arrivals.items():
            self._node_of[rank] = beat.node
            heard_at = self._heard.get(rank, 0.0)
            for one in sorted([one for one in came if one.at > heard_at], key=lambda a: a.at):  # most are told again
                self._groups.setdefault(one.group, Lateness()).came(rank, one.seq, one.at + off_s)
                self._heard[rank] = one.at
        return self._round(now) or self._slower(now)

    def _off_s(self, now: float, beat: Beat) -> float:
        """What a node's instants are to be moved by to be comparable with others': no beat comes before it is sent.

        A node learns our clock from one message, and how long that took is not known: tens of milliseconds on a busy
        machine, which would look like a node that is always late.
        """
        if not beat.sent:
            return 0.0
        roads = self._roads.setdefault(beat.node, deque(maxlen=_ROADS))
        roads.append(now - beat.sent)
        return min(roads)

    def _round(self, now: float) -> Alarm | None:
        step_s = self._pace.step_s
        if not step_s or now < self._round_at + max(self.limits.round_s, self.limits.round_steps * step_s):
            return None
        ready = [group for group in self._groups.values() if group.count >= _LEAST]
        if not ready:
            return None
        self._round_at = now
        late: Counter[int] = Counter()
        for group in ready:
            late.update(group.shares())
        (rank, most), (_, second) = late.most_common(2)
        self.rounds.append(Round(rank, most, most - second))
        return self._vote(now)

    def _vote(self, now: float) -> Alarm | None:
        if len(self.rounds) < self.limits.rounds:
            return None
        rank, votes = Counter(one.rank for one in self.rounds).most_common(1)[0]
        own = [one for one in self.rounds if one.rank == rank]
        ahead = median(one.ahead if one.rank == rank else 0.0 for one in self.rounds)
        if votes < self.limits.votes or ahead < self.limits.margin:
            return None
        late = median(one.late for one in own)
        reason = (
            f"makes the others wait: for {100 * late:.0f} % of the time they wait for it in collectives, "
            f"latest in {votes} of {len(self.rounds)} rounds"
        )
        return self._alarm(now, (rank,), reason)

    def _slower(self, now: float) -> Alarm | None:
        ratio = self._pace.slower(now)
        if not ratio:
            return None
        return self._alarm(now, (), f"steps take {ratio:.1f} times as long as they did")

    def _alarm(self, now: float, ranks: tuple[int, ...], reason: str) -> Alarm | None:
        if now < self._told.get(ranks, -self.limits.again_s) + self.limits.again_s:
            return None
        self._told[ranks] = now
        order = [Stance.OBSERVE, Stance.NOTIFY, Stance.ACT]
        wanted = Stance.ACT if ranks else Stance.NOTIFY  # a pace alone names nobody
        return Alarm(
            kind=Kind.SLOW,
            at=now,
            suspects=tuple(sorted({self._node_of[rank] for rank in ranks})),
            ranks=ranks,
            generation=self.generation,
            reason=reason,
            signature=f"slow {ranks}",
            stance=min(wanted, Stance(self.limits.stance), key=order.index),
        )


class Pace:
    """How long the job's steps take, and took at their best."""

    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self._steps: dict[str, tuple[int, float]] = {}  # node -> newest step and when
        self._took: deque[float] = deque(maxlen=32)
        self._best_s = 0.0
        self._slow_since: float | None = None

    @property
    def step_s(self) -> float:
        return median(self._took) if self._took else 0.0

    def heard(self, now: float, beat: Beat) -> None:
        step, at = self._steps.get(beat.node, (beat.step, beat.at))
        if beat.step > step >= 0:
            self._took.append((beat.at - at) / (beat.step - step))
        if beat.step != step or beat.node not in self._steps:
            self._steps[beat.node] = (beat.step, beat.at)

    def slower(self, now: float) -> float:
        """How many times as long as before steps have been taking for a while; 0: not."""
        if len(self._took) < (self._took.maxlen or 0):
            return 0.0
        self._best_s = min(self._best_s or self.step_s, self.step_s)
        ratio = self.step_s / self._best_s if self._best_s else 1.0
        if ratio < self.limits.pace:
            self._slow_since = None
            return 0.0
        self._slow_since = now if self._slow_since is None else self._slow_since
        return ratio if now >= self._slow_since + self.limits.pace_s else 0.0
