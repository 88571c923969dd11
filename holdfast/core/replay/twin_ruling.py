"""Compares twins, replicas in two halves that process the same batches; a third replica decides which twin is wrong.

Every replica of one half has its twin in the other. Both compute a signature, which is a hash, of the data that crosses
each boundary between pipeline stages. The fault is in the first stage at which twins differ, since all later stages
inherit the error. A third replica, the referee, repeats that step to decide which twin is wrong. So the fault has to
show only once, while a dual-phase replay finds only faults that show in both phases. If a stage spans several nodes,
the same comparison runs inside the stage against a healthy replica.

The work must give the same bits wherever it runs. Otherwise nobody is named.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.core.replay import detection_odds
from holdfast.core.replay.node_grid import Nodes
from holdfast.core.replay.regrouped_replay import ReplayRuling, RulingKind

# Replica -> what its places signed, None for one that was not heard; a place is a stage, or a node inside one.
Signatures = Mapping[int, Sequence[int | None]]


_ALONE = "; the last replica has no twin and was not watched"


class TwinLimits(msgspec.Struct, frozen=True, kw_only=True):
    steps: int = 1000  # to watch before saying nobody
    referees: int = 2  # to ask before saying one of the two
    confidence: float = 0.95


class WatchTwins(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction to continue training, with the same batches for both twins of each pair."""

    pairs: tuple[tuple[int, int], ...]
    inside: int | None = None  # the stage whose nodes sign one by one; None: stages sign


