"""loss: a rank's loss is not finite.

Refuses to judge a gradient norm that is not finite, which loss scaling causes on purpose, and a loss that is finite
again by the time it is looked at: whatever it was, training goes on.
"""

from math import isfinite

from holdfast.model.alarm import Alarm, Kind
from holdfast.model.signal import Loss


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
        reason=f"has a loss of {told.loss} since step {told.step}",
        signature="loss",
        not_after=told.step - 1,
    )
