"""Reads step, loss and gradient norm from the progress lines that Megatron prints. Megatron prints only losses above 0,
so a missing loss may be NaN. A line in which loss scaling has skipped all iterations also lacks a loss, and is
ignored."""

import re
from math import nan

from holdfast.core.log_analysis.loss_names import is_loss_name, is_norm_name
from holdfast.model.observation import Line, StepValues

SIGN = b"iteration"  # in every such line
_BEGIN = re.compile(r"\biteration\s+(\d+)/\s*\d+\s*\|")
_SKIPPED = "number of skipped iterations"


class MegatronProgress:
    """Reads the progress lines of a node's ranks; one rank prints them for all."""

    def __init__(self) -> None:
        self._losses: dict[tuple[int, int], str] = {}  # by generation and rank: the name under which a loss was printed

    def on_line(self, line: Line) -> StepValues | None:
        """Return the values of a progress line, with loss NaN if an expected loss is missing; None for other lines."""
        begin = _BEGIN.search(line.text)
        if begin is None:
            return None
        fields = _split_fields(line.text[begin.end() :])
        name = next((name for name in fields if is_loss_name(name)), "")
        key = (line.generation, line.rank)
        if name:
            self._losses = {key: name}
        elif key not in self._losses or fields.get(_SKIPPED) != 0:
            return None
        return StepValues(
            generation=line.generation,
            rank=line.rank,
            step=int(begin[1]),
            at=line.at,
            loss=fields[name] if name else nan,
            grad_norm=next((value for name, value in fields.items() if is_norm_name(name)), None),
        )

    @property
    def source(self) -> str:
        """Say from which field of Megatron's lines losses are read; "" if no loss has been read."""
        return next((f"Megatron's lines ('{name}')" for name in self._losses.values()), "")


def _split_fields(text: str) -> dict[str, float]:
    """Return the fields of a line that are numbers."""
    fields = {}
    for part in text.split("|"):
        name, _, value = part.partition(":")
        try:
            fields[name.strip()] = float(value)
        except ValueError:
            continue
    return fields
