"""What a keeper does with a copy, or a half for a parity, that another node wants to send it."""

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
    """Judge a copy of one rank, given what is coming in and what is sealed of that rank."""
    if sent == coming:
        return Intake.RESUME
    return Intake.HELD if sent in sealed else Intake.BEGIN


def judge_half(step: int, mixing: int, newest: int) -> Intake:
    """Judge a half for a parity, given the step that is being made and the newest one that is sealed; -1: none."""
    if step == newest:
        return Intake.HELD
    if step < max(mixing, newest):
        return Intake.SUPERSEDED
    return Intake.RESUME if step == mixing else Intake.BEGIN


def refuse_generation(sent: int, here: int) -> str:
    """Return why a copy of this generation is not taken; empty if it is."""
    return "" if sent == here else f"generation {sent} is over; this node is in {here}"
