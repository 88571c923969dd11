"""Slow notices: what was said of slow ranks while the job went on with them."""

from collections.abc import Iterator

import msgspec

from holdfast.model.action import Say
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.event import Decision, Phase


class SlowNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A report that ranks, or all of them, have become slow, and that the job went on with them."""

    at: float
    generation: int
    ranks: tuple[int, ...]  # empty: nobody is named
    nodes: tuple[str, ...]
    text: str  # what is known, and what was done


def find_slow_notices(alarm: Alarm, decision: Decision) -> Iterator[SlowNotice]:
    """Yield what was said of an alarm about slow ranks that has not stopped the job."""
    if alarm.kind is not Kind.SLOW or decision.phase is not Phase.TRAINING:
        return
    at, generation, ranks, nodes = alarm.at, alarm.generation, alarm.ranks, alarm.suspects
    for said in decision.actions:
        if isinstance(said, Say):
            text = said.text if alarm.stance is Stance.ACT else f"{said.text}; nothing was done but to say so"
            yield SlowNotice(at=at, generation=generation, ranks=ranks, nodes=nodes, text=text)
