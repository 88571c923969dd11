"""Stop-time probes, one small file each, run in a process of their own: `python -m holdfast.agent.probes`.

The module of a probe has a function `run(asked)` that yields findings. It catches only what tells of the machine by
itself; anything else ends the process, whose parent tells of the probe that was under way and goes on behind it in a
fresh one: after an error of CUDA no other way is open.
"""

from pathlib import Path

import msgspec

from holdfast.model.probe import Finding


class ProbeEntry(msgspec.Struct, frozen=True):
    """A row of the list of probes; the module of the same name has its code."""

    name: str
    level: int
    deadline_s: float  # so long that only a probe that hangs needs it
    torch: bool = True


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe is told."""

    level: int
    where: Path  # a folder on the disk that is to be tried
    small: bool = False  # small sizes of everything, for a machine that is shared
    repeats: int = 1
    left_s: float = float("inf")  # of the budget


class ProbeLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line that the process prints: a probe that begins now, or a finding."""

    began: str = ""
    finding: Finding | None = None


START = "start"  # not a probe: torch is imported, devices come up
START_S = 180.0  # thousands of nodes may read torch from one file system

PROBES = (
    ProbeEntry("clock", 1, 20.0, torch=False),
    ProbeEntry("disk", 1, 60.0, torch=False),
    ProbeEntry("shm", 1, 30.0, torch=False),
    ProbeEntry("loopback", 1, 20.0, torch=False),
    ProbeEntry("device", 1, 60.0),
    ProbeEntry("gemm", 1, 60.0),
    ProbeEntry("memory", 1, 60.0),
    ProbeEntry("gemm_bits", 2, 120.0),
    ProbeEntry("attention_bits", 2, 120.0),
    ProbeEntry("memory_whole", 2, 180.0),
    ProbeEntry("memory_speed", 2, 120.0),
    ProbeEntry("copy_speed", 2, 120.0),
    ProbeEntry("all_to_all", 2, 120.0),
    ProbeEntry("load", 2, 120.0),
    ProbeEntry("reference", 3, 120.0),
)


def choose_probes(level: int, only: str = "", skip: str = "") -> list[ProbeEntry]:
    """The probes up to a level; names are written with commas between."""
    wanted, left_out = set(only.split(",")) - {""}, set(skip.split(","))
    return [p for p in PROBES if p.level <= level and p.name not in left_out and (not wanted or p.name in wanted)]
