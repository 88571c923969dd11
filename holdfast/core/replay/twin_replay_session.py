"""Two-half replay: two halves of a job's nodes do the same work, and a referee decides which of two twins is wrong.

Each half is a job of its own, with ranks numbered alike, so node x of one half is the twin of node x of the other. A
rank computes signatures (hashes) of the data that it sends into a sum or to the next stage, before that data mixes with
data of other ranks. After each step it also signs its state. If only one pair of twins differs at the first difference,
the fault is in this pair. The referee then takes the place of one twin, in the half that the referee is not part of. It
repeats the steps up to the difference.

A dual-phase replay takes over what a two-half replay cannot decide: several pairs that differ at the same time, a half
that crashes, or work that does not give the same bits twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core.replay.majority import GroupResult
from holdfast.core.replay.node_grid import Nodes, UnfitError, nodes_per_replica
from holdfast.core.replay.regrouped_replay import ReplayGroup, ReplayLimits, ReplayRuling, RulingKind
from holdfast.core.replay.regrouped_session import GroupLaunch, ReplayRequest, group_launch, valid_mesh
from holdfast.core.replay.twin_ruling import Referee, TwinComparison, TwinLimits
from holdfast.model.job_and_seats import Dims

_MIX, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def nodes_per_half(count: int, mesh: Dims, nproc: int) -> int:
    """Return how many nodes form one half. Raises UnfitError if there are too few for two halves and a referee."""
    unit = nodes_per_replica(mesh, nproc)
    half = count // unit // 2 * unit
    if not half:
        raise UnfitError(f"{count} nodes, of which {unit} make a whole replica of the model, have no two halves")
    if half < 2 and count < 3:
        raise UnfitError("there is no third node to say which of two is wrong")
    return half


class TwinSession:
    """A replay in two halves, used like a GroupSession. A dual-phase replay follows the ruling SOME or EVERYWHERE."""

    def __init__(self, asked: ReplayRequest, limits: ReplayLimits) -> None:
        self._asked, self._limits = asked, limits
        self._nproc = {seat.node: seat.nproc for seat in asked.seats}
        if len(set(self._nproc.values())) != 1:
            raise UnfitError("nodes with different numbers of ranks cannot stand in for one another")
        self._mesh = valid_mesh(asked.seats, asked.mesh)
        self._each = asked.seats[0].nproc
        self._half = nodes_per_half(len(asked.seats), self._mesh, self._each)
        self._unit = nodes_per_replica(self._mesh, self._each)
        self._nodes = tuple(seat.node for seat in asked.seats)
        self._watched = Counter(dict.fromkeys(self._nodes, 0))  # in so many steps
        self._round, self._trials = 0, 0
        self._left = limits.steps * limits.most  # to be asked for
        self._first = 0  # step of a replay, as far as anybody told
        self._differ: _Moment | None = None
        self._ruling: ReplayRuling | None = None
        self._waiting: dict[str, GroupLaunch] = {}
        self._told: dict[str, GroupResult | None] = {}
        self._start_round()

    def next_launches(self) -> tuple[GroupLaunch, ...] | ReplayRuling:
        """Return the groups to launch now, or the ruling. While groups run, return only the groups without a result."""
        if self._ruling is None and self._waiting.keys() <= self._told.keys():
            self._evaluate_round()
        left = tuple(launch for name, launch in self._waiting.items() if name not in self._told)
        return self._ruling or left

    def on_group_result(self, name: str, told: GroupResult | None) -> None:
        """Record the result of the group with this name. `told` is None if it could not run or its result is
        unknown."""
        if name in self._waiting:
            self._told.setdefault(name, told)

    # --- rounds ------------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        """Start the next round, with twice as many steps as the last. Short first rounds find frequent faults cheaply.
        Long later rounds need fewer launches."""
        replicas, half = len(self._nodes) // self._unit, self._half
        turn = self._round % replicas * self._unit if replicas % 2 else 0  # then every round leaves out another one
        self._order = (*self._nodes[turn:], *self._nodes[:turn])
        nodes = tuple(((node,),) for node in self._order[: 2 * half + 1])  # twins, and one that is in neither half
        self._halves = TwinComparison(nodes, TwinLimits(steps=1 << 62, confidence=self._limits.confidence))
        steps = min(self._limits.steps << self._round, self._left)
        self._round, self._left = self._round + 1, self._left - steps
        self._launch_groups({"a": self._order[:half], "b": self._order[half : 2 * half]}, steps)

    def _launch_groups(self, groups: Mapping[str, Nodes], steps: int) -> None:
        asked, self._told, self._trials = self._asked, {}, self._trials + 1
        made = [ReplayGroup(name=name, phase=0, repeat=self._trials, nodes=nodes) for name, nodes in groups.items()]
        launches = [group_launch(group, self._nproc, self._mesh, steps, asked.not_after) for group in made]
        self._waiting = {launch.replay.name: launch for launch in launches}

    def _evaluate_round(self) -> None:
        told = [self._told[name] for name in self._waiting]
        if self._differ is not None:
            self._on_referee_result(told[0])
        else:
            self._compare_halves(told[0], told[1])
        if self._ruling is None:
            self._make_move()

    def _make_move(self) -> None:
        match self._halves.next_move():
            case ReplayRuling() as ruling:
                self._ruling = ruling
            case Referee() as asked:
                self._launch_referee(asked)
            case _ if not self._left:
                self._ruling = self._halves.rule_nobody(min(self._watched.values()))
            case _:
                self._start_round()

    # --- what is found -----------------------------------------------------------------------------------------

    def _compare_halves(self, one: GroupResult | None, other: GroupResult | None) -> None:
        half = self._half
        for told, nodes in ((one, self._order[:half]), (other, self._order[half : 2 * half])):
            if told is None:
                self._set_ruling(RulingKind.SOME, nodes, "a half did not answer")
        if one is None or other is None:
            return
        for moment in _shared_moments(one, other):
            signed = self._node_signatures(moment, one, other)
            if apart := self._differing_places(signed):
                self._first = min(step for step, _ in (*one.marks, *one.signed))
                if self._needs_referee(moment, apart, one):
                    self._differ = moment
                    self._halves.on_signatures(moment.step, signed)
                return
            if moment.state:
                self._watched.update(self._order[: 2 * half])
                self._halves.on_signatures(moment.step, signed)
        for told, nodes in ((one, self._order[:half]), (other, self._order[half : 2 * half])):
            if told.failed or told.bad_step >= 0 or not told.ended:
                self._set_ruling(RulingKind.SOME, nodes, "this half failed, and twins had not differed before")
                return
        if not one.marks:
            self._set_ruling(RulingKind.EVERYWHERE, (), "the script signed nothing")

    def _node_signatures(self, moment: "_Moment", one: GroupResult, other: GroupResult) -> dict[int, list[int | None]]:
        """Return the nodes' signatures for this point in time. Nodes are numbered as in TwinComparison."""
        places = range(self._half)
        first = {place: [self._node_signature(moment, one, place)] for place in places}
        return first | {self._half + place: [self._node_signature(moment, other, place)] for place in places}

    def _node_signature(self, moment: "_Moment", told: GroupResult, place: int) -> int | None:
        """Return one signature for a node, made of its ranks' signatures; None if one of them is missing."""
        values, signature = told.marks if moment.state else told.signed, 0
        for rank in range(place * self._each, (place + 1) * self._each):
            value = values.get((moment.step, rank))
            if value is None:
                return None
            signature = (signature * _MIX + value) & _WORD
        return signature

    def _differing_places(self, signed: Mapping[int, list[int | None]]) -> list[int]:
        """Return the places in a half at which twins differ."""
        told = [(place, signed[place][0], signed[self._half + place][0]) for place in range(self._half)]
        return [place for place, a, b in told if a is not None and b is not None and a != b]

    def _needs_referee(self, moment: "_Moment", apart: list[int], told: GroupResult) -> bool:
        """Return whether to launch a referee; if not, this method has set the ruling. `apart` lists the places in a
        half at which twins differ.

        A referee can judge only one pair of twins. If several pairs differ, one node may have the error from another: a
        late pipeline stage sends wrong gradients to earlier stages within the same step. If only the states of one pair
        differ, a node may keep a shard that another computed wrongly, unless what was sent in the step is signed, too.
        """
        half, at = self._half, f"at step {moment.step}"
        unsigned = moment.state and half > 1 and not any(step == moment.step for step, _ in told.signed)
        if len(apart) == 1 and not unsigned:
            return True
        if len(apart) == half > 1:
            self._set_ruling(RulingKind.EVERYWHERE, (), f"all twins differ {at}: it had mixed before anybody signed it")
            return False
        twins = [self._order[first + place] for place in apart for first in (0, half)]
        nodes = self._order[: 2 * half] if unsigned else twins
        self._set_ruling(RulingKind.SOME, nodes, f"more than one may be wrong {at}, one having it from another")
        return False

    def _launch_referee(self, asked: Referee) -> None:
        """Launch again a half without the referee (a third node). The referee replaces one twin in it."""
        assert self._differ is not None
        half = self._half
        base = half if asked.replica < half else 0  # one of the first half goes into the second
        nodes = list(self._order[base : base + half])
        nodes[asked.pair[0]] = self._order[asked.replica]
        self._launch_groups({"r": tuple(nodes)}, self._differ.step - self._first + 1)

    def _on_referee_result(self, told: GroupResult | None) -> None:
        asked, moment = self._halves.next_move(), self._differ
        assert isinstance(asked, Referee) and moment is not None
        self._halves.on_referee_signature(self._node_signature(moment, told, asked.pair[0]) if told else None)
        if isinstance(self._halves.next_move(), ReplayRuling):
            self._differ = None

    def _set_ruling(self, how: RulingKind, nodes: Iterable[str], reason: str) -> None:
        if self._ruling is None:
            self._ruling = ReplayRuling(how=how, nodes=tuple(nodes), reason=reason)


class _Moment(msgspec.Struct, frozen=True):
    step: int
    state: bool  # after the step; else what was sent in it


def _shared_moments(one: GroupResult, other: GroupResult) -> list[_Moment]:
    """Return the points in time with signatures of both halves, in order. Each point is within a step or after one."""
    sent = {step for step, _ in one.signed} & {step for step, _ in other.signed}
    kept = {step for step, _ in one.marks} & {step for step, _ in other.marks}
    found = [_Moment(step, False) for step in sent] + [_Moment(step, True) for step in kept]
    return sorted(found, key=lambda moment: (moment.step, moment.state))
