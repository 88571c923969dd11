"""The user's own catalog rows, and proposed rows, which have no effect until a person accepts them."""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from holdfast.config import ConfigError, WordLimits
from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog
from holdfast.decoding import from_toml
from holdfast.logs.regex_safety import find_pattern_fault

_PROPOSED = 200  # kept; who does not look at them needs no more
_FIELDS = (
    "klass",
    "pattern",
    "weight",
    "role",
    "code",
    "raised",
    "stage",
    "frames",
    "needle",
    "witness",
    "group",
    "action",
)
INCOMPLETE = "has no pattern or no sample"
UNUSABLE = "cannot be used"
UNMATCHED = "does not match its own sample"
MEANINGLESS = "says nothing"
_TELLING = ("sample", "samples", "source", "hint")
# A pattern that finds one of these says nothing.
_ORDINARY = (
    "step 1200 loss 2.3187 grad_norm 0.9121 lr 3.0e-04 tokens/s 182311",
    "Epoch 3:  42%|████▏     | 420/1000 [01:10<01:37,  5.97it/s, loss=1.83]",
    "INFO:root:saving checkpoint to /workspace/ckpt/step-1200",
    "Traceback (most recent call last):",
    '  File "/workspace/train.py", line 88, in main',
    "RuntimeError: ",
    "ERROR: failed",
)


def user_rows_path(limits: WordLimits) -> Path:
    """Return the path of the file with the user's own rows."""
    if limits.catalog:
        return Path(limits.catalog)
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(os.environ.get("HOLDFAST_HOME") or Path(config) / "holdfast") / "words.toml"


def past_cases_path() -> Path:
    """Return the path of the user's store of past failures, which is the same whatever catalog a job uses."""
    return user_rows_path(WordLimits()).with_name("past_cases.json")


def read_user_rows(path: Path) -> tuple[CatalogRow, ...]:
    """Return the rows of a file; empty if there is no such file. Raises ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the catalog {path}: {e}") from None
    try:
        return msgspec.convert(from_toml(text).get("row", []), tuple[CatalogRow, ...])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise ConfigError(f"the catalog {path} cannot be understood: {e}") from None


def find_faults(rows: Iterable[CatalogRow], catalog: FailureCatalog) -> Iterator[str]:
    """Yield what is wrong with each row. A row is checked against the catalog and the rows before it."""
    rows = tuple(rows)
    for at, row in enumerate(rows):
        if fault := find_row_fault(row, (*catalog.rows, *rows[:at]), frozenset(catalog.classes)):
            yield f"the row '{(row.pattern or str(row.code))[:60]}' {fault}"


def find_row_fault(row: CatalogRow, others: Iterable[CatalogRow], classes: frozenset[str]) -> str:
    if row.klass not in classes:
        return f"has an unknown class: {row.klass}"
    if row.code is not None and not row.pattern:
        taken = next((other.klass for other in others if other.code == row.code and not other.pattern), "")
        return f"claims an exit code that a row of {taken} has already" if taken else ""
    if not row.pattern or not row.all_samples:
        return INCOMPLETE
    if not 1 <= row.weight <= 9:
        return f"has weight {row.weight}; give one from 1 to 9"
    if fault := find_pattern_fault(row.pattern):
        return fault
    try:
        mine = FailureCatalog((row,))
        for demand in (row.raised, row.frames):
            re.compile(demand)
    except (re.error, ValueError) as e:
        return f"{UNUSABLE}: {e}"
    if missed := [sample for sample in row.all_samples if not mine.match_line(sample)]:
        return f"{UNMATCHED}: {missed[0][:80]}"
    if row.raised or row.frames:
        return ""  # it speaks of tracebacks only, and what those demand no single line shows
    if found := next((line for line in _ORDINARY if mine.match_line(line)), ""):
        return f"{MEANINGLESS}: it matches ordinary lines such as '{found.strip()}'"
    return _find_collision(row, mine, others)


def _find_collision(row: CatalogRow, mine: FailureCatalog, others: Iterable[CatalogRow]) -> str:
    """Return how a row conflicts with rows of other classes; empty if it does not. Rows conflict if both match a sample
    of one of them, and the weights do not decide for the sample's own row."""
    strangers = [
        other for other in others if other.klass != row.klass and other.pattern and not (other.raised or other.frames)
    ]
    theirs = FailureCatalog(tuple(other for other in strangers if other.weight == row.weight))
    for sample in row.all_samples:
        if met := theirs.match_line(sample):
            return f"collides with a row of {met[0].klass} of the same weight, which matches its sample too"
    for other in strangers:
        if other.weight <= row.weight and (taken := next((s for s in other.all_samples if mine.match_line(s)), "")):
            return f"would call {other.klass} {row.klass}: {taken[:80]}"
    return ""


def add_rows(rows: Iterable[CatalogRow], path: Path) -> None:
    """Append rows to the user's file; existing rows and comments stay unchanged."""
    _write_rows(path, "".join(f"\n{format_row(row)}" for row in rows), append=True)


def propose_row(row: CatalogRow, path: Path) -> str:
    """Save a row for a person to review; return its id. Raise ConfigError if too many wait or writing fails."""
    import hashlib  # and OpenSSL with it, for which nobody who only reads rows has to wait

    folder = path.with_name("proposals")
    name = "p" + hashlib.sha256(f"{row.klass}\0{row.pattern}".encode()).hexdigest()[:8]
    if len(list(folder.glob("p*.toml"))) >= _PROPOSED:
        raise ConfigError(f"there are {_PROPOSED} proposals in {folder} already; accept or remove some")
    _write_rows(folder / f"{name}.toml", format_row(row), append=False)
    return name


def list_proposals(path: Path) -> dict[str, Path]:
    """Return the files of proposed rows, by id."""
    return {file.stem: file for file in sorted(path.with_name("proposals").glob("p*.toml"))}


def format_row(row: CatalogRow) -> str:
    """Return a row as TOML, with strings written as in JSON."""
    lines = ["[[row]]"]
    for name in (*_FIELDS, *_TELLING):
        value = getattr(row, name)
        if value not in ("", (), None):
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _write_rows(path: Path, text: str, *, append: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if append and path.exists() else ""
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        with new.open("x", encoding="utf-8") as file:  # through no link
            file.write(before + text)
        new.replace(path)  # whole or not at all
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from None
