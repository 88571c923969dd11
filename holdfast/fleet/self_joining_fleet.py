"""Fleet of nodes that people or tools start with `holdfast run`, one per host; they join by themselves."""

from collections.abc import Collection

from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode
from holdfast.model.observation import Departure


class JoinFleet:
    can_acquire = False
    survey_s = 0.0  # only the nodes themselves know of their hosts

    def nodes(self) -> tuple[str, ...]:
        return ()

    def departures(self) -> tuple[Departure, ...]:
        return ()  # they are on the disks of other hosts

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        raise OSError(f"this fleet cannot start nodes; start {count} more with the same command on other hosts")

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        """Do nothing. The node's agent was ordered to leave; an agent that cannot be reached stops by itself."""

    async def survey(self) -> dict[str, FleetNode]:
        return {}
