"""Discounts errors that did not end the job: training went on, a retry followed, or they are from an earlier run."""

import re
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from holdfast.core.log_analysis.benign_lines import MACHINES
from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.line_prefixes import LogLine

_LESS = 3  # weight that a hit loses if training went on after it
_PROOF = 8  # what a machine says of itself stays true although training goes on for a while
_GOING_ON = 3  # lines of progress that prove it
_OF_ANYONE = 5  # where they are another rank's: ranks wait for one another
_PROVES = 50  # and that disprove even a machine's word
_FAR = 2000  # lines after which any rank's progress proves the same
_STOPPED = "preempted_cancelled"
_KILLED_S = 600.0  # no scheduler lets a stopped job live so long
_STALE_S = 6 * 3600.0  # what the kernel said so long before the job's last words is another story
_OUT_OF_PLACE = 0.5  # weight of what a row says of another stage of the job
_SOON = 3  # lines after a failure in which it is said that it is tried again
_CLEAR = 4.0  # weight of a cause that ends a run
_LOUD = 4.0  # weight of an echo that says how a run ended
_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|batch)\w*\b[^\n]{0,80}\b(?:loss|lr|grad|ppl|acc|tokens)|it/s\b|s/it\b"
    r"|\bloss\b[^\n]{0,40}\d\.\d|\biteration +\d+/ *\d+",
    re.IGNORECASE,
)
_BROKEN = re.compile(r"\b(?:loss|norm)\b[^\n]{0,20}\b(?:nan|inf)\b", re.IGNORECASE)  # goes on, but for nothing
_AGAIN = re.compile(
    r"^\W*(?:(?:will|now|going to) )?(?:retry(?:ing)?|trying again|reconnecting|re-?attempting)\b"
    r"|\bretry \d+/\d+|\b(?:succeeded|recovered|ok(?:ay)?) (?:after|on|at) (?:\w+ )?(?:retry|attempt|\d+ )"
    r"|\bfailed, trying (?:batch size|again|with)\b",
    re.IGNORECASE,
)
_NEW_RUN = re.compile(
    r"^(?:#{3,}|={3,}|-{3,}|\*{3,}|>{3,}|\[[\w-]+\])\s?.{0,60}\b(?:re-?start\w*|re-?launch\w*|re-?submi\w+|requeued?"
    r"|(?:new |begin |start of )?(?:run|attempt|launch|job)\b[ #:=]{1,3}\d)"
    r"|\b(?:job|run|training)\b.{0,40}\b(?:re-?started|re-?launched|requeued|re-?submitted)\b.{0,40}\bon\b"
    r"|\bSLURM_RESTART_COUNT[ =:]{1,3}[1-9]|\bRequeued? (?:count|job)\b|\bRestarts?=[1-9]",
    re.IGNORECASE,
)
_UP = re.compile(
    r"\b(?:link|port|carrier|interface)\b.{0,40}\b(?:is |becomes |went |now )?(?:up|active|restored|back)\b"
    r"|\bPORT_ACTIVE\b|\bport active\b|\b(?:status is now|now): ?(?:Node)?Ready\b|\bNodeReady\b",
    re.IGNORECASE,
)
_THING = re.compile(
    r"\b(?:mlx\d_\w+|ibp?\w*\d\w*|e(?:th|ns|np|no)\w*\d\w*|bond\d+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)\b"
)
_WRONG_PATH = "file_not_found"  # after many steps it may be the storage: a path that was right for so long
_AT_START = frozenset(
    {"dns_ssh_launch", "rendezvous_timeout", "nccl_init_config"}
)  # what fails before training, not in its midst


class _Source(msgspec.Struct):
    """The line numbers at which one log shows progress, retries, devices that came back, and a new run."""

    going: dict[int | None, list[int]] = {}  # progress, by rank
    steps: list[int] = []  # progress, anyone's
    again: set[int] = set()
    up: dict[str, int] = {}  # by device: when it last came back
    run: int = -1  # where the newest run begins


