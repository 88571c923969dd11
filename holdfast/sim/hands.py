"""The hands of the simulated controller: actions take their time, nodes answer or do not, one outcome each."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Probe, Replay, Say, Stop
from holdfast.model.event import Outcome

if TYPE_CHECKING:
    from holdfast.sim.world import Node, World

    Deed = Callable[[Node], str | None]  # what is wrong, "" if nothing, None if the node does not answer


PROBE_S = 300.0


class Gathering(msgspec.Struct, kw_only=True):
    """An action that nodes have not all answered yet."""

    id: int
    launches: int  # generation, 0: it stops one
    left: dict[str, None]
    failed: dict[str, str]
    over: bool = False


class Hands:
    def __init__(self, world: "World") -> None:
        self.world = world
        self._made = 0  # nodes so far
        self._open: dict[int, tuple[Gathering, Deed]] = {}

    def carry(self, action: Action) -> None:
        world = self.world
        match action:
            case Say():
                pass
            case Acquire():
                world.later(world.costs("acquire"), self._acquire, action)
            case Dismiss():
                world.later(world.costs("release"), self._release, action)
            case Launch():
                self._launch(action)
            case Stop():
                self._stop(action)
            case Probe(nodes=nodes):
                gathering = Gathering(id=action.id, launches=0, left=dict.fromkeys(nodes), failed={})
                self._gather(gathering, lambda node: "", PROBE_S, "probe")  # no fault here is one that probes see
            case Replay():  # nor does any script allow it
                world.later(world.costs("tell"), world.tell, Outcome(action=action.id, ok=True))
            case Finish():
                delay_s = world.costs("tell", "stop")
                world.later(delay_s, self._finish, action)

    # --- news of nodes -----------------------------------------------------------------------------------------

    def silent(self, name: str) -> None:
        """Nobody waits for a node that answers no more."""
        for gathering, _ in list(self._open.values()):
            if name in gathering.left:
                self._answer(gathering, name, "it fell silent")

    def linked_again(self, node: "Node") -> None:
        """Whatever it has not answered yet is told once more."""
        for gathering, deed in list(self._open.values()):
            if node.name in gathering.left:
                self._answer(gathering, node.name, deed(node))

    # --- actions that nodes answer -----------------------------------------------------------------------------

    def _launch(self, action: Launch) -> None:
        seats = {seat.node: seat for seat in action.seats}
        unlucky = self._unlucky(self.world.setup.rates.launch_fails, tuple(seats))

        def start(node: "Node") -> str:
            if action.generation <= node.stopped:
                return f"generation {action.generation} is over here"
            if node.name == unlucky:
                return "fork: Resource temporarily unavailable"
            self.world.start_ranks(node, seats[node.name], action.generation)
            return ""

        self.world.launching(action.generation)
        gathering = Gathering(id=action.id, launches=action.generation, left=dict.fromkeys(seats), failed={})
        self._gather(gathering, start, self.world.decider.limits.launch_s, "fork")

    def _stop(self, action: Stop) -> None:
        unlucky = self._unlucky(self.world.setup.rates.stop_fails, action.nodes)

        def stop(node: "Node") -> str | None:
            if node.name == unlucky:
                return None
            self.world.stop_ranks(node, action.generation)
            return ""

        gathering = Gathering(id=action.id, launches=0, left=dict.fromkeys(action.nodes), failed={})
        self._gather(gathering, stop, action.grace_s + self.world.decider.limits.stop_s, "stop")

    def _unlucky(self, probability: float, names: tuple[str, ...]) -> str:
        return self.world.rng.choice(names) if names and self.world.chance(probability) else ""

    def _gather(self, gathering: Gathering, deed: "Deed", within_s: float, cost: str) -> None:
        self._open[gathering.id] = gathering, deed
        costs = self.world.costs
        delay_s = costs("tell", cost) + len(gathering.left) * costs("tell_each")
        self.world.later(delay_s, self._reach, gathering, deed)
        self.world.later(within_s, self._give_up, gathering, within_s)

    def _reach(self, gathering: Gathering, deed: "Deed") -> None:
        if gathering.launches:
            self.world.expect_none_but(gathering.launches)
        for name in list(gathering.left):
            node = self.world.nodes.get(name)
            if node is None or node.silent:
                self._answer(gathering, name, "it is silent")
            elif node.reachable:
                self._answer(gathering, name, deed(node))
        self._settle(gathering)

    def _give_up(self, gathering: Gathering, within_s: float) -> None:
        for name in list(gathering.left):
            self._answer(gathering, name, f"no answer within {within_s:g} s")

    def _answer(self, gathering: Gathering, name: str, error: str | None) -> None:
        if error is None or gathering.over:
            return
        del gathering.left[name]
        if error:
            gathering.failed[name] = error
        self._settle(gathering)

    def _settle(self, gathering: Gathering) -> None:
        if gathering.left or gathering.over:
            return
        gathering.over = True
        del self._open[gathering.id]
        failed = dict(sorted(gathering.failed.items()))
        self._tell(Outcome(action=gathering.id, ok=not failed, failed=failed))
        if gathering.launches and not failed:
            self.world.launched(gathering.launches)

    def _tell(self, outcome: Outcome) -> None:
        self.world.later(self.world.costs("tell"), self.world.tell, outcome)

    # --- actions that the fleet answers ------------------------------------------------------------------------

    def _acquire(self, action: Acquire) -> None:
        world = self.world
        if world.chance(world.setup.rates.fleet_fails):
            world.tell(Outcome(action=action.id, ok=False, detail="no machines left"))
            return
        names = tuple(f"n{self._made + i}" for i in range(action.count))
        self._made += action.count
        for name in names:
            if not world.chance(world.setup.rates.dud):
                world.later(world.costs("boot"), world.arrive, name)
        world.tell(Outcome(action=action.id, ok=True, nodes=names))

    def _release(self, action: Dismiss) -> None:
        node = self.world.nodes.get(action.node)
        if node and node.cut:  # it hears of it when it is back
            self.world.tell(Outcome(action=action.id, ok=False, detail="it cannot be reached"))
            return
        if node:
            self.world.leave(node)
        self.world.tell(Outcome(action=action.id, ok=True))

    def _finish(self, action: Finish) -> None:
        for node in list(self.world.nodes.values()):
            self.world.leave(node)
        self.world.tell(Outcome(action=action.id, ok=True))
