"""Which of many hits came first and led to the others."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.words.hits import Hit
from holdfast.core.words.prefixes import Said
from holdfast.core.words.summary import Summary

_NEAR = 1.5  # weights this close say as much: then the first one counts
_SURVIVED = 3  # weight that a hit loses if training went on after it
_PROOF = 8  # what a machine says of itself stays true although training goes on for a while
_GOING_ON = 3  # lines of progress that prove it
_PROVES = 50  # and that disprove even that
_PER_NODE = 8  # ranks; where more are heard of there are more nodes
_FAR = 2000  # lines after which any rank's progress proves the same
_STALE_S = 6 * 3600.0  # what the kernel said so long before the job's last words is another story
_NAMED = re.compile(r"\b(?:global )?[Rr]ank[ =:#]{1,2}(\d+)\b")
_PID = re.compile(r"(?:\bpid[=:' ]{1,2}|[Pp]rocess )(\d+)")
_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|batch)\w*\b[^\n]{0,80}\b(?:loss|lr|grad|ppl|acc|tokens)|it/s\b|s/it\b"
    r"|\bloss\b[^\n]{0,40}\d\.\d|\biteration +\d+/ *\d+",
    re.IGNORECASE,
)


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
        if root.row.role != "cause":
            return None
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
        nodes, ranks = {hit.node for hit in self.hits if hit.node}, [hit.rank or 0 for hit in self.hits]
        if len(nodes) > 1 or max(ranks, default=0) >= _PER_NODE:
            return None  # there is more than one
        return self.root.said.device if self.root.said.device is not None else self.summary.local_rank

    @property
    def echoes(self) -> int:
        return sum(1 for hit in self.hits if hit.row.role == "echo" and hit is not self.root)


def root_of(hits: Sequence[Hit], lines: Sequence[Said], ended_at: Mapping[int, float]) -> Hit | None:
    _lighten(hits, lines)
    causes = [hit for hit in hits if hit.row.role == "cause" and hit.weight >= 2]
    if causes:
        return _first(causes, ended_at)
    echoes = [hit for hit in hits if hit.row.role == "echo"] or [hit for hit in hits if hit.row.role == "cause"]
    top = max((hit.weight for hit in echoes), default=0.0)
    return _first([hit for hit in echoes if hit.weight == top], ended_at) if echoes else None


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


def _lighten(hits: Sequence[Hit], lines: Sequence[Said]) -> None:
    """What training survived is not what ended it."""
    going: dict[tuple[int, int | None], list[int]] = {}
    newest_step: dict[int, int] = {}  # by source
    for said in lines:
        if _PROGRESS.search(said.text[:400]):
            going.setdefault((said.source, said.rank), []).append(said.index)
            newest_step[said.source] = said.index
    newest = max((said.at for said in lines if said.at is not None and not said.kernel), default=None)
    for hit in hits:
        at = hit.said.at if hit.said.kernel else None
        later = [i for i in going.get((hit.said.source, hit.said.rank), ()) if i > hit.said.index]
        far = newest_step.get(hit.said.source, 0) > hit.said.index + _FAR
        if far or len(later) >= (_GOING_ON if hit.weight < _PROOF else _PROVES):
            sure = far or hit.said.rank is not None  # else it may be the progress of other ranks
            hit.weight = max(min(hit.weight - _SURVIVED, 3.0 if sure else 9.0), 0.5)
        if at is not None and newest is not None and newest - at > _STALE_S:
            hit.weight = min(hit.weight, 1.0)
