"""Finds ranks that wait in different collectives under one sequence number: their code has taken different paths."""

import re
from collections.abc import Iterator, Sequence

from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.failure_catalog import CatalogRow
from holdfast.core.log_analysis.line_prefixes import LogLine

_WORK = re.compile(
    r"\bRank (?P<rank>\d{1,6})\][^\n]{0,200}"
    r"\bWorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+), NumelIn=(?P<size>\d+)"
)
_GROUP = re.compile(r"\[PG (?:ID )?([\w()-]{1,40})")
_OF_ONE_SIZE = frozenset({"ALLREDUCE", "BROADCAST"})  # every rank gives as many numbers as the others
_ONE_TO_ONE = frozenset({"SEND", "RECV", "UNKNOWN", "COALESCED"})  # ranks do differ in these
_CHARS = 600
_FEW = 50  # of several unnamed groups two may have come equally far
_PARTED = CatalogRow(
    klass="framework_runtime_error",
    source="ranks that wait in different collectives",
    weight=6,
    hint="The ranks run different collectives at the same place: look for a branch that not every rank takes.",
)


def find_mismatch(lines: Sequence[LogLine]) -> Iterator[CatalogHit]:
    """Yield a hit for the first rank whose collective differs from the first one seen under the same number."""
    seen: dict[tuple[str, int], tuple[str, int]] = {}
    for said in lines:
        found = _WORK.search(said.raw[:_CHARS]) if "WorkNCCL(" in said.text else None
        if found is None or found["kind"] in _ONE_TO_ONE:
            continue
        named = _GROUP.search(said.raw[:_CHARS])
        group, number = named[1] if named else "", int(found["number"])
        if not group and number < _FEW:
            continue
        mine = (found["kind"], int(found["size"]) if found["kind"] in _OF_ONE_SIZE else 0)
        if seen.setdefault((group, number), mine) != mine:
            yield CatalogHit(row=_PARTED, said=said, weight=_PARTED.weight, rank=int(found["rank"]), named=True)
            return
