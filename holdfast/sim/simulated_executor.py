"""The executor of the simulated controller: actions take time, nodes may not answer, each action gets one outcome."""

from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from holdfast.core.decide.job_view import JobView
from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Probe, Replay, Say, Stop
from holdfast.model.decider_events import Event, Outcome
from holdfast.model.job_and_seats import Seat
from holdfast.sim.cost_model import CostModel
from holdfast.sim.fault_source import FaultRates
from holdfast.sim.simulated_node import SimNode

Deed = Callable[[SimNode], str | None]  # what is wrong, "" if nothing, None if the node does not answer

PROBE_S = 300.0


class OpenAction(msgspec.Struct, kw_only=True):
    """An action that some nodes have not answered yet."""

    id: int
    launches: int  # generation, 0: it stops one
    left: dict[str, None]
    failed: dict[str, str]
    over: bool = False


class ExecutorWorld(Protocol):
    """The interface to the simulated world that actions change: time, chance, nodes, ranks and the decider."""

    rng: Random
    costs: CostModel
    nodes: dict[str, SimNode]
    view: JobView

    def call_later(self, delay_s: float, call: Callable[..., None], *args: object) -> None: ...
    def draw_chance(self, probability: float) -> bool: ...
    def step_decider(self, event: Event) -> None: ...
    def add_node(self, name: str) -> None: ...
    def remove_node(self, node: SimNode) -> None: ...
    def expect_none_but(self, generation: int) -> None: ...
    def start_ranks(self, node: SimNode, seat: Seat, generation: int) -> None: ...
    def stop_ranks(self, node: SimNode, generation: int) -> None: ...
    def on_launching(self, generation: int) -> None: ...
    def on_launched(self, generation: int) -> None: ...


