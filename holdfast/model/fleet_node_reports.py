"""What a fleet, such as a cluster's scheduler, reports about the nodes that it was asked for."""

from enum import StrEnum

import msgspec


class FleetState(StrEnum):
    """What a fleet knows of a node: queued, starting, up, gone or unknown."""

    QUEUED = "queued"  # asked for; the cluster has not given it a machine, and nothing of it runs
    STARTING = "starting"  # it has a machine: from here on it may be late
    UP = "up"  # its agent is running, as far as the fleet can tell
    GONE = "gone"  # proof that nothing of it runs and nothing of it will
    UNKNOWN = "unknown"  # the fleet cannot tell: what runs there may run on


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its fleet sees it."""

    state: FleetState
    reason: str = ""  # the cluster's own word: why it waits, why it is gone
    failed: bool = False  # GONE: its machine failed; else somebody or something ended it
    host: str = ""  # the machine, in the cluster's naming; "": none yet
    ends_at: float = 0.0  # when the cluster will take it away: a time limit, a preemption; 0: not known
    near: tuple[str, ...] = ()  # where it is, from wide to narrow: block, rack, switch; (): not known


class FleetReport(msgspec.Struct, frozen=True, kw_only=True, tag="fleet"):
    """The nodes whose state the fleet now sees differently than in its last report."""

    nodes: dict[str, FleetNode]
