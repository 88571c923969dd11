"""Slow detector: finds a rank that makes other ranks wait, or a job that has become slower as a whole.

All ranks leave a collective together. So a rank that arrives late at the next collective was slow in between. In a
round of several steps the detector adds up how long other ranks waited for each rank. It names a rank only if, in most
of five rounds, ranks of the same node were the latest by more than noise explains. Usually it names no rank.

The detector compares GPUs if torch's recorder tells how long each collective held each GPU. Otherwise it compares
processes. Communication may overlap with computing, so not every wait costs time. The sum of the waits for a GPU shows
which GPU is last, and is an upper bound of the cost. The longest single wait is a lower bound. Ranks that share a GPU
slow each other down and are not named.

The detector judges a rank once every rank of the same group has reported collectives. It judges the job's pace once it
has seen a better pace. It reports a named rank only if that rank costs something: the job is slower than before, or
other ranks wait for the rank for much of the time. The job acts once the rank has cost more than a replacement would
cost. So the loss is at most twice the loss with the best choice.

A rank may be late from the beginning, or while the job is as fast as ever. Then it has more work than other ranks, as
rank 0 often has, and its machine is not slow.
"""

from collections import Counter, deque
from math import inf, isfinite
from statistics import median, mode

import msgspec

from holdfast.core.diagnose.collective_lateness import CollectiveLateness
from holdfast.core.diagnose.lateness_map import LatenessMap
from holdfast.core.diagnose.step_pace import STEPS, StepPace, WorkUnit
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Arrival

_LEAST = 4  # collectives in a round
_ROADS = 64  # beats of which the fastest tells how far a node's clock is off
EARLY = 30  # rounds after a launch, in which the job's pace and ways are learned
WORTH_TELLING = 0.15  # of the time, though the job be as fast as ever
_FEW = 8  # nodes: of fewer, one leads in four of five rounds by mere chance more than once in a hundred times
_BEYOND_CHANCE = 0.4  # of the time: the most by which a node led in most of five rounds by mere chance was 0.2
HABIT = 15  # rounds in which a node is named meanwhile, or while the job keeps its pace: it always is


class SlowLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: str = "act"
    cost_s: float = 120.0  # as much must a named rank have cost before it is acted on: what to replace it may cost
    round_s: float = 1.0  # at least; and at least so many steps
    round_steps: float = 5.0
    rounds: int = 5
    votes: int = 4  # of the rounds
    margin: float = 0.08  # of a step, ahead of the second latest
    pace: float = 1.25  # steps, or the tokens or FLOPs that the script tells, that take so many times as long
    pace_s: float = 30.0  # for so long
    again_s: float = 600.0  # the same is not told again before
    shared_gpus: bool = False  # ranks that share a GPU are judged too


class SlowRound(msgspec.Struct, frozen=True):
    rank: int  # the latest
    node: str  # where it is
    ahead: float  # part of the time that the others waited for it alone: ranks of a slow host are slow together
    longest: float = inf  # single wait for its GPU, as part of a step; inf: processes were compared


class LostPace(msgspec.Struct, frozen=True, kw_only=True):
    """How much slower a job has become, and since when."""

    since: float
    ratio: float  # of a step's time now to the best, or of that of a told token or FLOP
    what: WorkUnit = WorkUnit.STEPS  # of what the time was compared
    blur_s: float  # so much later than it happened may `since` be
    named: str = ""  # the node for which the others wait in collectives

    def cost_s(self, now: float) -> float:
        """Return how many seconds of training the slowdown has cost so far."""
        return (now - self.since) * (1 - 1 / self.ratio)


