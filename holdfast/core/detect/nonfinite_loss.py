"""Loss detector: raises an alarm when two losses of a rank in a row are not finite. A single such loss is only
reported, because loss scaling may skip the step and later losses are finite again. Once the weights are NaN, no later
loss is finite. Gradient norms are ignored, because loss scaling makes them infinite on purpose.
"""

from collections.abc import Sequence
from math import isfinite

import msgspec

from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Loss

BAD_LOSS = "nan_divergence"  # the class of such alarms
SKIPPED_UPDATES = 30  # in a row: by so many a GradScaler has halved any scale to nothing, and it never was the reason


def alarm_of(told: Loss) -> Alarm:
    what = "had losses that were not finite" if isfinite(told.loss) else f"has a loss of {told.loss}"
    alarm = _loss_alarm(told, f"{what} since step {_step_text(told)}", "loss", BAD_LOSS)
    good = max(0, told.step - 1)
    limits = {"not_after": told.step - 1, "good_count": None} if told.numbered else {"good_count": good}
    return msgspec.structs.replace(alarm, **limits)


def add_alike(losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """Return the bad losses of one node's ranks, each with the ranks that have the same one since the same step."""
    alike: dict[tuple[int, str], list[int]] = {}
    keys = [(one.generation, alarm_of(one).reason) for one in losses]
    for key, one in zip(keys, losses, strict=True):
        alike.setdefault(key, []).append(one.rank)
    return tuple(
        msgspec.structs.replace(one, also=tuple(rank for rank in alike[key] if rank != one.rank))
        for key, one in zip(keys, losses, strict=True)
    )


def single_alarm_of(told: Loss) -> Alarm:
    """Return an alarm that is only reported, for a single loss that was not finite between finite ones."""
    reason = f"had a loss that was not finite at step {_step_text(told)} and a finite one after it: training goes on"
    return msgspec.structs.replace(_loss_alarm(told, reason, "single loss"), stance=Stance.NOTIFY)


def skipping_alarm_of(told: Loss, updates: int) -> Alarm:
    """Return an alarm that is only reported: the GradScaler of a rank has skipped `updates` updates in a row since
    `told.step`. Nothing is restored, because skipped updates leave the weights as they were."""
    where = f"after step {_step_text(told)}" if told.step >= 0 else "before any step was seen"
    why = "its GradScaler finds gradients that are not finite"
    reason = f"has skipped {updates} updates in a row {where}: {why}; nothing is done about it"
    return msgspec.structs.replace(_loss_alarm(told, reason, "skipped updates", BAD_LOSS), stance=Stance.NOTIFY)


def _loss_alarm(told: Loss, reason: str, signature: str, klass: str = "") -> Alarm:
    return Alarm(
        kind=Kind.LOSS,
        at=told.at,
        suspects=(told.node,),
        ranks=tuple(sorted((told.rank, *told.also))),
        generation=told.generation,
        klass=klass,
        reason=reason,
        signature=signature,
    )


def _step_text(told: Loss) -> str:
    return f"{told.step}{'' if told.numbered else ' after the launch'}"
