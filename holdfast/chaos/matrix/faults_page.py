"""Generator of docs/FAULTS.md: the expected and the actual outcome of every fault."""

import textwrap
from collections.abc import Iterable
from typing import Protocol

from holdfast.chaos.fault_catalog import KINDS
from holdfast.chaos.matrix.cells import HOWS, STRIKES, WHENS, MatrixCell, MatrixFault, all_cells
from holdfast.chaos.matrix.expectations import CellOutcome, ExpectedRow, fitting_rows

_HEAD = """# Faults

`python -m holdfast.chaos.matrix table` writes this page; do not edit it. Chaos injects every fault into real
jobs on one machine, trained with DDP, with FSDP2 and in a pipeline with replicas (4 ranks on gloo): while
training (idle), in the middle of a save, of a restore, and of an update. `make chaos` runs a covering array:
every pair of fault and way, fault and moment, way and moment. `make chaos ARGS=--full` runs the whole
product.

Oracles:

* **exact**: after every step every rank has the state of an undisturbed run, bit for bit.
* **blind**: nothing can see the fault, and the row says why. States differ from those of an undisturbed run,
  and training goes on.

After each cell a checkpoint must be published within 30 s (they are due every second or so). After each job
no sample is lost or seen twice, no process and nothing in `/dev/shm` is left, the journal replays to the same
decisions, spans tile the wall clock, and no node was evicted that was not struck.

"""


class ResultLine(Protocol):
    @property
    def cell(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def commit(self) -> str: ...
    @property
    def at(self) -> str: ...
    @property
    def wrong(self) -> tuple[str, ...]: ...
    @property
    def came(self) -> CellOutcome: ...


def render_page(rows: list[ExpectedRow], lines: Iterable[ResultLine]) -> str:
    known = {line.cell: line for line in lines}
    text = [
        _HEAD,
        _expected_table(rows),
        "\n## What came\n\n",
        _legend_text(known),
        _outcome_table(known),
        _left_out_text(),
    ]
    if failed := [line for line in known.values() if not line.ok]:
        text += ["\n## Not as expected\n\n", "| cell | commit | date | what |\n|---|---|---|---|\n"]
        text += [f"| {one.cell} | {one.commit} | {one.at} | {_escape_cell('; '.join(one.wrong))} |\n" for one in failed]
    return "".join(text)


def _expected_table(rows: list[ExpectedRow]) -> str:
    head = "| fault | what it does | where | verdict | evicted | restarts | steps lost, at most | oracle |\n"
    lines = [head, "|---|---|---|---|---|---|---|---|\n"]
    for strike in STRIKES:
        for row in [row for row in rows if row.strike == strike.name]:
            where = "/".join(filter(None, [row.how, row.when])) or "everywhere"
            where += f", seen by {row.alone}" if row.alone else ""
            oracle = f"**{row.oracle}**" + (f": {row.why}" if row.why else "") + (f"; {row.faint}" if row.faint else "")
            numbers = f"{row.verdict or 'none'} | {row.evicted} | {row.restarts} | {row.lost}"
            lines.append(
                f"| `{strike.name}` | {_fault_text(strike)} | {where} | {numbers} | {_escape_cell(oracle)} |\n"
            )
    return "".join(lines)


def _fault_text(strike: MatrixFault) -> str:
    return _escape_cell(KINDS[strike.fault.kind].what.partition(" (")[0])


def _legend_text(known: dict[str, ResultLine]) -> str:
    played = [line for line in known.values() if not line.came.skipped]
    commits = sorted({line.commit for line in played})
    good = sum(line.ok for line in played)
    said = f"{good} of {len(played)} cells that were played came as expected (commits {', '.join(commits)})."
    if skipped := sorted(line.cell for line in known.values() if line.came.skipped):
        said += f" {len(skipped)} more could not be played and were skipped: {', '.join(skipped)}."
    said += " `+` as expected, `-` not, `s` skipped as expected, a dot: not played yet, empty: see below."
    return f"{_wrap_text(said)}\n\n"


def _left_out_text() -> str:
    """Return the text that says why some faults run only at some moments."""
    names: dict[str, list[str]] = {}
    for strike in STRIKES:
        if strike.kept:
            names.setdefault(strike.kept, []).append(f"`{strike.name}`")
    items = (_wrap_text(f"* {', '.join(these)}: {why}", "  ") for why, these in names.items())
    return "\nLeft out:\n\n" + "".join(f"{item}\n" for item in items)


def _wrap_text(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _result_mark(line: ResultLine | None) -> str:
    if line is None:
        return "."
    return "-" if not line.ok else "s" if line.came.skipped else "+"


def _outcome_table(known: dict[str, ResultLine]) -> str:
    heads = [f"{how} {when}" for how in HOWS for when in WHENS]
    lines = [f"| fault | {' | '.join(heads)} |\n", f"|---|{'---|' * len(heads)}\n"]
    for strike in STRIKES:
        marks = []
        for how in HOWS:
            for when in WHENS:
                line = known.get(MatrixCell(strike.name, how, when).name)
                marks.append(_result_mark(line) if when in strike.whens else "")
        lines.append(f"| `{strike.name}` | {' | '.join(marks)} |\n")
    return "".join(lines)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def cells_without_rows(rows: list[ExpectedRow]) -> list[str]:
    """Return the names of cells without an expected outcome."""
    return [cell.name for cell in all_cells() if all(row.alone for row in fitting_rows(rows, cell))]
