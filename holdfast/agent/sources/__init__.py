"""Sources: what each reads of this machine, one file each; what a machine does not have is absent, not an error."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from holdfast.model.signal import Gauge, Line

Signal: TypeAlias = Gauge | Line
Read: TypeAlias = Callable[[], list[Signal]]


class SourceAbsent(Exception):
    """This machine has no such thing, or does not let us see it: why, for the log."""


def read_number(path: Path) -> float | None:
    """What a file of the kernel holds, if it is one number and can be read."""
    try:
        return float(path.read_bytes())
    except (OSError, ValueError):
        return None
