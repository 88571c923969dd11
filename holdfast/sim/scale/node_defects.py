"""Defects of bad machines, and whether our probes and detectors can see them; drawn once for each machine."""

from random import Random

import msgspec

from holdfast.sim.scale.failure_mixes import FailureMode


class NodeDefect(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's defect, which shows again after every launch until the machine is gone.

    Lots are from 0 to 1 and belong to the machine: a probe that cannot find the defect never will.
    """

    fault: FailureMode
    probe_lot: float
    hash_lot: float
    hang_lot: float
    wide_lot: float


def draw_defect(fault: FailureMode, rng: Random) -> NodeDefect:
    probe, hash, hang = (rng.random() for _ in range(3))
    return NodeDefect(fault=fault, probe_lot=probe, hash_lot=hash, hang_lot=hang, wide_lot=draw_wide_lot(hang))


def draw_wide_lot(hang_lot: float) -> float:
    """Derive a further lot from `hang_lot`, so that the seed's other draws stay the same."""
    return Random(hang_lot).random()
