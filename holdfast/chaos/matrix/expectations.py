"""Expected outcomes of the matrix's cells, and their comparison with what happened in the job."""

import tomllib
from pathlib import Path

import msgspec

from holdfast.chaos.matrix.cells import MatrixCell

_FILE = Path(__file__).with_name("expected.toml")
INJECTED = "it was injected, and was expected to be impossible"
NOT_BACK = "the job did not come back"
NOT_STORED = "no checkpoint was written after it"
NOT_COMPARED = "no state was compared"
NOTHING_DIFFERS = "no state differs from an undisturbed run's, so the fault changed nothing"


class ExpectedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strike: str
    oracle: str  # exact, blind, skipped
    how: str = ""  # any
    when: str = ""
    verdict: str = ""
    evicted: int = 0
    restarts: int = 0
    lost: int = 0  # steps, at most
    alarm: str = ""  # of this kind, at least; and what the fault's own truth says
    alone: str = ""  # only where every alarm that was acted on was of this kind
    why: str = ""
    faint: str = ""  # of a blind one: why states may be those of an undisturbed run all the same


class CellOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one cell."""

    verdict: str = ""
    evicted: tuple[str, ...] = ()
    guilty: tuple[str, ...] = ()  # nodes that were struck
    restarts: int = 0
    lost: int = 0
    alarms: tuple[str, ...] = ()
    acted: tuple[str, ...] = ()  # those kinds of them that were acted on
    unseen: tuple[str, ...] = ()  # faults without an alarm that should have followed
    misnamed: tuple[str, ...] = ()  # faults whose alarms named none of the nodes that were struck
    back: bool = True
    stored: bool = True  # whether checkpoints were written again
    differing: int = 0  # states of ranks after a step that are not those of an undisturbed run
    compared: int = 0
    skipped: str = ""


class ExpectedRows(msgspec.Struct, frozen=True):
    row: list[ExpectedRow]


def load_rows(path: Path = _FILE) -> list[ExpectedRow]:
    return msgspec.convert(tomllib.loads(path.read_text()), ExpectedRows).row


def fitting_rows(rows: list[ExpectedRow], cell: MatrixCell) -> list[ExpectedRow]:
    return [r for r in rows if r.strike == cell.strike and r.how in ("", cell.how) and r.when in ("", cell.when)]


def closest_row(rows: list[ExpectedRow], cell: MatrixCell) -> ExpectedRow:
    """Return the most specific row for a cell that has not run yet. Rows that depend on an alarm do not count."""
    return _most_specific([row for row in fitting_rows(rows, cell) if not row.alone])


def judging_row(rows: list[ExpectedRow], cell: MatrixCell, came: CellOutcome) -> ExpectedRow:
    """Return the most specific row of expectations for a cell, given the alarms on which the job acted."""
    alone = came.acted[0] if len(came.acted) == 1 else ""
    return _most_specific([row for row in fitting_rows(rows, cell) if row.alone in ("", alone)])


def _most_specific(rows: list[ExpectedRow]) -> ExpectedRow:
    return max(rows, key=lambda row: (bool(row.alone), bool(row.how) + bool(row.when)))


def find_deviations(row: ExpectedRow, came: CellOutcome) -> list[str]:
    """Return one sentence for each deviation of the outcome from the expected row."""
    if came.skipped:
        return [] if row.oracle == "skipped" else [f"skipped: {came.skipped}"]
    found = []
    if row.oracle == "skipped":
        found.append(INJECTED)
    if not came.back:
        found.append(NOT_BACK)
    if not came.stored:
        found.append(NOT_STORED)
    if came.verdict != row.verdict:
        found.append(f"the verdict is '{came.verdict or 'nothing'}', not '{row.verdict or 'nothing'}'")
    if len(came.evicted) != row.evicted:
        found.append(f"{len(came.evicted)} nodes were evicted ({', '.join(came.evicted)}), not {row.evicted}")
    if innocent := [node for node in came.evicted if came.guilty and node not in came.guilty]:
        found.append(f"{', '.join(innocent)} was evicted without cause")
    if came.restarts != row.restarts:
        found.append(f"{came.restarts} restarts, not {row.restarts}")
    if came.lost > row.lost:
        found.append(f"{came.lost} steps were lost, more than {row.lost}")
    if row.alarm and row.alarm not in came.alarms:
        found.append(f"no alarm of kind {row.alarm} came, but {', '.join(came.alarms) or 'none'}")
    if came.unseen:
        found.append(f"no alarm followed {', '.join(came.unseen)}")
    if came.misnamed:
        found.append(f"the alarm that followed {', '.join(came.misnamed)} named another node")
    if row.oracle == "exact" and came.differing:
        found.append(f"{came.differing} of {came.compared} states differ from an undisturbed run's")
    if row.oracle == "blind" and came.compared and not came.differing and not row.faint:
        found.append(NOTHING_DIFFERS)
    if row.oracle != "skipped" and not came.compared:
        found.append(NOT_COMPARED)
    return found
