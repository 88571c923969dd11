"""Probe of shared memory, through which ranks, data loaders and NCCL exchange data on a node."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator

from holdfast.agent.probes import ProbeRequest
from holdfast.model.probe_findings import Finding

_PLACE = "/dev/shm"
_BYTES = 4 << 20


def run(asked: ProbeRequest) -> Iterator[Finding]:
    content = os.urandom(_BYTES)
    try:
        with tempfile.TemporaryFile(dir=_PLACE, prefix="holdfast-probe-") as file:
            # Where there is no room this fails; a plain truncate would have us killed at the first write.
            os.posix_fallocate(file.fileno(), 0, _BYTES)
            with mmap.mmap(file.fileno(), _BYTES) as memory:
                memory[:] = content
                same = os.pread(file.fileno(), _BYTES, 0) == content
        free = shutil.disk_usage(_PLACE).free
    except OSError as e:
        yield Finding(probe="shm", level=1, ok=False, detail=f"{_PLACE}: {e.strerror or e}")
        return
    detail = f"{free / 1e9:.1f} GB free" if same else f"{_PLACE}: the content read differs from the content written"
    yield Finding(probe="shm", level=1, ok=same, detail=detail)