class SimExecutor:
    def __init__(self, world: ExecutorWorld, rates: FaultRates) -> None:
        self.world = world
        self._rates = rates
        self._made = 0  # nodes so far
        self._open: dict[int, tuple[OpenAction, Deed]] = {}

    def carry_out(self, action: Action) -> None:
        world = self.world
        match action:
            case Say():
                pass
            case Acquire():
                world.call_later(world.costs("acquire"), self._acquire_nodes, action)
            case Dismiss():
                world.call_later(world.costs("release"), self._dismiss_node, action)
            case Launch():
                self._launch_ranks(action)
            case Stop():
                self._stop_ranks(action)
            case Probe(nodes=nodes):
                gathering = OpenAction(id=action.id, launches=0, left=dict.fromkeys(nodes), failed={})
                self._ask_nodes(gathering, lambda node: "", PROBE_S, "probe")  # no fault here is one that probes see
            case Replay():  # nor does any script allow it
                world.call_later(world.costs("tell"), world.step_decider, Outcome(action=action.id, ok=True))
            case Finish():
                delay_s = world.costs("tell", "stop")
                world.call_later(delay_s, self._finish_job, action)

    # --- news of nodes -----------------------------------------------------------------------------------------

    def on_silent(self, name: str) -> None:
        """Stop waiting for a node that fell silent, and count the node as failed in every open action."""
        for gathering, _ in list(self._open.values()):
            if name in gathering.left:
                self._note_answer(gathering, name, "it fell silent")

    def on_relink(self, node: SimNode) -> None:
        """Resend to a reconnected node every action that the node has not answered."""
        for gathering, deed in list(self._open.values()):
            if node.name in gathering.left:
                self._note_answer(gathering, node.name, deed(node))

    # --- actions that nodes answer -----------------------------------------------------------------------------

    def _launch_ranks(self, action: Launch) -> None:
        seats = {seat.node: seat for seat in action.seats}
        unlucky = self._draw_unlucky(self._rates.launch_fails, tuple(seats))

        def start(node: SimNode) -> str:
            if action.generation <= node.stopped:
                return f"generation {action.generation} is over here"
            if node.name == unlucky:
                return "fork: Resource temporarily unavailable"
            self.world.start_ranks(node, seats[node.name], action.generation)
            return ""

        self.world.on_launching(action.generation)
        gathering = OpenAction(id=action.id, launches=action.generation, left=dict.fromkeys(seats), failed={})
        self._ask_nodes(gathering, start, self.world.view.limits.launch_s, "fork")

    def _stop_ranks(self, action: Stop) -> None:
        unlucky = self._draw_unlucky(self._rates.stop_fails, action.nodes)

        def stop(node: SimNode) -> str | None:
            if node.name == unlucky:
                return None
            self.world.stop_ranks(node, action.generation)
            return ""

        gathering = OpenAction(id=action.id, launches=0, left=dict.fromkeys(action.nodes), failed={})
        self._ask_nodes(gathering, stop, action.grace_s + self.world.view.limits.stop_s, "stop")

    def _draw_unlucky(self, probability: float, names: tuple[str, ...]) -> str:
        return self.world.rng.choice(names) if names and self.world.draw_chance(probability) else ""

    def _ask_nodes(self, gathering: OpenAction, deed: Deed, within_s: float, cost: str) -> None:
        self._open[gathering.id] = gathering, deed
        costs = self.world.costs
        delay_s = costs("tell", cost) + len(gathering.left) * costs("tell_each")
        self.world.call_later(delay_s, self._reach_nodes, gathering, deed)
        self.world.call_later(within_s, self._give_up, gathering, within_s)

    def _reach_nodes(self, gathering: OpenAction, deed: Deed) -> None:
        if gathering.launches:
            self.world.expect_none_but(gathering.launches)
        for name in list(gathering.left):
            node = self.world.nodes.get(name)
            if node is None or node.silent:
                self._note_answer(gathering, name, "it is silent")
            elif node.reachable:
                self._note_answer(gathering, name, deed(node))
        self._end_if_answered(gathering)

    def _give_up(self, gathering: OpenAction, within_s: float) -> None:
        for name in list(gathering.left):
            self._note_answer(gathering, name, f"no answer within {within_s:g} s")

    def _note_answer(self, gathering: OpenAction, name: str, error: str | None) -> None:
        if error is None or gathering.over:
            return
        del gathering.left[name]
        if error:
            gathering.failed[name] = error
        self._end_if_answered(gathering)

    def _end_if_answered(self, gathering: OpenAction) -> None:
        if gathering.left or gathering.over:
            return
        gathering.over = True
        del self._open[gathering.id]
        failed = dict(sorted(gathering.failed.items()))
        self._report_outcome(Outcome(action=gathering.id, ok=not failed, failed=failed))
        if gathering.launches and not failed:
            self.world.on_launched(gathering.launches)

    def _report_outcome(self, outcome: Outcome) -> None:
        self.world.call_later(self.world.costs("tell"), self.world.step_decider, outcome)

    # --- actions that the fleet answers ------------------------------------------------------------------------

    def _acquire_nodes(self, action: Acquire) -> None:
        world = self.world
        if world.draw_chance(self._rates.fleet_fails):
            world.step_decider(Outcome(action=action.id, ok=False, detail="no machines left"))
            return
        names = tuple(f"n{self._made + i}" for i in range(action.count))
        self._made += action.count
        for name in names:
            if not world.draw_chance(self._rates.dud):
                world.call_later(world.costs("boot"), world.add_node, name)
        world.step_decider(Outcome(action=action.id, ok=True, nodes=names))

    def _dismiss_node(self, action: Dismiss) -> None:
        node = self.world.nodes.get(action.node)
        if node and node.cut:  # it hears of it when it is back
            self.world.step_decider(Outcome(action=action.id, ok=False, detail="it cannot be reached"))
            return
        if node:
            self.world.remove_node(node)
        self.world.step_decider(Outcome(action=action.id, ok=True))

    def _finish_job(self, action: Finish) -> None:
        for node in list(self.world.nodes.values()):
            self.world.remove_node(node)
        self.world.step_decider(Outcome(action=action.id, ok=True))
