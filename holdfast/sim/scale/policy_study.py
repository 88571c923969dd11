"""Studies: one policy over several seeds, several policies side by side, mechanisms switched off one at a time."""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.sim.scale import price_sheet, published_policy
from holdfast.sim.scale.elastic_recovery import ELASTIC, SINGLE
from holdfast.sim.scale.failure_mixes import FailureMix
from holdfast.sim.scale.failure_schedule import MECHANISMS, ScaleSetup
from holdfast.sim.scale.holdfast_policy import NAME, HoldfastPolicy
from holdfast.sim.scale.price_sheet import PriceSheet
from holdfast.sim.scale.scale_result import ScaleResult, ScaleSummary, make_summary
from holdfast.sim.scale.survivor_recovery import SURVIVORS
from holdfast.sim.scale.time_book import TimeBook

POLICIES = (NAME, *published_policy.KNOWN)
KEPT = (SURVIVORS, ELASTIC, *SINGLE)  # as ours, in processes that are kept


def play_policy(
    policy: str, setup: ScaleSetup, mix: FailureMix, sheet: PriceSheet | None = None
) -> tuple[ScaleResult, TimeBook]:
    """Simulate one seed of a policy. Return its result, and the book of how its time was used."""
    sheet = sheet or price_sheet.load_sheet()
    played = (
        HoldfastPolicy(setup, mix, sheet, policy)
        if policy in (NAME, *KEPT)
        else published_policy.PolicyRun(published_policy.load_policy(policy), setup, mix, sheet)
    )
    return played.play_job(), played.book


def play_seeds(
    policy: str, setup: ScaleSetup, mix: FailureMix, seeds: Iterable[int], sheet: PriceSheet | None = None
) -> ScaleSummary:
    return make_summary(
        [play_policy(policy, msgspec.structs.replace(setup, seed=seed), mix, sheet)[0] for seed in seeds]
    )


def compare_policies(
    policies: Sequence[str], setup: ScaleSetup, mix: FailureMix, seeds: Sequence[int]
) -> list[ScaleSummary]:
    return [play_seeds(policy, setup, mix, seeds) for policy in policies]


def ablate_mechanisms(
    setup: ScaleSetup, mix: FailureMix, seeds: Sequence[int], mechanisms: Sequence[str] = tuple(MECHANISMS)
) -> list[ScaleSummary]:
    """Simulate holdfast's policy with all mechanisms first, then once without each of these mechanisms."""
    found = [play_seeds(NAME, setup, mix, seeds)]
    for mechanism in mechanisms:
        without = msgspec.structs.replace(setup, off=setup.off | {mechanism})
        found.append(play_seeds(NAME, without, mix, seeds))
    return found
