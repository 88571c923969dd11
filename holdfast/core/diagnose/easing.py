"""What a launch leaves out or eases after a spike, by the policy that its alarm carries."""

from holdfast.core.detect.spikes import Policy
from holdfast.model.release import Ease, Skip


def answer(policy: str, bad: int) -> tuple[tuple[Skip, ...], tuple[Ease, ...]]:
    """For a spike whose first bad step is `bad`.

    `skip-batches:K` goes on from the newest state: of what it leaves out only the K batches after `bad` are still to
    come, and the bad one too should that state be an older one. `rewind-and-skip:K` goes on from a state before
    it, without the bad batch and the K-1 after it; `lower-lr:FACTOR:STEPS` with STEPS eased ones from `bad` on.
    """
    name, *numbers = policy.split(":")
    match name, numbers:
        case Policy.SKIP, [count]:
            return (Skip(first=bad, last=bad + int(count)),), ()
        case Policy.REWIND, [count]:
            return (Skip(first=bad, last=bad + int(count) - 1),), ()
        case Policy.LOWER, [factor, steps]:
            return (), (Ease(first=bad, last=bad + int(steps) - 1, factor=float(factor)),)
    return (), ()


def rewinds(policy: str) -> bool:
    """Whether this policy goes back to a state before the spike; else the newest one is good enough."""
    return policy.partition(":")[0] in (Policy.REWIND, Policy.LOWER)
