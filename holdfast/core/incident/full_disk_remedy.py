"""What is done about nodes that are gone because a disk was full."""

from holdfast.core.incident.incident_case import IncidentCase
from holdfast.model.detector_alarm import Kind
from holdfast.model.incident_record import Remedy, Verdict


def replace_ended_nodes(case: IncidentCase) -> Verdict | None:
    """Return the verdict on nodes that are gone because a disk was full: others take their places, and none of them is
    to blame. Return None for other incidents, and if so many nodes were lost lately that no others are asked for."""
    cause = case.cause
    if cause.kind is not Kind.SILENCE or not cause.full_disk or len(case.lost) > case.may_lose:
        return None
    nodes = tuple(sorted({*case.cause.suspects, *case.together, *case.lost}))
    places = f"place{'s' if len(nodes) > 1 else ''} of {', '.join(nodes)}"
    reason = f"no node is to blame for a full disk: others take the {places}"
    return Verdict(remedy=Remedy.RESTART, nodes=nodes, reason=reason)