def discount_survived(hits: Sequence[CatalogHit], lines: Sequence[LogLine]) -> None:
    """Reduce the weight of hits that later lines contradict."""
    sources = _read_sources(lines)
    newest = max((said.at for said in lines if said.at is not None and not said.kernel), default=None)
    echoed = max((hit.said.index for hit in hits if hit.row.role == "echo" and hit.weight >= _LOUD), default=-1)
    for hit in hits:
        log = sources[hit.said.source]
        _discount_progress(hit, log, echoed=echoed > hit.said.index)
        _discount_retry(hit, log)
        at = hit.said.at if hit.said.kernel else None
        if at is not None and newest is not None and newest - at > _STALE_S:
            hit.weight = min(hit.weight, 1.0)
    _discount_earlier_lives(hits)
    for number, log in sources.items():
        _discount_earlier_runs([hit for hit in hits if hit.said.source == number], log)


def _read_sources(lines: Sequence[LogLine]) -> dict[int, _Source]:
    found: dict[int, _Source] = {}
    for said in lines:
        log = found.setdefault(said.source, _Source())
        text = said.text[:400]
        if _PROGRESS.search(text) and not _BROKEN.search(text):
            log.going.setdefault(said.rank, []).append(said.index)
            log.steps.append(said.index)
        if _AGAIN.search(text):
            log.again.add(said.index)
        if _UP.search(text):
            log.up |= dict.fromkeys(_THING.findall(text), said.index)
        if _NEW_RUN.search(text):
            log.run = said.index
    return found


def _discount_progress(hit: CatalogHit, log: _Source, *, echoed: bool) -> None:
    index = hit.said.index
    mine = log.going.get(hit.said.rank, [])
    later = len(mine) - bisect_right(mine, index)
    before = bisect_right(log.steps, index)
    anyone = len(log.steps) - before
    far = bool(log.steps) and log.steps[-1] > index + _FAR
    if hit.row.stage and (hit.row.stage == "training") != (before >= _GOING_ON):
        hit.weight = _OUT_OF_PLACE
        return
    proof = hit.weight >= _PROOF and hit.klass in MACHINES
    mere = hit.raised is None and not hit.said.kernel and not proof  # nobody says that it ended a process
    if far or later >= (_PROVES if proof else _GOING_ON) or (mere and anyone >= _OF_ANYONE):
        sure = far or hit.said.rank is not None or (mere and anyone >= _OF_ANYONE)  # else it may be other ranks'
        hit.weight = max(min(hit.weight - _LESS, 3.0 if sure else 9.0), 0.5)
        if mere and echoed and hit.row.role == "cause":
            hit.weight = min(hit.weight, 1.5)  # what it was is told by how the others ended
    if hit.klass == _WRONG_PATH and before >= _PROVES:
        hit.weight = max(hit.weight - 1, 0.5)
    if hit.klass in _AT_START and before >= _GOING_ON:
        hit.weight = max(min(hit.weight - _LESS, 1.5 if mere and echoed else 9.0), 0.5)


def _discount_retry(hit: CatalogHit, log: _Source) -> None:
    index = hit.said.index
    if hit.row.role == "cause" and any(near in log.again for near in range(index + 1, index + 1 + _SOON)):
        hit.weight = max(hit.weight - _LESS, 0.5)
    if hit.weight >= _CLEAR and any(log.up.get(thing, -1) > index for thing in _THING.findall(hit.said.text)):
        hit.weight = max(min(hit.weight - _LESS, _CLEAR), 0.5)  # it came back


def _discount_earlier_lives(hits: Sequence[CatalogHit]) -> None:
    """Reduce the weight of a deliberate stop if a process raised long after it: the stop ended an earlier run."""
    raised = (hit.said.at for hit in hits if hit.raised and hit.raised.frames)
    newest = max((at for at in raised if at is not None), default=None)
    for hit in hits:
        at = hit.said.at if hit.klass == _STOPPED and hit.row.role == "cause" else None
        if at is not None and newest is not None and newest - at > _KILLED_S:
            hit.weight = min(hit.weight, 1.0)


def _discount_earlier_runs(hits: Sequence[CatalogHit], log: _Source) -> None:
    """Reduce the weight of hits from earlier runs in this log, if the newest run has a clear cause of its own."""
    now = [hit for hit in hits if hit.said.index > log.run and hit.row.role == "cause" and hit.weight >= _CLEAR]
    for hit in hits if log.run >= 0 and now else ():
        if hit.said.index < log.run:
            hit.weight = min(hit.weight, 1.0)
