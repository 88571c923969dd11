"""Probe of this node's clocks: they never run backward, they run equally fast, and the date is plausible."""

import os
import time
from collections.abc import Iterator

from holdfast.agent.probes import ProbeRequest
from holdfast.model.probe_findings import Finding

_CORES = 64  # looked at
_WATCHED_S = 0.05
_TRIES = 8  # to read two clocks at one moment, where others may have the processor in between
_OFF = 0.01  # of the time; a clock that is being set right runs 0.0005 off
_SINCE, _UNTIL = 1_700_000_000, 4_000_000_000  # 2023, 2096


def run(asked: ProbeRequest) -> Iterator[Finding]:
    faults = [*_backward_faults(), *_drift_faults(), *_date_faults()]
    yield Finding(probe="clock", level=1, ok=not faults, detail="; ".join(faults))


def _backward_faults() -> Iterator[str]:
    """Yield a sentence for each core whose monotonic clock is behind the clock of the core that was read before it."""
    allowed = os.sched_getaffinity(0)
    last = time.monotonic_ns()
    try:
        for core in sorted(allowed)[:_CORES]:
            try:
                os.sched_setaffinity(0, {core})
            except OSError:
                continue  # taken from us meanwhile
            now = time.monotonic_ns()
            if now < last:
                yield f"the monotonic clock went back by {last - now} ns on core {core}"
            last = now
    finally:
        os.sched_setaffinity(0, allowed)


def _drift_faults() -> Iterator[str]:
    raw, told, apart_s = _both()
    time.sleep(_WATCHED_S)
    raw_then, told_then, apart_then_s = _both()
    raw_s, told_s = raw_then - raw, told_then - told
    if abs(told_s - raw_s) > _OFF * max(raw_s, _WATCHED_S) + apart_s + apart_then_s:
        yield f"the monotonic clock counted {told_s:.4f} s while the raw clock counted {raw_s:.4f} s"


def _both() -> tuple[float, float, float]:
    """Return the raw clock, the monotonic clock and the seconds between their readings, from the quickest try."""
    found = []
    for _ in range(_TRIES):
        before, raw = time.monotonic(), time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        apart_s = time.monotonic() - before
        found.append((apart_s, raw, before))
    apart_s, raw, before = min(found)
    return raw, before, apart_s


def _date_faults() -> Iterator[str]:
    if not _SINCE < (now := time.time()) < _UNTIL:
        yield f"the system clock says that it is {time.strftime('%Y-%m-%d', time.gmtime(now))}"
