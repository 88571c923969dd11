"""Defects of bad machines, each with random numbers that decide which probes and detectors find it."""

from random import Random

import msgspec

from holdfast.sim.scale.failure_mixes import FailureMode


class NodeDefect(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's defect, which shows again after every launch until the machine is gone.

    Its lots are random numbers from 0 to 1 that never change: a probe that misses the defect once will always miss it.
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
    """Derive another random number from `hang_lot`, so that the seed's random numbers stay as they are."""
    return Random(hang_lot).random()
