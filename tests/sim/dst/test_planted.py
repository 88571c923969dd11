"""A checker that finds nothing proves nothing: every planted bug and every past defect is found by some seed."""

import pytest

from holdfast.cli.commands.sim_dst import REAL_PARTS
from holdfast.logs import catalog_files
from holdfast.sim.dst.seed_run import play_seed
from tests.sim.dst.mutant import Mutant
from tests.sim.dst.past_defects import PAST_DEFECTS
from tests.sim.dst.planted import PLANTED

SEEDS = 1000
MUTANTS: tuple[Mutant, ...] = (*PLANTED, *PAST_DEFECTS)
QUICK: list[Mutant] = list(MUTANTS[::6])  # a few of every sort show that the checker checks; the rest is slow
NOTED = [
    pytest.param(one, one.seed, id=one.plant.__name__, marks=[] if one in QUICK else pytest.mark.slow)
    for one in MUTANTS
    if one.seed is not None
]
_MISTAKES = ("TypeError", "AttributeError", "NameError")  # of a patch that no longer fits the code


def found(mutant: Mutant, seed: int) -> str:
    """What the mutant breaks at this seed; "" if nothing, or if the seed is broken without it, too."""
    known, setup = catalog_files.load_failures(), mutant.draw(seed)
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        failure = play_seed(setup, REAL_PARTS, known).failure
    assert not any(mistake in failure for mistake in _MISTAKES), f"the mutant itself is broken: {failure}"
    return failure if failure and not play_seed(setup, REAL_PARTS, known).failure else ""


def first_seed(mutant: Mutant) -> int | None:
    return next((seed for seed in range(SEEDS) if found(mutant, seed)), None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_there_is_still_what_it_patches(mutant: Mutant) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)


@pytest.mark.parametrize(("mutant", "seed"), NOTED)
def test_its_seed_finds_it(mutant: Mutant, seed: int) -> None:
    """A change of the code may move chance, and so the seed: `python -m tests.sim.dst.test_planted` notes it anew."""
    assert found(mutant, seed), f"seed {seed} does not find it any more: {mutant.plant.__doc__}"


@pytest.mark.slow
@pytest.mark.search
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_a_search_finds_it(mutant: Mutant) -> None:
    assert first_seed(mutant) is not None, mutant.plant.__doc__


if __name__ == "__main__":
    for one in MUTANTS:
        print(one.plant.__name__, first_seed(one), flush=True)
