"""The user's chosen response to a loss that stands out, in the form that alarms carry, and the steps it changes."""

from enum import StrEnum

import msgspec


class LossPolicy(StrEnum):
    """The user's choice of response to a spike."""

    IGNORE = "ignore"  # the journal alone
    ALERT = "alert"
    SKIP = "skip-batches"  # go on from the newest state, without the next batches
    REWIND = "rewind-and-skip"  # go on from a state before it, without its batch
    LOWER = "lower-lr"  # go on from a state before it, at a part of the learning rate


class LossResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response to a spike: what to do, for how many steps, and the factor for the learning rate."""

    policy: LossPolicy
    steps: int
    factor: float = 1.0  # of the learning rate; of LOWER alone

    def encode_text(self) -> str:
        """Return the text that an alarm carries: "skip-batches:K", "rewind-and-skip:K" or "lower-lr:FACTOR:K"."""
        factor = f"{self.factor!r}:" if self.policy is LossPolicy.LOWER else ""
        return f"{self.policy}:{factor}{self.steps}"


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """A range of steps whose batches the script leaves out."""

    first: int
    last: int


class Ease(msgspec.Struct, frozen=True, kw_only=True):
    """A range of steps made at a fraction of the learning rate."""

    first: int
    last: int
    factor: float


_MOST_STEPS = 1_000_000


def parse_response(text: str) -> LossResponse | None:
    """Return the response that this text of an alarm describes; None if it describes none."""
    name, *numbers = text.split(":")
    try:
        match name, numbers:
            case LossPolicy.SKIP | LossPolicy.REWIND, [steps]:
                response = LossResponse(policy=LossPolicy(name), steps=int(steps))
            case LossPolicy.LOWER, [factor, steps]:
                response = LossResponse(policy=LossPolicy.LOWER, steps=int(steps), factor=float(factor))
            case _:
                return None
    except ValueError:
        return None  # it comes from another process
    return response if 0 < response.steps <= _MOST_STEPS and 0 <= response.factor <= 1 else None
