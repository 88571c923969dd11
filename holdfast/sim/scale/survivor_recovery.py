"""Recovery at scale in processes that are kept: how long it takes, and from which state the job resumes."""

from typing import Protocol

from holdfast.model.action import Launch
from holdfast.sim.scale.scale_state import ScaleState

SURVIVORS = "survivors"


class KeptRecovery(Protocol):
    """How a job recovers when its processes are kept."""

    name: str
    resizes: bool  # on fewer nodes, too

    def least_nodes(self) -> int: ...
    def seat_nodes(self, action: Launch) -> bool: ...
    def resume_s(self) -> float: ...
    def begin_steps(self) -> None: ...
    def end_job(self) -> None: ...


class SurvivorRecovery:
    """Recovers as `holdfast.survive` does: all seats are filled again, and all ranks restore the newest step of which
    every rank's state is left."""

    name = SURVIVORS
    resizes = False

    def __init__(self, state: ScaleState) -> None:
        self._state = state
        self._before: list[str] = []
        self._admitted = False

    def least_nodes(self) -> int:
        return self._state.setup.nodes

    def seat_nodes(self, action: Launch) -> bool:
        """Record which nodes have seats. Return whether the job resumes from live state, so that no rank restores."""
        names = [seat.node for seat in action.seats]
        self._admitted, self._before = names != self._before, names
        return False

    def resume_s(self) -> float:
        """Return how long it takes from the launch to the first step, not counting the restore."""
        return self._state.prices("groups", "go_on", *(("fork",) if self._admitted else ()))

    def begin_steps(self) -> None:
        pass

    def end_job(self) -> None:
        pass
