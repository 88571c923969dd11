"""What becomes of the decider's actions at scale: each takes its price, and is answered once."""

from typing import TYPE_CHECKING

from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.event import Outcome

if TYPE_CHECKING:
    from holdfast.sim.scale.ours import Ours


class Deeds:
    def __init__(self, world: "Ours") -> None:
        self.world = world
        self._made = 0  # nodes so far

    def carry(self, action: Action) -> None:
        world, prices = self.world, self.world.prices
        match action:
            case Say():
                pass
            case Acquire():
                self._acquire(action)
            case Dismiss(node=node):
                world.leave(node)
                world.later(prices("tell"), world.tell, Outcome(action=action.id, ok=True))
            case Launch():
                world.launching(action)
                reach_s = prices("tell", "fork") + len(action.seats) * prices("tell_each")
                world.later(reach_s, self._launched, action)
            case Stop(nodes=nodes):
                reach_s = prices("tell", "stop") + len(nodes) * prices("tell_each")
                world.later(reach_s, self._stopped, action)
            case Probe(nodes=nodes):
                world.later(prices("tell", "probe"), self._probed, action)
            case Stage():
                world.later(prices("stage"), world.tell, Outcome(action=action.id, ok=True))
            case Replay():  # no script here allows it
                world.later(prices("tell"), world.tell, Outcome(action=action.id, ok=True))
            case Finish():
                world.later(prices("tell", "stop"), world.finished, action)

    def _acquire(self, action: Acquire) -> None:
        """The nodes of a job that begins are there; the fleet takes its time for others, and some never report."""
        world = self.world
        names = tuple(f"n{self._made + number}" for number in range(action.count))
        self._made += action.count
        begins, world.begins = world.begins, False
        asked_s = 0.0 if begins else world.prices("acquire")
        world.later(asked_s, world.tell, Outcome(action=action.id, ok=True, nodes=names))
        for name in names:
            if begins:
                world.later(asked_s, world.arrive, name)
            elif world.rng.random() >= world.prices.share("dud"):
                world.later(asked_s + world.prices("boot"), world.arrive, name)

    def _dead(self, nodes: tuple[str, ...]) -> dict[str, str]:
        lost = self.world.dead.intersection(nodes) if self.world.dead else set()
        return dict.fromkeys(sorted(lost), "it fell silent")

    def _launched(self, action: Launch) -> None:
        failed = self._dead(tuple(seat.node for seat in action.seats))
        self.world.tell(Outcome(action=action.id, ok=not failed, failed=failed))
        if not failed:
            self.world.started(action)

    def _stopped(self, action: Stop) -> None:
        self.world.stop()
        failed = self._dead(action.nodes)
        self.world.tell(Outcome(action=action.id, ok=not failed, failed=failed))

    def _probed(self, action: Probe) -> None:
        """Who is bad is found, if probes can see what is wrong with it."""
        world, prices = self.world, self.world.prices
        tried = set(action.nodes)
        bad = dict.fromkeys(sorted(tried & world.dead), "it does not answer")
        for name, defect in world.defects.items():
            corrupts = defect.fault.shows == "loss"
            chance = prices.share("probe_finds_corruption" if corrupts else "probe_finds")
            if name in tried and defect.probe_lot < chance:
                bad[name] = "it failed its probes"
        world.tell(Outcome(action=action.id, ok=True, failed=bad))
