"""Sources of health signals on this machine, one module each; it is no error if a machine lacks one."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from holdfast.model.observation import Gauge, Line

Signal: TypeAlias = Gauge | Line
Read: TypeAlias = Callable[[], list[Signal]]


class SourceAbsent(Exception):
    """Raised if this machine lacks the source or does not let us read it; the text says why, for the log."""


def read_number(path: Path) -> float | None:
    """Return the number that a kernel file holds; None if it is unreadable or no number."""
    try:
        return float(path.read_bytes())
    except (OSError, ValueError):
        return None
