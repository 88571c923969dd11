"""One agent's access to the notes on its simulated machine's disk."""

from collections.abc import Callable

from holdfast.core.agent_state_machine import HeedEpoch, RememberDone, RememberLeaving
from holdfast.model.node_errands import Done, Leave
from holdfast.model.observation import Beat, Departure
from holdfast.sim.dst.agent_process import AgentProcess


class SimNotes:
    """One agent's access to the notes; the agent may crash just before and just after it writes one."""

    def __init__(self, process: AgentProcess) -> None:
        self._process = process
        self._machine = process.machine
        self._disk = process.machine.disk
        self._chances = process.chances

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
                self._chances.on_noted(self._machine, busy=bool(self._process.agent.life._doing))
                self._process.strike_point("remembered")
            case RememberLeaving(errand):
                self._disk.leaving = self._disk.leaving if self._disk.full else errand
                self._machine.leaves = not self._disk.full  # or the next agent cannot know
                self._chances.on_leaving(self._machine)
                self._process.strike_point("remembered")

    def write_stopped(self, generation: int) -> None:
        self._process.check_alive()
        self._disk.stopped = self._disk.stopped if self._disk.full else generation

    def write_leave_reason(self, errand: Leave) -> None:
        self._process.strike_point("carried")
        self._machine.left_by = errand.id

    def write_departure(self, departure: Departure) -> None:
        self._process.check_alive()  # nobody reads it: the machine is gone with its disk

    def complete_departure(self, complete: Callable[[Beat], Beat]) -> None:
        self._process.check_alive()

    def mark_alone(self, now: float) -> float:
        self._process.check_alive()
        if self._disk.alone is None:  # the holder keeps it in memory: a full disk does not matter
            self._disk.alone = now
        return self._disk.alone

    def clear_alone(self) -> None:
        self._process.check_alive()
        self._disk.alone = None


class SimKeeperNotes:
    """One keeper's access to its notes on its machine's disk."""

    def __init__(self, process: AgentProcess) -> None:
        self._process = process
        self._disk = process.machine.disk

    def read_note(self, name: str) -> bytes:
        if name not in self._disk.notes:
            raise FileNotFoundError(name)
        return self._disk.notes[name]

    def write_note(self, name: str, content: bytes) -> None:
        self._process.check_alive()
        self._disk.write_note(name, content)

    def list_notes(self, prefix: str) -> list[str]:
        return sorted(name for name in self._disk.notes if name.startswith(prefix))
