"""The executor at scale: each action takes as long as the price sheet says, and gets one outcome."""

from typing import Protocol

from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.decider_events import Event, Outcome
from holdfast.model.journal_entry import Decision
from holdfast.sim.scale.scale_state import ScaleState


class ScaleJob(Protocol):
    """The interface of the job that the executor's actions change."""

    def step_decider(self, event: Event) -> Decision: ...
    def add_node(self, name: str) -> None: ...
    def remove_node(self, name: str) -> None: ...
    def on_launching(self, action: Launch) -> None: ...
    def on_started(self, action: Launch) -> None: ...
    def stop_steps(self) -> None: ...
    def on_finish(self, action: Finish) -> None: ...


class ScaleExecutor:
    def __init__(self, state: ScaleState, job: ScaleJob) -> None:
        self.state, self.job = state, job
        self._made = 0  # nodes so far

    def carry_out(self, action: Action) -> None:
        state, prices, job = self.state, self.state.prices, self.job
        match action:
            case Say():
                pass
            case Acquire():
                self._acquire_nodes(action)
            case Dismiss(node=node):
                job.remove_node(node)
                state.call_later(prices("tell"), job.step_decider, Outcome(action=action.id, ok=True))
            case Launch():
                job.on_launching(action)
                start = ("tell",) if action.keep else ("tell", "fork")
                reach_s = prices(*start) + len(action.seats) * prices("tell_each")
                state.call_later(reach_s, self._on_launched, action)
            case Stop(nodes=nodes):
                end = "park" if action.park_s else "stop"
                reach_s = prices("tell", end) + len(nodes) * prices("tell_each")
                state.call_later(reach_s, self._on_stopped, action)
            case Probe(nodes=nodes):
                state.call_later(prices("tell", "probe"), self._on_probed, action)
            case Stage():
                state.call_later(prices("stage"), job.step_decider, Outcome(action=action.id, ok=True))
            case Replay():  # no script here allows it
                state.call_later(prices("tell"), job.step_decider, Outcome(action=action.id, ok=True))
            case Finish():
                state.call_later(prices("tell", "stop"), job.on_finish, action)

    def _acquire_nodes(self, action: Acquire) -> None:
        """Acquire nodes. A job's first nodes come at once; later ones take time, and some never report."""
        state, job = self.state, self.job
        names = tuple(f"n{self._made + number}" for number in range(action.count))
        self._made += action.count
        begins, state.begins = state.begins, False
        asked_s = 0.0 if begins else state.prices("acquire")
        state.call_later(asked_s, job.step_decider, Outcome(action=action.id, ok=True, nodes=names))
        for name in names:
            if begins:
                state.call_later(asked_s, job.add_node, name)
            elif state.rng.random() >= state.prices.share_value("dud"):
                state.call_later(asked_s + state.prices("boot"), job.add_node, name)

    def _dead_nodes(self, nodes: tuple[str, ...]) -> dict[str, str]:
        lost = self.state.dead.intersection(nodes) if self.state.dead else set()
        return dict.fromkeys(sorted(lost), "it fell silent")

    def _on_launched(self, action: Launch) -> None:
        failed = self._dead_nodes(tuple(seat.node for seat in action.seats))
        self.job.step_decider(Outcome(action=action.id, ok=not failed, failed=failed))
        if not failed:
            self.job.on_started(action)

    def _on_stopped(self, action: Stop) -> None:
        self.job.stop_steps()
        failed = self._dead_nodes(action.nodes)
        self.job.step_decider(Outcome(action=action.id, ok=not failed, failed=failed))

    def _on_probed(self, action: Probe) -> None:
        """Report the nodes that fail their probes: dead nodes, and nodes with a defect that probes can detect."""
        state, prices = self.state, self.state.prices
        tried = set(action.nodes)
        bad = dict.fromkeys(sorted(tried & state.dead), "it does not answer")
        for name, defect in state.defects.items():
            corrupts = defect.fault.shows == "loss"
            chance = prices.share_value("probe_finds_corruption" if corrupts else "probe_finds")
            if name in tried and defect.probe_lot < chance:
                bad[name] = "it failed its probes"
        self.job.step_decider(Outcome(action=action.id, ok=True, failed=bad))