class Referee(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction to repeat this step on another replica, with the same state and batch as the two twins had."""

    step: int
    pair: tuple[int, int]
    stage: int
    replica: int


class _Doubt(NamedTuple):
    step: int
    pair: tuple[int, int]
    stage: int
    signed: tuple[int, int]


class TwinComparison:
    """One comparison of twins, from its first step to the ruling. `nodes[replica][stage]` are the nodes of a stage."""

    def __init__(self, nodes: tuple[tuple[Nodes, ...], ...], limits: TwinLimits) -> None:
        half = len(nodes) // 2
        if not half:
            raise ValueError("it takes two replicas to compare")
        self.nodes = nodes
        self.limits = limits
        self.pairs = tuple((one, one + half) for one in range(half))
        self.steps = 0  # done, by all
        self._doubt: _Doubt | None = None
        self._asked: list[int] = []  # referees
        self._wrong: tuple[int, int] | None = None  # replica and stage
        self._ruling: ReplayRuling | None = None

    def next_move(self) -> WatchTwins | Referee | ReplayRuling:
        if self._ruling:
            return self._ruling
        if self._doubt:
            return Referee(
                step=self._doubt.step, pair=self._doubt.pair, stage=self._doubt.stage, replica=self._asked[-1]
            )
        if self._wrong:
            return WatchTwins(pairs=((self._wrong[0], self._healthy_replica(self._wrong[0])),), inside=self._wrong[1])
        return WatchTwins(pairs=self.pairs)

    def on_signatures(self, step: int, signatures: Signatures) -> None:
        """Compare the signatures of one step. Places without a signature are not compared."""
        if not self._is_undecided():
            return
        self.steps += 1
        if self._wrong:
            self._compare_nodes(signatures)
        else:
            self._compare_pairs(step, signatures)
        if self.steps >= self.limits.steps and self._is_undecided():
            self._set_ruling(*self._nobody_ruling(_ALONE if self._unwatched_nodes() else ""))

    def on_referee_signature(self, signature: int | None) -> None:
        """Record the referee's signature of the stage in doubt; None if the referee could not repeat the step."""
        doubt = self._doubt
        if doubt is None:
            return
        self.steps += 1
        if signature in doubt.signed:
            replica = doubt.pair[1 - doubt.signed.index(signature)]
            nodes = self.nodes[replica][doubt.stage]
            self._doubt, self._wrong = None, (replica, doubt.stage)
            if len(nodes) == 1:
                why = f"stage {doubt.stage} of replica {replica} came to another result than two others"
                self._set_ruling(RulingKind.ONE, nodes, f"{why} at step {doubt.step}")
        elif not self._choose_referee():
            nodes = tuple(node for replica in doubt.pair for node in self.nodes[replica][doubt.stage])
            why = (
                f"replicas {doubt.pair[0]} and {doubt.pair[1]} differ from stage {doubt.stage} on, and no third agreed"
            )
            self._set_ruling(RulingKind.SOME, nodes, f"{why} with either")

    def rule_nobody(self, steps: int) -> ReplayRuling:
        """Return the ruling "nobody": twins did not differ in the `steps` steps that were compared on every node."""
        self.steps = steps
        how, nodes, reason = self._nobody_ruling()
        return ReplayRuling(how=how, nodes=nodes, reason=reason)

    def _is_undecided(self) -> bool:
        return self._ruling is None and self._doubt is None

    def _compare_pairs(self, step: int, signatures: Signatures) -> None:
        found = [self._first_difference(step, pair, signatures) for pair in self.pairs]
        apart = [doubt for doubt in found if doubt]
        if len(apart) > 1 and len(apart) == len(self.pairs):
            self._set_ruling(
                RulingKind.EVERYWHERE, (), "all twins differ: this work is not the same twice, and says nothing"
            )
        elif apart:
            self._doubt, self._asked = apart[0], []
            if not self._choose_referee():
                nodes = tuple(node for replica in apart[0].pair for node in self.nodes[replica][apart[0].stage])
                self._set_ruling(
                    RulingKind.SOME, nodes, "these differ, and there is no third replica to say who is wrong"
                )

    def _first_difference(self, step: int, pair: tuple[int, int], signatures: Signatures) -> _Doubt | None:
        for stage, one, other in _differing_places(pair, signatures):
            return _Doubt(step, pair, stage, (one, other))
        return None

    def _compare_nodes(self, signatures: Signatures) -> None:
        assert self._wrong
        replica, stage = self._wrong
        healthy = self._healthy_replica(replica)
        nodes = self.nodes[replica][stage]
        apart = tuple(nodes[place] for place, _, _ in _differing_places((replica, healthy), signatures))
        if apart:
            how = RulingKind.ONE if len(apart) == 1 else RulingKind.SOME
            self._set_ruling(
                how, apart, f"of stage {stage} of replica {replica} its share differs from replica {healthy}'s"
            )

    def _choose_referee(self) -> bool:
        """Choose a referee that was not asked yet, preferring one without a twin. Return False if none is left."""
        assert self._doubt
        others = [r for r in reversed(range(len(self.nodes))) if r not in (*self._doubt.pair, *self._asked)]
        if not others or len(self._asked) >= self.limits.referees:
            self._doubt = None
            return False
        self._asked.append(others[0])
        return True

    def _healthy_replica(self, replica: int) -> int:
        return next(other for other in range(len(self.nodes)) if other != replica)

    def _nobody_ruling(self, alone: str = "") -> tuple[RulingKind, Nodes, str]:
        if self._wrong:
            replica, stage = self._wrong
            why = f"stage {stage} of replica {replica} is wrong, and in the rest of the steps it did not show again"
            return RulingKind.SOME, self.nodes[replica][stage], why
        most, belief = (
            detection_odds.excluded_rate(self.steps, self.limits.confidence),
            detection_odds.remaining_belief(self.steps),
        )
        why = (
            f"twins agreed in all {self.steps} steps: a fault that shows in more than {most:.2g} of them is out of the"
        )
        told = f"{why} question; that a machine is faulty, even odds before, is now {belief:.1%}{alone}"
        return RulingKind.NOBODY, (), told

    def _unwatched_nodes(self) -> Nodes:
        """Return the nodes of the replica without a twin. There is one if the number of replicas is odd."""
        return tuple(n for stage in self.nodes[-1] for n in stage) if len(self.nodes) % 2 else ()

    def _set_ruling(self, how: RulingKind, nodes: Nodes, reason: str) -> None:
        self._ruling = ReplayRuling(how=how, nodes=nodes, reason=reason, unheard=self._unwatched_nodes())


def _differing_places(pair: tuple[int, int], signatures: Signatures) -> Iterator[tuple[int, int, int]]:
    """Yield, in order, each place at which the signatures of two replicas differ, and both signatures at this place."""
    one, other = signatures.get(pair[0], ()), signatures.get(pair[1], ())
    if one == other:
        return
    for place, (a, b) in enumerate(zip(one, other, strict=False)):  # who has not signed is not compared
        if a is not None and b is not None and a != b:
            yield place, a, b
