"""The logs of a job's ranks, with their exit codes and the kernel's lines: which failure it was."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.core.words.hits import hits_of
from holdfast.core.words.judging import Case, judge
from holdfast.core.words.prefixes import Said, said_of
from holdfast.core.words.rows import Catalog
from holdfast.logs.reading import read
from holdfast.model.diagnosis import Diagnosis

_RANK = re.compile(r"(?:^|[-_.])rank[-_.]?(\d{1,6})(?=[-_.]|$)", re.IGNORECASE)  # rank3.txt, node1_rank3.log
_FOLDER = re.compile(r"(?:^|/)(?:rank[-_]?|attempt_\d+/)(\d{1,6})$", re.IGNORECASE)  # rank-3/; torchrun's attempt_0/3/
_FIRST_LINE = "Traceback (most recent call last):"
_KERNEL = re.compile(r"kernel|dmesg|kern\.log|syslog|^messages", re.IGNORECASE)


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """One log, and whose it is."""

    open: Callable[[], BinaryIO]
    rank: int | None = None
    kernel: bool = False


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """How processes ended, where somebody knows."""

    code: int | None = None  # of the launcher, or of the only process
    codes: Mapping[int, int] = {}  # by rank
    at: Mapping[int, float] = {}  # by rank: when
    starved: bool | None = None  # whether the kernel killed for want of memory; None: nobody has looked
    pressed: str = ""  # where nobody can know that: the sign that memory was scarce just before


def log_of(path: Path) -> Log:
    """A file, by its name."""
    found = _RANK.search(path.name) or _FOLDER.search("/".join(path.parts[-3:-1]))
    rank = int(found[1]) if found else None
    return Log(open=lambda: path.open("rb"), rank=rank, kernel=bool(_KERNEL.search(path.name)))


def diagnose(
    logs: Sequence[Log], ends: Ends, catalog: Catalog, progress: Callable[[int], None] | None = None
) -> Diagnosis:
    """What became of the job that wrote these. `progress` is told how many bytes of a log have been read."""
    lines: list[Said] = []
    for source, log in enumerate(logs):
        with log.open() as file:
            heard = said_of(read(file, catalog, progress), source, log.rank)
        for said in heard if log.kernel else ():
            said.kernel = True
        lines += heard
    case = Case(
        lines=lines,
        code=ends.code,
        codes=ends.codes,
        ended_at=ends.at,
        starved=ends.starved,
        pressed=ends.pressed,
    )
    return judge(case, catalog)


def is_echo(exception: str, catalog: Catalog) -> bool:
    """Whether the last line of a traceback only says that somebody else failed first."""
    lines = (_FIRST_LINE, '  File "train.py", line 1, in <module>', exception)
    hits = hits_of(said_of(list(enumerate(lines)), 0), catalog)
    return bool(hits) and max(hits, key=lambda hit: hit.weight).row.role == "echo"


def whole(logs: Sequence[Log]) -> Iterator[bytes]:
    """All of it once more, in pieces, for who wants to look at more than the telling lines."""
    for log in logs:
        with log.open() as file:
            while chunk := file.read(1 << 20):
                yield chunk
        yield b"\n"
