"""What every node is in a job, in one word."""

from collections.abc import Set
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.core.decider import Decider

_EVICTED = 16  # of the nodes that have left, the newest are told


class Role(StrEnum):
    ACQUIRING = "acquiring"  # the fleet has named it, and it has not reported yet
    PROBING = "probing"  # it has come, or waits, and is being checked
    READY = "ready"  # a standby
    ADMITTING = "admitting"  # new in a generation that has made no step yet
    ACTIVE = "active"
    DRAINING = "draining"  # a person wants it gone
    EXAMINED = "examined"  # it was evicted, and comes back if nothing is wrong with it
    EVICTED = "evicted"


def roles_of(decider: "Decider", admitting: Set[str]) -> dict[str, Role]:
    """By node: those that have left first, then who waits, then who is seated, so that the last word counts."""
    people = decider.people
    left = [node for node, kind in decider.gone.items() if kind is not None]
    roles = dict.fromkeys(left[-_EVICTED:], Role.EVICTED)
    roles |= dict.fromkeys(sorted(decider.coming), Role.ACQUIRING)
    roles |= dict.fromkeys(sorted(decider.pool), Role.READY)
    roles |= dict.fromkeys(decider.checking.values(), Role.PROBING)
    roles |= dict.fromkeys(sorted(decider.tried.difference(decider.checking.values())), Role.EXAMINED)
    for seat in decider.seats:
        if seat.node in decider.out:
            roles.setdefault(seat.node, Role.EVICTED)
        elif people.wants_gone(seat.node):
            roles[seat.node] = Role.DRAINING
        else:
            roles[seat.node] = Role.ADMITTING if seat.node in admitting else Role.ACTIVE
    return roles
