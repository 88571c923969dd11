"""Studies: one policy over several seeds, policies side by side, mechanisms off one at a time."""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.sim.scale import practice, prices
from holdfast.sim.scale.book import Book
from holdfast.sim.scale.mixes import Mix
from holdfast.sim.scale.ours import NAME, Ours
from holdfast.sim.scale.prices import Sheet
from holdfast.sim.scale.result import Result, Summary, summary
from holdfast.sim.scale.weather import MECHANISMS, Setup

POLICIES = (NAME, *practice.KNOWN)


def play(policy: str, setup: Setup, mix: Mix, sheet: Sheet | None = None) -> tuple[Result, Book]:
    """One seed, with the book behind it."""
    sheet = sheet or prices.load()
    played = Ours(setup, mix, sheet) if policy == NAME else practice.Played(practice.load(policy), setup, mix, sheet)
    return played.play(), played.book


def over(policy: str, setup: Setup, mix: Mix, seeds: Iterable[int], sheet: Sheet | None = None) -> Summary:
    return summary([play(policy, msgspec.structs.replace(setup, seed=seed), mix, sheet)[0] for seed in seeds])


def compare(policies: Sequence[str], setup: Setup, mix: Mix, seeds: Sequence[int]) -> list[Summary]:
    return [over(policy, setup, mix, seeds) for policy in policies]


def ablate(
    setup: Setup, mix: Mix, seeds: Sequence[int], mechanisms: Sequence[str] = tuple(MECHANISMS)
) -> list[Summary]:
    """All of ours first, then without each of these."""
    found = [over(NAME, setup, mix, seeds)]
    for mechanism in mechanisms:
        without = msgspec.structs.replace(setup, off=setup.off | {mechanism})
        found.append(over(NAME, without, mix, seeds))
    return found
