"""Probe of the run directory's disk: writes, flushes and reads back data, and measures how fast that goes."""

import os
import tempfile
import time
from collections.abc import Iterator
from statistics import median

from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.model.probe_findings import Finding

_TIMES = 5
_LIMIT_S = 5.0


def run(asked: ProbeRequest) -> Iterator[Finding]:
    size = 1 << 20 if asked.small else 16 << 20
    content = os.urandom(size)
    found = Finding(probe="disk", level=1, ok=False, form=f"{size >> 20} MiB", unit="MB/s", rough=asked.small)
    took: list[float] = []
    try:
        while len(took) < _TIMES and (sum(took) < min(_LIMIT_S, asked.left_s / 4) or not took):
            took.append(_write_and_read(content, str(asked.where)))
    except OSError as e:
        yield replace(found, ok=False, detail=f"{asked.where}: {e.strerror or e}")
        return
    except _ContentDiffers:
        yield replace(found, ok=False, detail=f"{asked.where}: the content read differs from the content written")
        return
    rates = tuple(round(size / 1e6 / one, 3) for one in took)
    yield replace(found, ok=True, value=median(rates), samples=rates)


class _ContentDiffers(Exception):
    pass


def _write_and_read(content: bytes, where: str) -> float:
    with tempfile.TemporaryFile(dir=where, prefix="holdfast-probe-") as file:
        began = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        took_s = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory is read, not the disk
        file.seek(0)
        if file.read() != content:
            raise _ContentDiffers
    return took_s
