"""The role of every node in a job, as one word."""

from collections.abc import Set
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.core.decide.decider import Decider

_EVICTED = 16  # of the nodes that have left, the newest are told


class NodeRole(StrEnum):
    ACQUIRING = "acquiring"  # the fleet has named it, and it has not reported yet
    PROBING = "probing"  # it has come, or waits, and is being checked
    READY = "ready"  # a standby
    ADMITTING = "admitting"  # new in a generation that has made no step yet
    ACTIVE = "active"
    DRAINING = "draining"  # a person wants it gone
    EXAMINED = "examined"  # it was evicted, and comes back if nothing is wrong with it
    EVICTED = "evicted"


def assign_roles(decider: "Decider", admitting: Set[str]) -> dict[str, NodeRole]:
    """Return the role of each node. Seated nodes come last, so a node's seat outweighs what it was before."""
    people = decider.people
    left = [node for node, kind in decider.gone.items() if kind is not None]
    roles = dict.fromkeys(left[-_EVICTED:], NodeRole.EVICTED)
    roles |= dict.fromkeys(sorted(decider.coming), NodeRole.ACQUIRING)
    roles |= dict.fromkeys(sorted(decider.pool), NodeRole.READY)
    roles |= dict.fromkeys(decider.checking.values(), NodeRole.PROBING)
    roles |= dict.fromkeys(sorted(decider.under_probe.difference(decider.checking.values())), NodeRole.EXAMINED)
    for seat in decider.seats:
        if seat.node in decider.out:
            roles.setdefault(seat.node, NodeRole.EVICTED)
        elif people.who_wants_gone(seat.node):
            roles[seat.node] = NodeRole.DRAINING
        else:
            roles[seat.node] = NodeRole.ADMITTING if seat.node in admitting else NodeRole.ACTIVE
    return roles
