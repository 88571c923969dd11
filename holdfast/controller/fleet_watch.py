"""Surveys the fleet and reports which of its nodes have changed."""

import logging

from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller_interfaces import Fleet
from holdfast.core.decide.job_view import JobView
from holdfast.core.detect.silence import gone_alarm
from holdfast.model.detector_alarm import Alarm
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState

_FORGOTTEN = FleetNode(state=FleetState.UNKNOWN, reason="the fleet does not know it any more")
_log = logging.getLogger("holdfast.controller")


class FleetWatch:
    """Compares each survey with what the decider knows. A new controller's decider knows this from the journal."""

    def __init__(self, fleet: Fleet, view: JobView, registry: NodeRegistry) -> None:
        self._fleet = fleet
        self._view = view
        self._registry = registry
        self._trouble = ""  # why the cluster could not be asked
        self._alarmed: set[tuple[int, str]] = set()  # by generation

    async def survey_nodes(self) -> dict[str, FleetNode]:
        """Return what the fleet says about this job's nodes; empty if the survey fails. Never raises OSError."""
        try:
            seen = await self._fleet.survey()
        except OSError as e:
            self._note_trouble(f"the fleet cannot be surveyed: {e}")
            return {}
        self._note_trouble("")
        here = self._registry.known_nodes() - set(self._view.gone)
        missing = self._view.coming.keys() & self._view.fleet.keys()
        return dict.fromkeys(sorted(missing), _FORGOTTEN) | {node: one for node, one in seen.items() if node in here}

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s", trouble or "the fleet can be surveyed again")

    def find_changes(self, seen: dict[str, FleetNode]) -> FleetReport | None:
        """Return a report of the nodes that have changed since the decider last heard of them; None if none has."""
        changed = {node: one for node, one in seen.items() if self._view.fleet.get(node) != one}
        return FleetReport(nodes=changed) if changed else None

    def find_losses(self, now: float, seen: dict[str, FleetNode]) -> list[Alarm]:
        """Return an alarm for every seated node that is gone, unless it is already known to be lost."""
        known, generation = self._registry.lost_nodes(), self._view.generation
        gone = self._view.active.intersection(node for node, one in seen.items() if one.state is FleetState.GONE)
        lost = sorted(node for node in gone - known if (generation, node) not in self._alarmed)
        self._alarmed.update((generation, node) for node in lost)
        heard = {node: self._registry.heard_at(node) for node in lost}
        return [gone_alarm(min(now, heard[node] or now), node, seen[node]) for node in lost]
