"""Bad machines: what is wrong with each, and whether anything of ours can see that; drawn once, for it stays so."""

from random import Random

import msgspec

from holdfast.sim.scale.failure_mixes import FailureMode


class NodeDefect(msgspec.Struct, frozen=True, kw_only=True):
    """What shows itself again after every launch, until the machine is gone.

    Lots are from 0 to 1 and belong to the machine: what a probe cannot find it does not find the next time either.
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
    """A lot of its own, drawn apart: all that comes after it in a seed is as it was before there was this one."""
    return Random(hang_lot).random()
