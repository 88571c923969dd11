"""Loss detector: raises an alarm when a rank's loss is not finite.

It ignores a gradient norm that is not finite, which loss scaling causes on purpose. It also ignores a loss that is
finite again when it is read: training has gone on.
"""

from math import isfinite

from holdfast.model.alarm import Alarm, Kind
from holdfast.model.observation import Loss


def alarm_of(told: Loss) -> Alarm | None:
    if isfinite(told.loss):
        return None
    return Alarm(
        kind=Kind.LOSS,
        at=told.at,
        suspects=(told.node,),
        ranks=(told.rank,),
        generation=told.generation,
        klass="nan_divergence",
        reason=f"has a loss of {told.loss} since step {told.step}{'' if told.numbered else ' after the launch'}",
        signature="loss",
        not_after=told.step - 1 if told.numbered else None,
    )
