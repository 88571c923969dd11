"""The notes on a simulated machine's disk that outlive an agent, and one agent's access to them."""

from typing import TYPE_CHECKING

from holdfast.core.agent_state_machine import HeedEpoch, RememberDone, RememberLeaving
from holdfast.model.errand import Done, LaunchHere, Leave
from holdfast.model.observation import Departure

if TYPE_CHECKING:
    from holdfast.sim.dst.agent_process import AgentProcess


class NodeDisk:
    """The notes on a node's disk, which outlive the agent; after a power loss only synced notes remain."""

    def __init__(self) -> None:
        self.done: list[Done] = []  # synced
        self.stopped = 0
        self.launch: LaunchHere | None = None
        self.alone: float | None = None  # since when there is no controller, by the steady clock
        self.leaving: Leave | None = None  # begun, and not come to its end
        self.epoch = 0  # newest controller that was heard
        self.full = False  # nothing can be written

    def write_launch(self, errand: LaunchHere) -> str:
        """Note a launch; return why it cannot be noted, empty if it was."""
        self.launch = self.launch if self.full else errand
        return "what is launched cannot be written" if self.full else ""

    def lose_power(self) -> None:
        self.stopped, self.launch, self.alone, self.leaving, self.epoch = 0, None, None, None, 0


class SimNotes:
    """One agent's access to the notes; the agent may crash just before and just after it writes one."""

    def __init__(self, process: "AgentProcess") -> None:
        self._process = process
        self._machine = process.machine
        self._disk = process.machine.disk
        self._world = process.world

    def read_done(self) -> tuple[Done, ...]:
        return tuple(self._disk.done)

    def read_stopped(self) -> int:
        return self._disk.stopped

    def read_epoch(self) -> int:
        return self._disk.epoch

    def read_leave_intent(self) -> Leave | None:
        return self._disk.leaving

    def write_deed(self, deed: HeedEpoch | RememberDone | RememberLeaving) -> None:
        self._process.check_alive()
        match deed:
            case HeedEpoch(epoch):
                self._disk.epoch = self._disk.epoch if self._disk.full else epoch
            case RememberDone(done):
                self._process.strike_point("carried")
                self._disk.done += () if self._disk.full else (done,)
                self._world.faults.on_noted(self._machine, busy=bool(self._process.agent.life._doing))
                self._process.strike_point("remembered")
            case RememberLeaving(errand):
                self._disk.leaving = self._disk.leaving if self._disk.full else errand
                self._machine.on_leaving()
                self._process.strike_point("remembered")

    def write_stopped(self, generation: int) -> None:
        self._process.check_alive()
        self._disk.stopped = self._disk.stopped if self._disk.full else generation

    def write_leave_reason(self, errand: Leave) -> None:
        self._process.strike_point("carried")
        self._machine.left_by = errand.id

    def write_departure(self, departure: Departure) -> None:
        self._process.check_alive()  # nobody reads it: the machine is gone with its disk

    def mark_alone(self, now: float) -> float:
        self._process.check_alive()
        if self._disk.alone is None and not self._disk.full:
            self._disk.alone = now
        return now if self._disk.alone is None else self._disk.alone

    def clear_alone(self) -> None:
        self._process.check_alive()
        self._disk.alone = None
