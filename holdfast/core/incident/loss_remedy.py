"""Remedies for a loss that stands out: skip batches, or lower the learning rate for some steps."""

from holdfast.model.release import Ease, Skip


def apply_policy(policy: str, newest: int, not_after: int | None) -> tuple[tuple[Skip, ...], tuple[Ease, ...]]:
    """Return the skips and eases for the policy "skip-batches:K", "rewind-and-skip:K" or "lower-lr:FACTOR:STEPS".

    Any other policy gives none. `newest` is the last step made, `not_after` the last one before the loss stood out.
    """
    name, _, numbers = policy.partition(":")
    before = newest if not_after is None else not_after
    match name, numbers.split(":"):
        case "skip-batches", [count]:
            return (Skip(first=newest + 1, last=newest + int(count)),), ()
        case "rewind-and-skip", [count]:
            return (Skip(first=before + 1, last=before + int(count)),), ()
        case "lower-lr", [factor, steps]:
            return (), (Ease(first=before + 1, last=before + int(steps), factor=float(factor)),)
    return (), ()


def describe_remedy(skips: tuple[Skip, ...], eases: tuple[Ease, ...]) -> str:
    told = [f"the batches of steps {skip.first} to {skip.last} are left out" for skip in skips]
    told += [f"steps {ease.first} to {ease.last} at {ease.factor:g} of the learning rate" for ease in eases]
    return f"the loss stood out: {'; '.join(told)}"
