"""Says in words what is uncommon about the state from which a launch resumes."""

from collections.abc import Iterator

from holdfast.core.incident.incident_text import describe_disks
from holdfast.core.snapshots.restore_choice import advise_apart, count_disks
from holdfast.model.restore_sources import Restore


def describe_source(plan: Restore) -> Iterator[str]:
    """Yield the sentences that the console shows about this plan; none if each rank gets back what it had in memory."""
    if disks := count_disks(plan):
        yield f"resuming from step {plan.step}{describe_disks(disks)}"
    if plan.apart:
        yield advise_apart(plan.apart)
    if plan.cut_from:
        ranks = f"{plan.cut_from} ranks have" if plan.cut_from > 1 else "1 rank has"
        yield f"resuming from step {plan.step} in memory, which {ranks} saved, cut anew"
    elif plan.uncut:
        yield plan.uncut
