"""Dual-phase replay: finds a faulty node by repeating the job's own work on nodes grouped in two different ways.

A pure step machine. `next_wave` returns the groups that run together next, or the final ruling. `on_group_result`
records whether the fault showed in a group, or None if nobody knows. A phase repeats until the fault shows or its
repeats are used up. If one node is faulty, the groups that failed in both phases have exactly that node in common.
"""

from enum import StrEnum

import msgspec

from holdfast.core.replay import detection_odds
from holdfast.core.replay.node_grid import Groups, Nodes, ReplayPlan

_NAMED = 8  # groups in a sentence


class ReplayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long to replay before ruling that nobody is faulty."""

    q: float | None = None  # how often the fault shows in one replay; None: nobody knows
    confidence: float = 0.95  # that a fault of this q is named
    most: int = 20  # repeats of a phase
    tries: int = 3  # for a group whose answer is lost
    steps: int = 20  # of the job's work, in each replay
    within_s: float = 300.0  # for one replay of one group; who has not done its steps by then stands still
    allow: bool = True  # in a job, where the script allows it too
    halves: bool = True  # two halves first, where the script gave a seed and there are replicas enough


class RulingKind(StrEnum):
    ONE = "one"
    SOME = "some"  # one of these, or several of them
    NOBODY = "nobody"  # nothing showed
    EVERYWHERE = "everywhere"  # all groups failed: not a machine


class ReplayGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that replay together, in one repeat of one phase."""

    name: str
    phase: int  # 1 or 2
    repeat: int  # from 1
    nodes: Nodes


class ReplayWave(msgspec.Struct, frozen=True, kw_only=True):
    """Groups to run at the same time."""

    groups: tuple[ReplayGroup, ...]


class ReplayRuling(msgspec.Struct, frozen=True, kw_only=True):
    how: RulingKind
    nodes: Nodes = ()
    reason: str
    repeats: tuple[int, int] = (0, 0)  # of each phase, that were run
    unheard: Nodes = ()  # of whom nothing is known: their groups never answered


