"""Clauses on the nodes that an incident cost and on those that came: who left, who wanted that, who stayed, and why
nobody could come.
"""

from collections.abc import Collection

from holdfast.core.rank_ranges import format_nodes
from holdfast.model.incident_record import Record


def describe_evicted(record: Record, first: str = "") -> tuple[str, ...]:
    """Return clauses on the evicted nodes: those that the fault cost, and then those that somebody wanted gone, with
    who that was. The former is "n1 evicted" or, with `first`, "evicted n1"."""
    own = ", ".join(dict.fromkeys(node for node in record.evicted if node not in record.ordered))
    told = [f"{first}{own}" if first else f"{own} evicted"] if own else []
    for how in dict.fromkeys(record.ordered.values()):
        told.append(f"{', '.join(node for node in record.ordered if record.ordered[node] == how)} {how}")
    return tuple(told)


def describe_doubts(record: Record) -> str:
    """Return a clause about evicted nodes whose end the fleet could not see; "" if there are none."""
    words = dict.fromkeys(record.fleet_said.values())
    nodes = {word: ", ".join(node for node in record.fleet_said if record.fleet_said[node] == word) for word in words}
    return "".join(f"; the fleet says of {those}: {word}" for word, those in nodes.items())


def staying_nodes(record: Record) -> tuple[str, ...]:
    """Return the admitted nodes without those that were evicted again before a step was made."""
    stayed = list(record.admitted)
    for node in record.passed:
        stayed.remove(node)
    return tuple(stayed)


def describe_swap(record: Record) -> str:
    """Return, after a verdict's reason, which nodes left that the reason does not name, and which took their seats."""
    own = {node for node in record.evicted if node not in record.ordered}
    told = describe_evicted(record)
    told = told[1:] if own and own == set(record.verdict.nodes) else told
    stayed, left = staying_nodes(record), len(record.evicted) - len(record.passed)
    if stayed:
        named = "its place" if not record.passed else "the seat"
        seats = named if left == 1 else "their places" if len(stayed) > 1 else "one of their places"
        told += (f"{', '.join(stayed)} {f'took {seats}' if left else 'admitted'}",)  # into one left before
    return "".join(f"; {clause}" for clause in told)


def describe_lack(checking: Collection[str], whom: str = "it", *, may: str = "can") -> str:
    """Return that no standby can replace somebody, and which nodes are still being checked before they may."""
    if not checking:
        return f"no standby {may} replace {whom}"
    names = f"{format_nodes(sorted(checking))} {'is' if len(checking) == 1 else 'are'}"
    return f"no standby {may} replace {whom} yet, as {names} still being checked"
