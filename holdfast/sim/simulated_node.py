"""A node of a simulated job: its ranks, and whether the controller can reach it."""

import msgspec

from holdfast.model.job_and_seats import Seat
from holdfast.sim.fault_source import RankCrash


class SimNode(msgspec.Struct, kw_only=True):
    name: str
    generation: int = 0  # of its living ranks, 0: none
    stopped: int = 0  # generations up to this one were ended here
    seat: Seat | None = None
    alive: bool = True
    cut: bool = False
    quiet_since: float | None = None
    silent: bool = False  # the controller has noticed
    defect: RankCrash | None = None

    @property
    def reachable(self) -> bool:
        return self.alive and not self.cut
