"""Finds tasks of which the kernel says that they hang, and that hang inside the GPU's driver."""

import itertools
import re
from collections.abc import Iterator, Sequence

from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.failure_catalog import CatalogRow
from holdfast.core.log_analysis.line_prefixes import LogLine

_HEAD = re.compile(r"\btask .{1,60} blocked for more than \d+ seconds|\btask:\S{1,40} {1,20}state:D\b")
_FRAME = re.compile(r"(?<!\? )\b[\w.]{2,80}\+0x[0-9a-f]+/0x[0-9a-f]+ \[(?:nvidia\w*|amdgpu)\]")
_STARTS = re.compile(r"\b(?:RmInitAdapter|kgsp\w+|GspRm\w+|_kgsp\w+|kflcn\w+)\+0x")  # the driver starts the GPU
_CHARS = 400
_DEEP = 40  # lines of one call trace
_HANGS = CatalogRow(
    klass="host_hw_kernel_fault",
    source="a task that hangs inside the GPU's driver",
    weight=7,
    witness=True,
    hint="A task hangs in the driver of the GPUs: start the machine anew before it is used again.",
)
_NEVER_STARTS = CatalogRow(
    klass="gpu_driver_gsp_fault",
    source="a task that hangs while the driver starts a GPU",
    weight=7,
    witness=True,
    hint="The driver hangs as it starts a GPU: start the machine anew, and look at its Xids.",
)


def find_driver_hangs(lines: Sequence[LogLine]) -> Iterator[CatalogHit]:
    """Yield a hit for the first report of a task that hangs, if its call trace goes through a GPU's driver. Frames that
    the kernel itself doubts ("?") do not count."""
    heads = [place for place, said in enumerate(lines) if said.kernel and _HEAD.search(said.raw[:_CHARS])]
    for place, after in itertools.pairwise([*heads, len(lines)]):
        head = lines[place]
        trace = [said.raw[:_CHARS] for said in lines[place + 1 : min(after, place + _DEEP)] if said.kernel]
        inside = [text for text in trace if _FRAME.search(text)]
        if inside:
            row = _NEVER_STARTS if any(_STARTS.search(text) for text in inside) else _HANGS
            yield CatalogHit(row=row, said=head, weight=row.weight, node=head.node)
            return
