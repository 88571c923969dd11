"""A fleet whose words are masked: what a cluster says may quote the environment that a node was to start with."""

from collections.abc import Collection
from typing import NoReturn

import msgspec

from holdfast.controller_interfaces import Fleet, FleetRefusal
from holdfast.logs.secret_masking import Masker
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode
from holdfast.model.observation import Departure


class MaskedFleet:
    """Passes everything on to a fleet, and masks its errors and reasons before they reach the journal."""

    def __init__(self, fleet: Fleet, mask: Masker) -> None:
        self.can_acquire, self.survey_s = fleet.can_acquire, fleet.survey_s
        self._fleet, self._mask = fleet, mask

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        try:
            return await self._fleet.acquire(count, evicted)
        except OSError as e:
            self._raise_masked(e)

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        try:
            await self._fleet.give_back(node, reason, cause)
        except OSError as e:
            self._raise_masked(e)

    async def survey(self) -> dict[str, FleetNode]:
        try:
            seen = await self._fleet.survey()
        except OSError as e:
            self._raise_masked(e)
        return {node: self._mask_node(one) for node, one in seen.items()}

    def nodes(self) -> tuple[str, ...]:
        return self._fleet.nodes()

    def departures(self) -> tuple[Departure, ...]:
        return self._fleet.departures()

    def _mask_node(self, seen: FleetNode) -> FleetNode:
        return msgspec.structs.replace(seen, reason=self._mask(seen.reason)) if seen.reason else seen

    def _raise_masked(self, error: OSError) -> NoReturn:
        said = self._mask(str(error))
        if said == str(error):
            raise error
        raise (FleetRefusal(said) if isinstance(error, FleetRefusal) else OSError(said)) from None
