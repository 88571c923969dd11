"""Probes that run while training stands still, one module each; started by `python -m holdfast.agent.probes`.

A probe's module has a function `run(asked)` that yields findings. It catches only errors that say something about the
machine. Any other error ends the process: the parent reports the current probe as failed and runs the next ones in a
fresh process, since CUDA cannot be used after an error.
"""

from pathlib import Path

import msgspec

from holdfast.model.probe_findings import Finding


class ProbeEntry(msgspec.Struct, frozen=True):
    """One probe, with the module of this package that has its code."""

    name: str
    level: int
    deadline_s: float  # so long that only a probe that hangs needs it
    torch: bool = True
    module: str = ""  # default: the probe's name


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a probe."""

    level: int
    where: Path  # a folder on the disk that is to be tried
    small: bool = False  # small sizes of everything, for a machine that is shared
    repeats: int = 1
    left_s: float = float("inf")  # of the budget


class ProbeLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line that the probe process prints: the name of a probe that begins now, or a finding."""

    began: str = ""
    finding: Finding | None = None


SKIPPED = "skipped: the time budget is used up"  # the detail of a probe that was not run
START = "start"  # not a probe: torch is imported, devices come up
START_S = 180.0  # thousands of nodes may read torch from one file system

PROBES = (
    ProbeEntry("clock", 1, 20.0, torch=False, module="clock_sanity"),
    ProbeEntry("disk", 1, 60.0, torch=False),
    ProbeEntry("shm", 1, 30.0, torch=False),
    ProbeEntry("loopback", 1, 20.0, torch=False, module="tcp_loopback"),
    ProbeEntry("device", 1, 60.0, module="device_presence"),
    ProbeEntry("gemm", 1, 60.0, module="exact_gemm"),
    ProbeEntry("memory", 1, 60.0, module="device_memory"),
    ProbeEntry("gemm_bits", 2, 120.0),
    ProbeEntry("attention_bits", 2, 120.0),
    ProbeEntry("memory_whole", 2, 180.0),
    ProbeEntry("memory_speed", 2, 120.0),
    ProbeEntry("copy_speed", 2, 120.0),
    ProbeEntry("all_to_all", 2, 120.0, module="device_exchange"),
    ProbeEntry("group_all_to_all", 2, 120.0, module="nccl_all_to_all"),
    ProbeEntry("load", 2, 120.0, module="sustained_load"),
    ProbeEntry("reference", 3, 120.0, module="reference_step"),
    ProbeEntry("parallel_reference", 3, 120.0),
)


def choose_probes(level: int, only: str = "", skip: str = "") -> list[ProbeEntry]:
    """Return the probes up to a level; `only` and `skip` are comma-separated names."""
    wanted, left_out = set(only.split(",")) - {""}, set(skip.split(","))
    return [p for p in PROBES if p.level <= level and p.name not in left_out and (not wanted or p.name in wanted)]