class PresentSlowness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a job is slow now."""

    node: str = ""  # for which the others wait; "": for none, or nobody knows
    ratio: float = 0.0  # of a unit's time to the best; 0: it is as good as ever
    unit: WorkUnit = WorkUnit.STEPS


class SlowDetector:
    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self.generation = 0
        self.rounds: deque[SlowRound] = deque(maxlen=limits.rounds)
        self.lateness = LatenessMap()  # of all ranks, for people
        self._node_of: dict[int, str] = {}
        self._gpu_of: dict[int, str] = {}
        # Rank and group -> when it came to the newest collective that it told of. Groups are told of in any order.
        self._heard: dict[tuple[int, str], float] = {}
        self._groups: dict[str, CollectiveLateness] = {}
        self._roads: dict[str, deque[float]] = {}  # node -> seconds that beats took to come, by its clock and ours
        self._round_at = 0.0
        self._pace = StepPace(limits.pace, limits.pace_s)
        self._crew = (0, 0)  # number of the release, and of ranks: with others no pace can be compared
        self._toll = SlownessCost(limits)
        self._named = ""  # by the last rounds
        self._named_rounds = 0  # in a row, by the rounds before each
        self._told: dict[tuple[Stance, tuple[str, ...]], float] = {}
        self._blamed: dict[int, str] = {}  # rank -> the node on which it was last told to be slow, by this crew

    def on_launch(self, now: float, generation: int, crew: tuple[int, int] = (0, 0)) -> None:
        """Forget the last launch, except its pace if the release and the number of ranks (`crew`) are unchanged."""
        former = self._pace.release_best if crew == self._crew else None
        self._blamed = self._blamed if crew == self._crew else {}
        self.generation, self._crew = generation, crew
        for kept in (self._node_of, self._gpu_of, self._heard, self._groups, self._told):
            kept.clear()
        self.rounds.clear()
        self.lateness = LatenessMap()
        self._round_at = now
        self._pace, self._toll = StepPace(self.limits.pace, self.limits.pace_s, former), SlownessCost(self.limits)
        self._named, self._named_rounds = "", 0

    def on_beat(self, now: float, beat: Beat, arrivals: dict[int, tuple[Arrival, ...]]) -> Alarm | None:
        if beat.generation != self.generation:
            return None
        self._pace.on_beat(now, beat)
        off_s = self._clock_offset_s(now, beat)
        self._gpu_of.update(beat.gpus)
        for rank, came in arrivals.items():
            self._node_of[rank] = beat.node
            fresh = [one for one in came if one.at > self._heard.get((rank, one.group), 0.0)]  # most are told again
            for one in sorted(fresh, key=lambda a: a.at):
                group = self._groups.setdefault(one.group, CollectiveLateness())
                group.on_arrival(rank, one.seq, one.at + off_s, one.held_s)
                self._heard[rank, one.group] = one.at
        return self._close_round(now) or self._check_pace(now)

    def tell_present(self) -> PresentSlowness:
        """Return for whom the others wait now, and by how much the job is slower than it was."""
        ratio = self._pace.release_ratio
        return PresentSlowness(
            node=self._named, ratio=ratio if ratio >= self.limits.pace else 0.0, unit=self._pace.unit
        )

    def find_lost_pace(self, now: float) -> LostPace | None:
        """Return how much slower the job has become, if it has been slower for `pace_s` seconds; else None."""
        ratio = self._pace.lasting_slowdown(now)
        if not ratio or self._pace.slow_since is None:
            return None
        blur_s = STEPS * self._pace.step_s
        what = self._pace.unit
        return LostPace(since=self._pace.slow_since, ratio=ratio, what=what, blur_s=blur_s, named=self._named)

    def _clock_offset_s(self, now: float, beat: Beat) -> float:
        """Return the delay of a node's fastest recent beat. Added to the node's times, this delay corrects the node's
        clock.

        A node sets its clock by one message from the controller, whose delay is unknown. On a busy machine the delay is
        tens of milliseconds, so without the correction the node would always look late. A node on the controller's
        machine has no error to correct: a slow beat would only make the node look late.
        """
        if not beat.sent or beat.exact:
            return 0.0
        roads = self._roads.setdefault(beat.node, deque(maxlen=_ROADS))
        roads.append(now - beat.sent)
        return min(roads)

    def _close_round(self, now: float) -> Alarm | None:
        step_s = self._pace.step_s
        least_s = max(self.limits.round_s, self.limits.round_steps * step_s)
        if not step_s or now < self._round_at + least_s:
            return None
        ready = [group for group in self._groups.values() if group.count >= _LEAST]
        if not ready:
            return None
        took_s, self._round_at = min(now - self._round_at, 2 * least_s), now  # a long pause is no slow step
        late: Counter[int] = Counter()
        on_gpus: Counter[int] = Counter()
        longest_s: dict[int, float] = {}
        for group in ready:
            waits = group.longest_s
            longest_s.update({rank: max(wait_s, longest_s.get(rank, 0.0)) for rank, wait_s in waits.items()})
            shares = group.take_shares()
            late.update(shares)
            on_gpus.update({rank: share for rank, share in shares.items() if rank in waits})
        self.lateness.add_round(late)
        [(rank, most)] = late.most_common(1)
        node = self._node_of[rank]
        second = max((share for other, share in late.items() if self._node_of[other] != node), default=most)
        longest = longest_s[rank] / step_s if 2 * on_gpus[rank] > max(most, 0.0) else inf
        alone = self.limits.shared_gpus or not self._shares_gpu(rank)
        self.rounds.append(SlowRound(rank, node, most - second, longest) if alone else SlowRound(rank, "", 0.0))
        return self._vote_rounds(now, took_s)

    def _shares_gpu(self, rank: int) -> bool:
        gpu = self._gpu_of.get(rank)
        return gpu is not None and sum(other == gpu for other in self._gpu_of.values()) > 1

    def _vote_rounds(self, now: float, took_s: float) -> Alarm | None:
        if len(self.rounds) < self.limits.rounds:
            return None
        node, votes = Counter(one.node for one in self.rounds).most_common(1)[0]
        own = [one for one in self.rounds if one.node == node]
        ahead = median(one.ahead if one.node == node else 0.0 for one in self.rounds)
        named = node if votes >= self.limits.votes and ahead >= self.limits.margin else ""
        self._named_rounds = self._named_rounds + 1 if named == self._named else 1
        self._named = named
        if not self._named:
            self._toll.add_unnamed_round()
            return None
        rank, ratio = mode(one.rank for one in own), self._pace.slowdown_ratio
        self._toll.add_round(node, took_s, ratio, ahead)
        longest = median(one.longest for one in own)
        others = "the other GPUs wait for its GPU" if isfinite(longest) else "they wait for it"
        reason = (
            f"makes the others wait: for {100 * ahead:.0f} % of the time {others} alone in collectives, "
            f"latest in {votes} of {len(self.rounds)} rounds"
        )
        lost = 1 - 1 / ratio if ratio > 1 + self.limits.margin else inf  # of the time, since the job was faster
        is_much = ahead >= WORTH_TELLING and longest >= self.limits.margin
        # Somebody is always the last, and now one, now another: a busy machine is slow as a whole, and of two equal
        # ranks one leads for some rounds. So of few nodes one that leads by little must be named by as many further
        # rounds.
        may_be_chance = len(set(self._node_of.values())) < _FEW and ahead < _BEYOND_CHANCE
        is_chance = may_be_chance and self._named_rounds <= self.limits.rounds
        if not self._toll.is_due and (is_chance or (not is_much and ahead < lost / 2)):
            return None
        if not self._toll.is_due:
            return self._make_alarm(now, (rank,), reason)
        longer = f"{self._pace.unit} take {ratio:.2f} times as long as they did"
        reason += f"; {longer}, of which it has cost {self._toll.lost_s:.0f} s"
        return self._make_alarm(now, (rank,), reason, Stance.ACT)

    def _check_pace(self, now: float) -> Alarm | None:
        ratio = self._pace.lasting_slowdown(now)
        if not ratio:
            return None
        own = self._pace.slowdown_ratio >= self.limits.pace
        since = "" if own else " before the last restart, with the same release on as many ranks"
        return self._make_alarm(now, (), f"{self._pace.unit} take {ratio:.1f} times as long as they did{since}")

    def _make_alarm(
        self, now: float, ranks: tuple[int, ...], reason: str, wanted: Stance = Stance.NOTIFY
    ) -> Alarm | None:
        stance = min(wanted, Stance(self.limits.stance), key=[Stance.OBSERVE, Stance.NOTIFY, Stance.ACT].index)
        suspects = tuple(sorted({self._node_of[rank] for rank in ranks}))
        if now < self._told.get((stance, suspects), -self.limits.again_s) + self.limits.again_s:
            return None
        self._told[stance, suspects] = now
        for rank in ranks:
            if (other := self._blamed.setdefault(rank, self._node_of[rank])) != self._node_of[rank]:
                reason += f"; it did so on {other} too, so its work is slow rather than the machine"
        seat = tuple(sorted(rank for rank, node in self._node_of.items() if node in suspects))
        return Alarm(
            kind=Kind.SLOW,
            at=now,
            suspects=suspects,
            ranks=ranks,
            generation=self.generation,
            reason=reason,
            signature=f"slow {seat}",  # whichever of its ranks is the latest
            stance=stance,
        )


class SlownessCost:
    """Adds up how much time the currently named node has cost the job."""

    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self.lost_s = 0.0
        self._node = ""
        self._calm: Counter[str] = Counter()  # node -> rounds in which it was named though nothing had become slower
        self._rounds = 0
        self._unnamed = 0  # rounds in a row

    @property
    def is_due(self) -> bool:
        return self.lost_s >= self.limits.cost_s

    def add_round(self, node: str, took_s: float, ratio: float, ahead: float) -> None:
        """Add a round in which a node was named, and charge the node with the time that the job lost. `ahead` is the
        share of the round in which other ranks waited for this node alone. The charge is never more than this share."""
        if node != self._node:
            self._node, self.lost_s = node, 0.0
        self._rounds, self._unnamed = self._rounds + 1, 0
        if self._rounds <= EARLY or ratio < 1 + self.limits.margin:
            self._calm[node] += 1
        elif self._calm[node] < HABIT:
            self.lost_s += took_s * min(ahead, 1 - 1 / ratio)

    def add_unnamed_round(self) -> None:
        self._rounds, self._unnamed = self._rounds + 1, self._unnamed + 1
        if self._unnamed >= self.limits.rounds:
            self._node, self.lost_s = "", 0.0
