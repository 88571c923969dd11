"""Which of many hits came first and led to the others."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.words.hits import Hit
from holdfast.core.words.outlived import lighten
from holdfast.core.words.prefixes import Said
from holdfast.core.words.rows import UNKNOWN
from holdfast.core.words.summary import Summary

_NEAR = 1.5  # weights this close say as much: then the first one counts
_TOLD = 1.5  # weight of a hint that nothing speaks against
_PER_NODE = 8  # ranks; where more are heard of there are more nodes
_NAMED = re.compile(r"\b(?:global )?[Rr]ank[ =:#]{1,2}(\d+)\b")
_PID = re.compile(r"(?:\bpid[=:' ]{1,2}|[Pp]rocess )(\d+)")


class Finding(msgspec.Struct, kw_only=True):
    root: Hit
    hits: list[Hit]
    summary: Summary

    @property
    def rank(self) -> int | None:
        """The rank that failed first. An echo's is not: it only lived long enough to say so."""
        root, summary = self.root, self.summary
        if root.named:
            return root.rank
        if root.row.role == "echo":
            return summary.root_rank if root.klass == UNKNOWN else None
        if root.rank is not None:
            return root.rank
        pids = [root.said.pid, *(int(pid) for pid in _PID.findall(root.said.text))]
        if owners := [summary.pids[pid] for pid in pids if pid in summary.pids]:
            return owners[0]
        if len(named := set(_NAMED.findall(root.said.text))) == 1:
            return int(named.pop())
        return summary.root_rank if summary.root_rank is not None else self._rank_of_others()

    def _rank_of_others(self) -> int | None:
        """Where the first words have no rank: that of the first cause that has one; or the place on a single node."""
        ranked = [hit for hit in self.hits if hit.row.role == "cause" and hit.rank is not None]
        if ranked:
            return _first(ranked, {}).rank
        if len(blamed := {hit.rank for hit in self.hits if hit.row.role == "context" and hit.named}) == 1:
            return blamed.pop()
        nodes, ranks = {hit.node for hit in self.hits if hit.node}, [hit.rank or 0 for hit in self.hits]
        if len(nodes) > 1 or max(ranks, default=0) >= _PER_NODE:
            return None  # there is more than one
        return self.root.said.device if self.root.said.device is not None else self.summary.local_rank

    @property
    def echoes(self) -> int:
        return sum(1 for hit in self.hits if hit.row.role == "echo" and hit is not self.root)


def root_of(hits: Sequence[Hit], lines: Sequence[Said], ended_at: Mapping[int, float]) -> Hit | None:
    lighten(hits, lines)
    causes = [hit for hit in hits if hit.row.role == "cause" and hit.weight >= 2]
    if causes:
        return _first(causes, ended_at)
    echoes = [hit for hit in hits if hit.row.role == "echo"] or [hit for hit in hits if hit.row.role == "cause"]
    top = max((hit.weight for hit in echoes), default=0.0)
    return _first([hit for hit in echoes if hit.weight == top], ended_at) if echoes else None


def hinted(hints: Sequence[Hit], lines: Sequence[Said]) -> Hit | None:
    """Of mere hints the weightiest, of equals the last: what is vague says the more the nearer the end it stands."""
    lighten(hints, lines)
    told = [hit for hit in hints if hit.weight >= _TOLD]
    return max(told, key=lambda hit: (hit.weight, hit.said.source, hit.said.index), default=None)


def rivals(finding: Finding) -> list[Hit]:
    """Others that might be the cause as well."""
    root = finding.root
    return [
        hit
        for hit in finding.hits
        if hit.row.role == "cause" and hit.klass != root.klass and hit.weight >= root.weight - _NEAR
    ]


def _first(hits: list[Hit], ended_at: Mapping[int, float]) -> Hit:
    """The first of those that say most; where nobody can tell the order, the weightiest."""
    top = max(hit.weight for hit in hits)
    near = [hit for hit in hits if hit.weight >= top - _NEAR]
    if len({hit.rank for hit in near}) > 1 and all(hit.rank in ended_at for hit in near):
        return min(near, key=lambda hit: (ended_at[hit.rank or 0], hit.said.source, hit.said.index, -hit.weight))
    if all(hit.said.at is not None for hit in near):
        return min(near, key=lambda hit: (hit.said.at, hit.said.source, hit.said.index, -hit.weight))
    if len({hit.said.source for hit in near}) == 1:
        return min(near, key=lambda hit: (hit.said.index, -hit.weight))
    return min(near, key=lambda hit: (-hit.weight, hit.said.source, hit.said.index))
