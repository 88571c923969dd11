"""Alarm notices: what was said of slow ranks and of bad losses while the job went on with them."""

from collections.abc import Iterator

import msgspec

from holdfast.core.detect.nonfinite_loss import BAD_LOSS
from holdfast.model.action import Say
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.event import Decision, Phase

KEPT_NOTICES = 100  # about losses: a script may have a bad one at every step


class AlarmNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A report that ranks, or all of them, are slow or have bad losses, and that the job went on with them."""

    at: float
    generation: int
    ranks: tuple[int, ...]  # empty: nobody is named
    nodes: tuple[str, ...]
    text: str  # what is known, and what was done


def is_about_loss(alarm: Alarm) -> bool:
    return alarm.kind is Kind.LOSS or alarm.klass == BAD_LOSS


def find_notices(alarm: Alarm, decision: Decision) -> Iterator[AlarmNotice]:
    """Yield what was said of an alarm about slow ranks or a bad loss that has not stopped the job."""
    slow = alarm.kind is Kind.SLOW
    if not (slow or is_about_loss(alarm)) or decision.phase is not Phase.TRAINING:
        return
    at, generation, ranks, nodes = alarm.at, alarm.generation, alarm.ranks, alarm.suspects
    for said in decision.actions:
        if isinstance(said, Say):
            more = "; nothing was done but to say so" if slow and alarm.stance is not Stance.ACT else ""
            yield AlarmNotice(at=at, generation=generation, ranks=ranks, nodes=nodes, text=said.text + more)
