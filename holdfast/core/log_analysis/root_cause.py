"""Finds the root cause: which of many hits came first and led to the others."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.failure_catalog import UNKNOWN
from holdfast.core.log_analysis.gpu_fault_order import discount_followers
from holdfast.core.log_analysis.launcher_summary import LauncherSummary
from holdfast.core.log_analysis.line_prefixes import LogLine
from holdfast.core.log_analysis.nccl_closed_peers import discount_wrappers
from holdfast.core.log_analysis.survived_errors import discount_survived

_NEAR = 1.5  # weights this close say as much: then the first one counts
_TOLD = 1.5  # weight of a hint that nothing speaks against
_PER_NODE = 8  # ranks; where more are heard of there are more nodes
_NAMED = re.compile(r"\b(?:global )?[Rr]ank[ =:#]{1,2}(\d+)\b")
_PID = re.compile(r"(?:\bpid[=:' ]{1,2}|[Pp]rocess )(\d+)")


class CauseFinding(msgspec.Struct, kw_only=True):
    root: CatalogHit
    hits: list[CatalogHit]
    summary: LauncherSummary

    @property
    def rank(self) -> int | None:
        """The rank that failed first; None if unknown. A rank that only reports another's failure does not count."""
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
        """Return the rank to name for a root hit without a rank. It comes from other hits, or from the device or local
        rank in the log. Return None if nothing names a rank or several ranks are possible."""
        ranked = [hit for hit in self.hits if hit.row.role == "cause" and hit.rank is not None]
        if ranked:
            return _first_hit(ranked, {}).rank
        if len(blamed := {hit.rank for hit in self.hits if hit.row.role == "context" and hit.named}) == 1:
            return blamed.pop()
        nodes, ranks = {hit.node for hit in self.hits if hit.node}, [hit.rank or 0 for hit in self.hits]
        if len(nodes) > 1 or max(ranks, default=0) >= _PER_NODE:
            return None  # there is more than one
        return self.root.said.device if self.root.said.device is not None else self.summary.local_rank

    @property
    def echoes(self) -> int:
        """Return how many lines only report another failure (echoes). The root cause's own line does not count."""
        lines = {(hit.said.source, hit.said.index) for hit in self.hits if hit.row.role == "echo"}
        return len(lines - {(self.root.said.source, self.root.said.index)})


def find_root(hits: Sequence[CatalogHit], lines: Sequence[LogLine], ended_at: Mapping[int, float]) -> CatalogHit | None:
    discount_followers(hits)
    discount_wrappers(hits, lines)
    discount_survived(hits, lines)
    causes = [hit for hit in hits if hit.row.role == "cause" and hit.weight >= 2]
    if causes:
        return _first_hit(causes, ended_at)
    echoes = [hit for hit in hits if hit.row.role == "echo"] or [hit for hit in hits if hit.row.role == "cause"]
    top = max((hit.weight for hit in echoes), default=0.0)
    return _first_hit([hit for hit in echoes if hit.weight == top], ended_at) if echoes else None


def best_hint(hints: Sequence[CatalogHit], lines: Sequence[LogLine]) -> CatalogHit | None:
    """Return the heaviest hint, or None if all are too light. Errors that the job survived weigh less. Among equally
    heavy hints the last one wins, because later lines say more."""
    discount_survived(hints, lines)
    told = [hit for hit in hints if hit.weight >= _TOLD]
    return max(told, key=lambda hit: (hit.weight, hit.said.source, hit.said.index), default=None)


def rival_causes(finding: CauseFinding) -> list[CatalogHit]:
    """Return hits of other classes that are about as heavy as the root cause, and could be the cause instead."""
    root = finding.root
    return [
        hit
        for hit in finding.hits
        if hit.row.role == "cause" and hit.klass != root.klass and hit.weight >= root.weight - _NEAR
    ]


def _first_hit(hits: list[CatalogHit], ended_at: Mapping[int, float]) -> CatalogHit:
    """Return the earliest of the hits with nearly the highest weight. If no times are known, return the heaviest."""
    top = max(hit.weight for hit in hits)
    near = [hit for hit in hits if hit.weight >= top - _NEAR]
    if len({hit.rank for hit in near}) > 1 and all(hit.rank in ended_at for hit in near):
        return min(near, key=lambda hit: (ended_at[hit.rank or 0], hit.said.source, hit.said.index, -hit.weight))
    if all(hit.said.at is not None for hit in near):
        return min(near, key=lambda hit: (hit.said.at, hit.said.source, hit.said.index, -hit.weight))
    if len({hit.said.source for hit in near}) == 1:
        return min(near, key=lambda hit: (hit.said.index, -hit.weight))
    return min(near, key=lambda hit: (-hit.weight, hit.said.source, hit.said.index))
