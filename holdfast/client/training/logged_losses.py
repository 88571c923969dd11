"""Finds the loss of each step among the values that a script gives to its loggers.

The first value that is named like a training loss decides where all losses are read from. If a script reports losses by
`holdfast.step`, its reports are used and its loggers are not read.
"""

import math
from collections.abc import Callable, Mapping

from holdfast.client.training.reported_numbers import is_on_host, read_number
from holdfast.core.log_analysis.loss_names import is_loss_name, is_norm_name


class LoggedLosses:
    """Reports the losses that one rank gives to its loggers. A step's values are reported when the following step is
    done. A loss that is not finite is reported at once."""

    def __init__(self, report: Callable[[int, object, object], None], announce: Callable[[str], None]) -> None:
        self._report_values = report  # step, loss and gradient norm
        self._announce = announce
        self._is_closed = False
        self._source = ""
        self._seen = 0  # losses from there
        self._step = -1  # newest that is done
        self._loss: object = None
        self._norm: object = None
        self._parts: object = None  # sum of what was computed for the step that is being made

    def close(self) -> None:
        """Stop reading losses from loggers, because the script reports its losses itself."""
        self._is_closed, self._loss, self._norm, self._parts = True, None, None, None

    def on_metrics(self, call: str, metrics: Mapping[object, object]) -> None:
        """Look for the loss and gradient norm of the step just done in the metrics that this call logs."""
        for name, value in metrics.items():
            if not isinstance(name, str) or isinstance(value, str | bool):
                continue
            if is_norm_name(name):
                self._norm = value
            elif is_loss_name(name) and self._is_source(f"{call}('{name}')"):
                self._loss = _read_number(value)
        if self._loss is not None and not _is_finite(self._loss):
            self._report()

    def on_part(self, call: str, value: object) -> None:
        """Add a value to the current step's loss, which is the sum of the values added until the step is done."""
        if value is not None and self._is_source(f"{call}()"):
            self._parts = value if self._parts is None else self._parts + value  # type: ignore[operator]

    def on_step(self, step: int) -> None:
        """Report the loss and norm that were logged for the previous step, now that `step` is done."""
        if self._loss is not None or self._norm is not None:
            self._report()
        self._step = step
        if self._parts is not None:
            self._loss, self._parts = _read_number(self._parts), None
            if self._loss is not None and not _is_finite(self._loss):
                self._report()

    def _is_source(self, source: str) -> bool:
        if self._is_closed:
            return False
        self._source = self._source or source
        if source != self._source:
            return False
        self._seen += 1
        if self._seen == 2:  # a script that reports its loss itself has done so by now
            self._announce(self._source)
        return True

    def _report(self) -> None:
        loss, norm = self._loss, self._norm
        self._loss = self._norm = None
        if loss is None or self._step < 0:
            return  # a norm alone would hide the newest loss; before the first step there is nothing to report
        try:
            self._report_values(self._step, loss, norm)
        except Exception:
            return  # whatever was logged, training goes on


def _read_number(value: object) -> object:
    """Return the value as a float, or None if it is no number; a tensor on a device is returned without being read."""
    if not is_on_host(value):
        return value
    try:
        return read_number(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite float. For a tensor return False, because its value is not known yet."""
    return type(value) is float and math.isfinite(value)
