"""The role of every node in a job, as one word."""

from collections.abc import Set
from enum import StrEnum

from holdfast.core.decide.job_state import JobState
from holdfast.model.detector_alarm import Kind

_TOLD = 16  # of the nodes that have left, the newest are told


class NodeRole(StrEnum):
    ACQUIRING = "acquiring"  # the fleet has named it, and it has not reported yet
    QUEUED = "queued"  # the fleet has named it, and the cluster has no machine for it yet
    PROBING = "probing"  # it has come, or waits, and is being checked
    READY = "ready"  # a standby
    ADMITTING = "admitting"  # new in a generation that has made no step yet
    ACTIVE = "active"
    DRAINING = "draining"  # a person wants it gone
    EXAMINED = "examined"  # it was evicted, and comes back if nothing is wrong with it
    EVICTED = "evicted"
    LOST = "lost"  # it had no seat, and fell silent
    DISMISSED = "dismissed"  # it had no seat, and something was found wrong with it


def assign_roles(state: JobState, admitting: Set[str]) -> dict[str, NodeRole]:
    """Return the role of each node. The role of a seated node comes from its seat, unless the node was evicted."""
    nodes, standbys = state.nodes, state.nodes.standbys
    left = [(node, kind) for node, kind in standbys.gone.items() if kind is not None]
    checking = standbys.checking.values()
    roles = {node: _role_after(node in standbys.unseated, kind) for node, kind in left[-_TOLD:]}
    roles |= dict.fromkeys(sorted(standbys.coming), NodeRole.ACQUIRING)
    roles |= dict.fromkeys(sorted(standbys.queued), NodeRole.QUEUED)
    roles |= dict.fromkeys(sorted(nodes.pool), NodeRole.READY)
    roles |= dict.fromkeys(checking, NodeRole.PROBING)
    roles |= dict.fromkeys(sorted(standbys.under_probe.difference(checking)), NodeRole.EXAMINED)
    for seat in nodes.seats:
        if seat.node in nodes.out:
            roles.setdefault(seat.node, NodeRole.EVICTED)
        elif state.requests.who_wants_gone(seat.node):
            roles[seat.node] = NodeRole.DRAINING
        else:
            roles[seat.node] = NodeRole.ADMITTING if seat.node in admitting else NodeRole.ACTIVE
    return roles


def _role_after(unseated: bool, kind: Kind) -> NodeRole:
    """Return the role of a node that has left because of this kind of alarm."""
    if not unseated:
        return NodeRole.EVICTED
    return NodeRole.LOST if kind is Kind.SILENCE else NodeRole.DISMISSED