class DualPhaseReplay:
    """One dual-phase replay, from its first groups to its ruling, which says which nodes are faulty."""

    def __init__(self, plan: ReplayPlan, limits: ReplayLimits) -> None:
        self.plan = plan
        self.limits = limits
        self.phase, self.repeat, self._wave = 1, 1, 0
        q = limits.q
        self._most = limits.most if q is None else detection_odds.repeats_needed(q, limits.confidence, limits.most)
        self._open: dict[ReplayGroup, int] = {}  # those that are to answer, and how often they were lost
        self._shown: tuple[dict[str, Nodes], dict[str, Nodes]] = ({}, {})
        self._heard: tuple[set[str], set[str]] = (set(), set())  # groups that ever answered
        self._first_shown_at = 0
        self._ruling: ReplayRuling | None = None
        self._begin_wave()

    @property
    def phase_waves(self) -> tuple[Groups, ...]:
        return self.plan.first if self.phase == 1 else self.plan.second

    def next_wave(self) -> ReplayWave | ReplayRuling:
        """Return the groups to run now, or the ruling. While some groups have not answered, return only these."""
        while not self._ruling and not self._open:
            self._advance_phase()
        return self._ruling or ReplayWave(groups=tuple(self._open))

    def on_group_result(self, group: ReplayGroup, faulty: bool | None) -> None:
        """Record whether the fault showed in a group. None means that nobody knows: the group is then tried again, up
        to a limit. Late and repeated answers change nothing."""
        if group not in self._open:
            return
        if faulty is None:
            self._open[group] += 1
            if self._open[group] < self.limits.tries:
                return
        del self._open[group]
        if faulty is not None:
            self._heard[self.phase - 1].add(group.name)
        if faulty:
            self._shown[self.phase - 1][group.name] = group.nodes

    def _begin_wave(self) -> None:
        groups = self.phase_waves[self._wave]
        self._open = {ReplayGroup(name=n, phase=self.phase, repeat=self.repeat, nodes=nodes): 0 for n, nodes in groups}

    def _advance_phase(self) -> None:
        """Go on to the next wave, repeat or phase, or to the ruling. Call when all groups have answered."""
        shown = self._shown[self.phase - 1]
        if self._wave + 1 < len(self.phase_waves):
            self._wave += 1
        elif not shown and self.repeat < self._most:
            self._wave, self.repeat = 0, self.repeat + 1
        elif self.phase == 1 and shown and not self._all_failed():
            self._first_shown_at = self.repeat
            if self.limits.q is None:
                self._most = detection_odds.second_phase_repeats(self.repeat, self.limits.confidence, self.limits.most)
            self.phase, self.repeat, self._wave = 2, 1, 0
        else:
            self._ruling = self._judge_groups()
            return
        self._begin_wave()

    def _all_failed(self) -> bool:
        """Return whether all groups of the grid failed. They share no node, so one faulty node cannot be the cause."""
        grid = {name for name, _ in self.phase_waves[0]}
        return grid <= self._shown[self.phase - 1].keys()

    def _judge_groups(self) -> ReplayRuling:
        first, second = self._shown
        if not first:
            return self._make_ruling(RulingKind.NOBODY, (), self._nothing_reason())
        if self._all_failed():
            why = f"it showed in all {self.plan.n} groups of phase {self.phase}, which have no node in common"
            return self._make_ruling(
                RulingKind.EVERYWHERE, (), f"{why}: it is the code, the state or what they read, not a machine"
            )
        if not second:
            why = f"it showed in {_group_names(first)}, and not again in {self.repeat} repeats of other groups"
            return self._make_ruling(RulingKind.SOME, _group_members(first), f"{why}: one of these")
        common = _shared_nodes(first, second)
        if len(common) == 1:
            both = f"{_group_names(first)} and in {_group_names(second)}"
            why = f"it showed in {both}, which have this node alone in common"
            return self._make_ruling(RulingKind.ONE, common, why)
        crossed = common or tuple(node for node in _group_members(first) if node in set(_group_members(second)))
        if crossed:
            both = f"{_group_names(first)} and in {_group_names(second)}"
            why = f"it showed in {both}: more than one of these may be faulty"
            return self._make_ruling(RulingKind.SOME, crossed, why)
        why = f"it showed in {_group_names(first)}, then in {_group_names(second)}, which have no node in common"
        return self._make_ruling(
            RulingKind.SOME, _group_members(first) + _group_members(second), f"{why}: more than one must be faulty"
        )

    def _nothing_reason(self) -> str:
        limits, repeats = self.limits, self.repeat
        if limits.q is not None:
            chance = detection_odds.shown_odds(limits.q, repeats)
            return (
                f"{repeats} replays showed nothing; of a fault that shows in {limits.q:.3g} of them, {chance:.0%} would"
            )
        most, belief = (
            detection_odds.excluded_rate(repeats, limits.confidence),
            detection_odds.remaining_belief(repeats),
        )
        return (
            f"{repeats} replays showed nothing: a fault that shows in more than {most:.2g} of them is out of the"
            f" question ({limits.confidence:.0%}); that one of these machines is faulty, even odds before, is now"
            f" {belief:.1%}"
        )

    def _make_ruling(self, how: RulingKind, nodes: Nodes, reason: str) -> ReplayRuling:
        unheard: dict[str, None] = {}
        for phase in range(self.phase):
            groups = [group for wave in (self.plan.first, self.plan.second)[phase] for group in wave]
            unheard |= {n: None for name, nodes in groups if name not in self._heard[phase] for n in nodes}
        if unheard:
            reason += f"; {len(unheard)} nodes were in groups that never answered, and are neither blamed nor cleared"
        repeats = (self._first_shown_at, self.repeat) if self.phase == 2 else (self.repeat, 0)
        return ReplayRuling(how=how, nodes=nodes, reason=reason, repeats=repeats, unheard=tuple(unheard))


def _shared_nodes(first: dict[str, Nodes], second: dict[str, Nodes]) -> Nodes:
    """Return the nodes that are in every failed group. A fault of one such node would explain all failures."""
    groups = [*first.values(), *second.values()]
    return tuple(node for node in groups[0] if all(node in group for group in groups))


def _group_members(groups: dict[str, Nodes]) -> Nodes:
    return tuple(dict.fromkeys(node for nodes in groups.values() for node in nodes))


def _group_names(groups: dict[str, Nodes]) -> str:
    names = list(groups)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ("group " if len(names) == 1 else "groups ") + ", ".join(names[:_NAMED]) + more
