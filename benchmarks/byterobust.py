"""ByteRobust's evaluation, repeated here: its tables beside what we measure, live where a fault can be made here.

`make bench-byterobust ARGS="causes rungs"` does parts of it. BENCH_FULL=1 keeps each part in benchmarks/out/ until all
that was asked for is done, and then makes a record; one of parts has their names in its own.
"""

import sys
from collections.abc import Callable

from rich.table import Table

from benchmarks._byterobust_causes import causes
from benchmarks._byterobust_ettr import ettr
from benchmarks._byterobust_groups import groups, hangs
from benchmarks._byterobust_part import Part
from benchmarks._byterobust_rungs import rungs
from benchmarks._byterobust_symptoms import symptoms
from benchmarks._kept import Kept
from benchmarks._report import Findings, report

PARTS: dict[str, Callable[[], Part]] = {
    "causes": causes,
    "rungs": rungs,
    "groups": groups,
    "hangs": hangs,
    "symptoms": symptoms,
    "ettr": ettr,
}
SKIPPED = {
    "table 8, every step beside other savers": "needs a GPU: `make bench-byterobust_gpu`",
    "MFU per release": "needs a GPU: `make bench-byterobust_gpu`",
}


def main(asked: list[str]) -> int:
    if strange := [name for name in asked if name not in PARTS]:
        print(f"bench-byterobust: there is no part {', '.join(strange)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    kept, findings, runs = Kept("byterobust"), Findings(skipped=dict(SKIPPED)), dict[str, list[float | None]]()
    table = Table("what", "here", "ByteRobust", "", title=(__doc__ or "").partition("\n")[0])
    for name in asked or PARTS:
        part = kept.part(name, Part, PARTS[name])
        for row in part.rows:
            table.add_row(*row)
        findings.figures |= {f"{name}_{key}": value for key, value in part.figures.items()}
        findings.figures |= {f"{name}_load": part.load, f"{name}_commit": part.commit}
        findings.goals |= part.goals
        findings.skipped |= part.skipped
        runs |= {f"{name} {key}": values for key, values in part.runs.items()}
    findings.skipped |= {name: "not asked for" for name in PARTS if asked and name not in asked}
    report("-".join(["byterobust", *asked]), table, findings, runs)
    kept.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
