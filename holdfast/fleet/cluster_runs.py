"""Finds holdfast's runs among the jobs or pods that a cluster lists."""

import re
from collections.abc import Iterable

import msgspec

from holdfast.fleet.pod_manifest import RUN_LABEL
from holdfast.fleet.pod_reading import PodView

# The name is last, as it may contain anything. Times are seconds since 1970, with SLURM_TIME_FORMAT=%s.
SQUEUE_FORMAT = "%T|%D|%u|%V|%j"
_NAMED = re.compile(r"holdfast-(?P<run>.+?)(-n\d+)?")  # jobs of the fleet are named after their first node, too
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "RESV_DEL_HOLD", "SPECIAL_EXIT")


class ClusterRunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its cluster shows it: its user, its start and its number of nodes, but no steps."""

    run_id: str
    running: int  # nodes that have their machines
    waiting: int
    who: str = ""  # "": the cluster does not say
    since: float = 0.0  # 0: the same

    def joined_with(self, other: "ClusterRunView") -> "ClusterRunView":
        return ClusterRunView(
            run_id=self.run_id,
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            who=self.who or other.who,
            since=min(filter(None, (self.since, other.since)), default=0.0),
        )


def parse_squeue(text: str) -> list[ClusterRunView]:
    """Return the runs in the output of squeue with SQUEUE_FORMAT, oldest first; jobs of other programs are left out."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        named = _NAMED.fullmatch(fields[4]) if len(fields) == 5 else None
        if named is None or not fields[1].isdecimal():
            continue
        waits = fields[0] in _WAITING
        nodes = int(fields[1])
        one = ClusterRunView(
            run_id=named["run"],
            running=0 if waits else nodes,
            waiting=nodes if waits else 0,
            who=fields[2],
            since=float(fields[3]) if fields[3].isdecimal() else 0.0,
        )
        found.append(one)
    return _join_parts(found)


def read_pods(pods: Iterable[PodView]) -> list[ClusterRunView]:
    """Return the runs that these pods belong to, oldest first. A pod that has ended does not count as a node."""
    found = []
    for pod in pods:
        made_at = pod.metadata.creation_timestamp
        one = ClusterRunView(
            run_id=pod.metadata.labels.get(RUN_LABEL, ""),
            running=int(pod.status.phase == "Running"),
            waiting=int(pod.status.phase == "Pending"),
            since=made_at.timestamp() if made_at else 0.0,
        )
        found.append(one)
    return _join_parts([one for one in found if one.run_id])


def _join_parts(parts: list[ClusterRunView]) -> list[ClusterRunView]:
    """Return one view for each run; runs of two users with the same id count as two."""
    joined: dict[tuple[str, str], ClusterRunView] = {}
    for part in parts:
        key = (part.run_id, part.who)
        joined[key] = joined[key].joined_with(part) if key in joined else part
    return sorted(joined.values(), key=lambda run: (run.since, run.run_id))
