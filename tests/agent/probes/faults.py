"""Faults for processes of probes: a folder for their PYTHONPATH, whose sitecustomize spoils what probes are made of.

The product knows nothing of it. Python imports sitecustomize in every process that has the folder on its path.
"""

import os
from pathlib import Path

_MATMUL = """
import torch

real, calls = torch.matmul, 0


def flipped(out):
    words = out.detach().flatten()[:1].view(torch.uint8)  # one bit in the fraction of the first number
    words[0] ^= 64
    return out


def spoiled(*args, **rest):
    global calls
    calls += 1
    out = real(*args, **rest)
    {fault}
    return out


torch.matmul = spoiled
"""

_ALL_TO_ALL = """
import torch.distributed as dist

real = dist.all_to_all_single


def spoiled(got, *args, **rest):
    done = real(got, *args, **rest)
    {fault}
    return done


dist.all_to_all_single = spoiled
"""

_URANDOM = """
import os, time

real, kept = os.urandom, []


def spoiled(size):
    if size == 1 << 20:  # the probe of disks asks for that much, where it is to be quick
        {fault}
    return real(size)


os.urandom = spoiled
"""

# Of products of matrices.
ALWAYS = "flipped(out)"
# Of what comes by an all-to-all: one bit of the last byte.
ARRIVES_WRONG = "got.view(-1)[-1:].view(__import__('torch').uint8)[0] ^= 1"
# Of the probe of disks, which needs no torch and so is quick to be tried.
HANG = "time.sleep(600)"
ABORT = "os.abort()"
RAISE = "raise RuntimeError('this machine is not well')"
# Slowly enough that whoever watches sees it, and never more than a machine of tests can bear.
EAT = "[(kept.append(bytearray(real(1 << 10)) * (64 << 10)), time.sleep(0.05)) for _ in range(32)]; time.sleep(9)"


def once(call: int) -> str:
    """In one product alone: a fault that comes and goes."""
    return f"calls == {call} and flipped(out)"


def spoil(folder: Path, fault: str) -> dict[str, str]:
    """The environment in which processes have this fault."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _URANDOM if fault in (HANG, ABORT, RAISE, EAT) else _ALL_TO_ALL if fault == ARRIVES_WRONG else _MATMUL
    (folder / "sitecustomize.py").write_text(text.replace("{fault}", fault))
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else str(folder)}
