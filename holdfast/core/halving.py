"""Two halves of a job's nodes do the same work; twins are compared step by step, and a third says which is wrong.

The halves are jobs of their own with ranks numbered alike, so node x of one has its twin in node x of the other. What a
rank sends into a sum or to the next stage is signed before it mixes with what others send, and its state after the
step: if one pair of twins differs first, it happened there. The referee takes the place of one of them in the half
that the other is not in, and does the steps up to that one again.

What this cannot decide (several that differ at once, a half that crashes, work that is not the same twice) is left to a
dual-phase replay.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core.diagnose.alike import Told
from holdfast.core.diagnose.grid import Nodes, UnfitError, whole_nodes
from holdfast.core.diagnose.halves import Halves, HalvesLimits, Referee
from holdfast.core.diagnose.replay import Group, How, ReplayLimits, Ruling
from holdfast.core.replaying import Asked, GroupLaunch, launch_of, mesh_told
from holdfast.model.topology import Dims

_MIX, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def half_of(count: int, mesh: Dims, nproc: int) -> int:
    """How many of so many nodes make one half. Raises UnfitError where there are no two, or nobody to be a referee."""
    unit = whole_nodes(mesh, nproc)
    half = count // unit // 2 * unit
    if not half:
        raise UnfitError(f"{count} nodes, of which {unit} make a whole replica of the model, have no two halves")
    if half < 2 and count < 3:
        raise UnfitError("there is no third node to say which of two is wrong")
    return half


class Halving:
    """From the first launch to the ruling, as a Session is. SOME and EVERYWHERE are for others to go on from."""

    def __init__(self, asked: Asked, limits: ReplayLimits) -> None:
        self._asked, self._limits = asked, limits
        self._nproc = {seat.node: seat.nproc for seat in asked.seats}
        if len(set(self._nproc.values())) != 1:
            raise UnfitError("nodes with different numbers of ranks cannot stand in for one another")
        self._mesh = mesh_told(asked.seats, asked.mesh)
        self._each = asked.seats[0].nproc
        self._half = half_of(len(asked.seats), self._mesh, self._each)
        self._unit = whole_nodes(self._mesh, self._each)
        self._nodes = tuple(seat.node for seat in asked.seats)
        self._watched = Counter(dict.fromkeys(self._nodes, 0))  # in so many steps
        self._round, self._trials = 0, 0
        self._left = limits.steps * limits.most  # to be asked for
        self._first = 0  # step of a replay, as far as anybody told
        self._differ: _Moment | None = None
        self._ruling: Ruling | None = None
        self._waiting: dict[str, GroupLaunch] = {}
        self._told: dict[str, Told | None] = {}
        self._watch()

    def next(self) -> tuple[GroupLaunch, ...] | Ruling:
        """What to launch now; while groups are out, those that have not been told of."""
        if self._ruling is None and self._waiting.keys() <= self._told.keys():
            self._go_on()
        left = tuple(launch for name, launch in self._waiting.items() if name not in self._told)
        return self._ruling or left

    def heard(self, name: str, told: Told | None) -> None:
        """What became of the group of this name; None: it could not be run, or nobody knows."""
        if name in self._waiting:
            self._told.setdefault(name, told)

    # --- rounds ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Another round, twice as long as the last: a start is dear, and so are steps after the one that tells."""
        replicas, half = len(self._nodes) // self._unit, self._half
        turn = self._round % replicas * self._unit if replicas % 2 else 0  # then every round leaves out another one
        self._order = (*self._nodes[turn:], *self._nodes[:turn])
        nodes = tuple(((node,),) for node in self._order[: 2 * half + 1])  # twins, and one that is in neither half
        self._halves = Halves(nodes, HalvesLimits(steps=1 << 62, confidence=self._limits.confidence))
        steps = min(self._limits.steps << self._round, self._left)
        self._round, self._left = self._round + 1, self._left - steps
        self._launch({"a": self._order[:half], "b": self._order[half : 2 * half]}, steps)

    def _launch(self, groups: Mapping[str, Nodes], steps: int) -> None:
        asked, self._told, self._trials = self._asked, {}, self._trials + 1
        made = [Group(name=name, phase=0, repeat=self._trials, nodes=nodes) for name, nodes in groups.items()]
        launches = [launch_of(group, self._nproc, self._mesh, steps, asked.not_after) for group in made]
        self._waiting = {launch.replay.name: launch for launch in launches}

    def _go_on(self) -> None:
        told = [self._told[name] for name in self._waiting]
        if self._differ is not None:
            self._refereed(told[0])
        else:
            self._compared(told[0], told[1])
        if self._ruling is None:
            self._act()

    def _act(self) -> None:
        match self._halves.next():
            case Ruling() as ruling:
                self._ruling = ruling
            case Referee() as asked:
                self._ask(asked)
            case _ if not self._left:
                self._ruling = self._halves.nobody(min(self._watched.values()))
            case _:
                self._watch()

    # --- what is found -----------------------------------------------------------------------------------------

    def _compared(self, one: Told | None, other: Told | None) -> None:
        half = self._half
        for told, nodes in ((one, self._order[:half]), (other, self._order[half : 2 * half])):
            if told is None:
                self._rule(How.SOME, nodes, "a half did not answer")
        if one is None or other is None:
            return
        for moment in _moments(one, other):
            signed = self._signed(moment, one, other)
            if apart := self._apart(signed):
                self._first = min(step for step, _ in (*one.marks, *one.signed))
                if self._doubt(moment, apart, one):
                    self._differ = moment
                    self._halves.heard(moment.step, signed)
                return
            if moment.state:
                self._watched.update(self._order[: 2 * half])
                self._halves.heard(moment.step, signed)
        for told, nodes in ((one, self._order[:half]), (other, self._order[half : 2 * half])):
            if told.failed or told.bad_step >= 0 or not told.ended:
                self._rule(How.SOME, nodes, "this half failed, and twins had not differed before")
                return
        if not one.marks:
            self._rule(How.EVERYWHERE, (), "the script signed nothing")

    def _signed(self, moment: "_Moment", one: Told, other: Told) -> dict[int, list[int | None]]:
        """By node, as `Halves` counts them, what it signed at this moment."""
        places = range(self._half)
        first = {place: [self._of(moment, one, place)] for place in places}
        return first | {self._half + place: [self._of(moment, other, place)] for place in places}

    def _of(self, moment: "_Moment", told: Told, place: int) -> int | None:
        """What a node's ranks signed, as one number."""
        values, signature = told.marks if moment.state else told.signed, 0
        for rank in range(place * self._each, (place + 1) * self._each):
            value = values.get((moment.step, rank))
            if value is None:
                return None
            signature = (signature * _MIX + value) & _WORD
        return signature

    def _apart(self, signed: Mapping[int, list[int | None]]) -> list[int]:
        """The places whose twins differ."""
        told = [(place, signed[place][0], signed[self._half + place][0]) for place in range(self._half)]
        return [place for place, a, b in told if a is not None and b is not None and a != b]

    def _doubt(self, moment: "_Moment", apart: list[int], told: Told) -> bool:
        """Whether one pair of twins differs, for a referee to judge; of several, one may have it from another.

        What a late stage of a pipeline computes wrongly comes back to the early ones as gradients within the same step.
        And a state that is sharded may be wrong on the node that keeps it, though another one computed it.
        """
        half, at = self._half, f"at step {moment.step}"
        unsigned = moment.state and half > 1 and not any(step == moment.step for step, _ in told.signed)
        if len(apart) == 1 and not unsigned:
            return True
        if len(apart) == half > 1:
            self._rule(How.EVERYWHERE, (), f"all twins differ {at}: it had mixed before anybody signed it")
            return False
        twins = [self._order[first + place] for place in apart for first in (0, half)]
        nodes = self._order[: 2 * half] if unsigned else twins
        self._rule(How.SOME, nodes, f"more than one may be wrong {at}, one having it from another")
        return False

    def _ask(self, asked: Referee) -> None:
        """The referee does it in the place of one twin, in the half where it is not needed elsewhere."""
        assert self._differ is not None
        half = self._half
        base = half if asked.replica < half else 0  # one of the first half goes into the second
        nodes = list(self._order[base : base + half])
        nodes[asked.pair[0]] = self._order[asked.replica]
        self._launch({"r": tuple(nodes)}, self._differ.step - self._first + 1)

    def _refereed(self, told: Told | None) -> None:
        asked, moment = self._halves.next(), self._differ
        assert isinstance(asked, Referee) and moment is not None
        self._halves.refereed(self._of(moment, told, asked.pair[0]) if told else None)
        if isinstance(self._halves.next(), Ruling):
            self._differ = None

    def _rule(self, how: How, nodes: Iterable[str], reason: str) -> None:
        if self._ruling is None:
            self._ruling = Ruling(how=how, nodes=tuple(nodes), reason=reason)


class _Moment(msgspec.Struct, frozen=True):
    step: int
    state: bool  # after the step; else what was sent in it


def _moments(one: Told, other: Told) -> list[_Moment]:
    """All at which both halves signed something, in the order of time."""
    sent = {step for step, _ in one.signed} & {step for step, _ in other.signed}
    kept = {step for step, _ in one.marks} & {step for step, _ in other.marks}
    found = [_Moment(step, False) for step in sent] + [_Moment(step, True) for step in kept]
    return sorted(found, key=lambda moment: (moment.step, moment.state))
