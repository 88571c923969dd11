"""NVIDIA's MPS for a benchmark's ranks: they share the GPU at the same time, and do not take turns on it."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

CONTROL = "nvidia-cuda-mps-control"
LIMIT_S = 20.0


class Mps(msgspec.Struct, frozen=True):
    """What ranks have to find in their environment; or why MPS does not start here."""

    env: dict[str, str] = {}
    refusal: str = ""


@contextmanager
def shared_gpu(ranks: int) -> Iterator[Mps]:
    """Start MPS, with an equal part of the GPU's threads for each rank; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in own.values():
            Path(path).mkdir()
        if refusal := _control(own, ["-d"]) or _control(own, [], f"start_server -uid {os.getuid()}\n"):
            _control(own, [], "quit\n")  # its daemon may be there without a server
            yield Mps(refusal=refusal)
            return
        try:
            yield Mps(own | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks)})
        finally:
            _control(own, [], "quit\n")


def _control(own: dict[str, str], flags: list[str], order: str = "") -> str:
    """Call the control program; return "", or why it failed in its own words."""
    call = [CONTROL, *flags]
    try:
        done = subprocess.run(
            call, input=order, env=os.environ | own, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{CONTROL} cannot be run: {getattr(e, 'strerror', None) or f'no end within {LIMIT_S:g} s'}"
    words = " ".join((done.stderr + done.stdout).split()) or "no words"
    return f"{' '.join(call)} ended with {done.returncode}: {words}" if done.returncode else ""
