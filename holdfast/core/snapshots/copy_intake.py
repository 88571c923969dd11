"""The keeper's answer to a node that offers a copy of its states, or one half of a copy for a parity."""

from collections.abc import Iterable
from enum import Enum

import msgspec


class CopyName(msgspec.Struct, frozen=True, kw_only=True):
    """The step of a copy and the generation that made it: two generations may make the same step."""

    step: int
    generation: int


class Intake(Enum):
    BEGIN = "begin"  # in a slot of its own
    RESUME = "resume"  # a part of it is here, from a link that broke
    HELD = "held"  # all of it is here: the last answer was lost
    SUPERSEDED = "superseded"  # a later step is being made


def judge_copy(sent: CopyName, coming: CopyName | None, sealed: Iterable[CopyName]) -> Intake:
    """Return what to do with a copy that a peer offers. A new copy begins, the copy that is under way (`coming`) is
    resumed, and a copy that this node has already (`sealed`) is not sent again."""
    if sent == coming:
        return Intake.RESUME
    return Intake.HELD if sent in sealed else Intake.BEGIN


def judge_half(step: int, mixing: int, newest: int) -> Intake:
    """Return whether to begin, resume or refuse a half of step `step`. `mixing` and `newest` are the steps of the
    parity that is being made and of the newest finished one."""
    if step == newest:
        return Intake.HELD
    if step < max(mixing, newest):
        return Intake.SUPERSEDED
    return Intake.RESUME if step == mixing else Intake.BEGIN


def refuse_generation(sent: int, here: int) -> str:
    """Return why copies of this generation are refused; empty if they are accepted."""
    return "" if sent == here else f"generation {sent} is over; this node is in {here}"
