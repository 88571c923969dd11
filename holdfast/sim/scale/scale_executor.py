"""The executor at scale: each action of the decider takes its price in time and gets one outcome."""

from typing import TYPE_CHECKING

from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.event import Outcome

if TYPE_CHECKING:
    from holdfast.sim.scale.holdfast_policy import HoldfastPolicy


class ScaleExecutor:
    def __init__(self, world: "HoldfastPolicy") -> None:
        self.world = world
        self._made = 0  # nodes so far

    def carry_out(self, action: Action) -> None:
        world, prices = self.world, self.world.prices
        match action:
            case Say():
                pass
            case Acquire():
                self._acquire_nodes(action)
            case Dismiss(node=node):
                world.remove_node(node)
                world.call_later(prices("tell"), world.step_decider, Outcome(action=action.id, ok=True))
            case Launch():
                world.on_launching(action)
                reach_s = prices("tell", "fork") + len(action.seats) * prices("tell_each")
                world.call_later(reach_s, self._on_launched, action)
            case Stop(nodes=nodes):
                reach_s = prices("tell", "stop") + len(nodes) * prices("tell_each")
                world.call_later(reach_s, self._on_stopped, action)
            case Probe(nodes=nodes):
                world.call_later(prices("tell", "probe"), self._on_probed, action)
            case Stage():
                world.call_later(prices("stage"), world.step_decider, Outcome(action=action.id, ok=True))
            case Replay():  # no script here allows it
                world.call_later(prices("tell"), world.step_decider, Outcome(action=action.id, ok=True))
            case Finish():
                world.call_later(prices("tell", "stop"), world.on_finish, action)

    def _acquire_nodes(self, action: Acquire) -> None:
        """Acquire nodes: at once for a job that begins, otherwise after a while, and some never report."""
        world = self.world
        names = tuple(f"n{self._made + number}" for number in range(action.count))
        self._made += action.count
        begins, world.begins = world.begins, False
        asked_s = 0.0 if begins else world.prices("acquire")
        world.call_later(asked_s, world.step_decider, Outcome(action=action.id, ok=True, nodes=names))
        for name in names:
            if begins:
                world.call_later(asked_s, world.add_node, name)
            elif world.rng.random() >= world.prices.share_value("dud"):
                world.call_later(asked_s + world.prices("boot"), world.add_node, name)

    def _dead_nodes(self, nodes: tuple[str, ...]) -> dict[str, str]:
        lost = self.world.dead.intersection(nodes) if self.world.dead else set()
        return dict.fromkeys(sorted(lost), "it fell silent")

    def _on_launched(self, action: Launch) -> None:
        failed = self._dead_nodes(tuple(seat.node for seat in action.seats))
        self.world.step_decider(Outcome(action=action.id, ok=not failed, failed=failed))
        if not failed:
            self.world.on_started(action)

    def _on_stopped(self, action: Stop) -> None:
        self.world.stop_steps()
        failed = self._dead_nodes(action.nodes)
        self.world.step_decider(Outcome(action=action.id, ok=not failed, failed=failed))

    def _on_probed(self, action: Probe) -> None:
        """Report the nodes that fail their probes: dead ones, and those whose defect probes can see."""
        world, prices = self.world, self.world.prices
        tried = set(action.nodes)
        bad = dict.fromkeys(sorted(tried & world.dead), "it does not answer")
        for name, defect in world.defects.items():
            corrupts = defect.fault.shows == "loss"
            chance = prices.share_value("probe_finds_corruption" if corrupts else "probe_finds")
            if name in tried and defect.probe_lot < chance:
                bad[name] = "it failed its probes"
        world.step_decider(Outcome(action=action.id, ok=True, failed=bad))
