"""Remedies for a loss that stands out: skip batches, or lower the learning rate for some steps."""

from holdfast.model.loss_response import Ease, LossPolicy, LossResponse, Skip


def apply_response(
    response: LossResponse | None, newest: int, not_after: int | None
) -> tuple[tuple[Skip, ...], tuple[Ease, ...]]:
    """Return the steps to skip and the steps with a lowered learning rate, as the user's response asks for. `newest` is
    the last step made. `not_after` is the last step before the loss stood out."""
    before = newest if not_after is None else not_after
    match response:
        case LossResponse(policy=LossPolicy.SKIP, steps=steps):
            return (Skip(first=newest + 1, last=newest + steps),), ()
        case LossResponse(policy=LossPolicy.REWIND, steps=steps):
            return (Skip(first=before + 1, last=before + steps),), ()
        case LossResponse(policy=LossPolicy.LOWER, steps=steps, factor=factor):
            return (), (Ease(first=before + 1, last=before + steps, factor=factor),)
    return (), ()


def describe_remedy(skips: tuple[Skip, ...], eases: tuple[Ease, ...]) -> str:
    told = [f"the batches of steps {skip.first} to {skip.last} are left out" for skip in skips]
    told += [f"steps {ease.first} to {ease.last} at {ease.factor:g} of the learning rate" for ease in eases]
    return f"the loss stood out: {'; '.join(told)}"
