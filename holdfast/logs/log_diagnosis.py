"""Diagnoses a job's failure from the logs of its ranks, their exit codes and the kernel's lines."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.core.incident.incident_text import UNORDERED
from holdfast.core.log_analysis.catalog_hits import find_hits
from holdfast.core.log_analysis.failure_catalog import UNKNOWN, FailureCatalog
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.holdfast_console_log import read_last_incident
from holdfast.core.log_analysis.line_prefixes import LogLine, parse_lines
from holdfast.linux.regular_files import open_file
from holdfast.logs.learned_words import LearnedWords
from holdfast.logs.learned_words_diagnosis import OOM_KILL, weigh_words
from holdfast.logs.telling_lines_reader import read_telling_lines
from holdfast.model.last_words_diagnosis import Diagnosis

_RANK = re.compile(r"(?:^|[-_.])rank[-_.]?(\d{1,6})(?=[-_.]|$)", re.IGNORECASE)  # rank3.txt, node1_rank3.log
_FOLDER = re.compile(r"(?:^|/)(?:rank[-_]?|attempt_\d+/)(\d{1,6})$", re.IGNORECASE)  # rank-3/; torchrun's attempt_0/3/
_OWN_END = "The script ended the rank itself: look for sys.exit where it stood."
_FIRST_LINE = "Traceback (most recent call last):"
_LOST_PEER = "peer_connection_lost"
_END_BYTES = 1 << 20
_ENDS = 64  # logs whose ends are read
_KERNEL = re.compile(r"kernel|dmesg|kern\.log|syslog|^messages", re.IGNORECASE)


class RankLog(msgspec.Struct, frozen=True, kw_only=True):
    """One log and the rank that wrote it."""

    open: Callable[[], BinaryIO]
    rank: int | None = None
    kernel: bool = False


class ProcessEnds(msgspec.Struct, frozen=True, kw_only=True):
    """How a job's processes ended; unset where nobody knows."""

    code: int | None = None  # of the launcher, or of the only process
    codes: Mapping[int, int] = {}  # by rank
    at: Mapping[int, float] = {}  # by rank: when
    starved: bool | None = None  # whether the kernel killed for want of memory; None: nobody has looked
    pressed: str = ""  # where nobody can know that: the sign that memory was scarce just before
    went_on: bool = False  # the same job made steps afterwards
    verdict: str = ""  # what the run itself found, in its words
    group: str = ""  # and whose fault that is, in the taxonomy's words


def open_log(path: Path) -> RankLog:
    """Return the log at this path. The path tells which rank wrote it, and whether it is a kernel log."""
    found = _RANK.search(path.name) or _FOLDER.search("/".join(path.parts[-3:-1]))
    rank = int(found[1]) if found else None
    return RankLog(open=lambda: open_file(path), rank=rank, kernel=bool(_KERNEL.search(path.name)))


def diagnose_logs(
    logs: Sequence[RankLog],
    ends: ProcessEnds,
    catalog: FailureCatalog,
    progress: Callable[[int], None] | None = None,
    learned: LearnedWords | None = None,
) -> Diagnosis:
    """Diagnose the job that wrote these logs, by the rules and any learned words. Calls `progress` while it reads large
    logs."""
    lines = read_log_lines(logs, catalog, progress)
    case = FailureEvidence(
        lines=lines,
        code=ends.code,
        codes=ends.codes,
        ended_at=ends.at,
        starved=ends.starved,
        pressed=ends.pressed,
    )
    found = classify_failure(case, catalog)
    if learned and not ends.verdict and read_last_incident(lines) is None:  # holdfast itself has seen more than words
        weighed = weigh_words(found, lines, ends.code, catalog, learned)
        if ends.starved is None or OOM_KILL not in (found.klass, weighed.klass):  # else the kernel has told
            found = weighed
    found = msgspec.structs.replace(found, went_on=found.went_on or ends.went_on)
    return _follow_verdict(found, ends) if ends.verdict else found


def read_log_lines(
    logs: Sequence[RankLog], catalog: FailureCatalog, progress: Callable[[int], None] | None = None
) -> list[LogLine]:
    """Parse all logs, and return the lines that may help a diagnosis."""
    lines: list[LogLine] = []
    for source, log in enumerate(logs):
        with log.open() as file:
            heard = parse_lines(read_telling_lines(file, catalog, progress), source, log.rank)
        for said in heard if log.kernel else ():
            said.kernel = True
        lines += heard
    return lines


def _follow_verdict(found: Diagnosis, ends: ProcessEnds) -> Diagnosis:
    """Return the diagnosis with the run's own verdict first in its explanation, before what the ranks' logs say."""
    silent = found.klass == UNKNOWN
    said = f"The run found: {ends.verdict}."
    if not silent and ends.verdict not in found.explanation:
        said = f"{said} {found.explanation}"
    elif not silent:
        said = found.explanation
    hint = found.hint if found.confidence else ""  # where nothing was found, it asks for other logs
    found = msgspec.structs.replace(found, verdict=ends.verdict, explanation=said, hint=hint)
    if UNORDERED in ends.verdict:
        return msgspec.structs.replace(found, root_rank=None, node="")
    if len(ends.at) > 1 and all(code < 0 for code in ends.codes.values()):  # which says more than their lowest number
        return msgspec.structs.replace(found, root_rank=min(ends.at, key=lambda rank: ends.at[rank]))
    if found.root_rank is None and len(ends.codes) == 1:
        found = msgspec.structs.replace(found, root_rank=next(iter(ends.codes)))
    if not silent or ends.group != "script":
        return found
    return msgspec.structs.replace(found, group=ends.group, action="rollback_or_fix_code", hint=_OWN_END)


def is_echo(exception: str, catalog: FailureCatalog) -> bool:
    """Return whether the last line of a traceback only says that another rank failed first."""
    lines = (_FIRST_LINE, '  File "train.py", line 1, in <module>', exception)
    hits = find_hits(parse_lines(list(enumerate(lines)), 0), catalog)
    return bool(hits) and max(hits, key=lambda hit: hit.weight).row.role == "echo"


def is_lost_peer(report: Sequence[str], catalog: FailureCatalog) -> bool:
    """Return whether an error from torch's C++ code only says that a peer is gone."""
    hits = find_hits(parse_lines(list(enumerate(report)), 0), catalog)
    return any(hit.row.klass == _LOST_PEER for hit in hits) and all(hit.row.role != "cause" for hit in hits)


def read_whole(logs: Sequence[RankLog]) -> Iterator[bytes]:
    """Yield these logs whole, in chunks; `read_log_lines` keeps only lines that may help a diagnosis."""
    for log in logs:
        with log.open() as file:
            while chunk := file.read(1 << 20):
                yield chunk
        yield b"\n"


def read_ends(logs: Sequence[RankLog]) -> Iterator[bytes]:
    """Yield the ends of the first few logs."""
    for log in logs[:_ENDS]:
        with log.open() as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            yield file.read(_END_BYTES)
        yield b"\n"
