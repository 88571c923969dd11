"""A checker that finds nothing proves nothing: every planted bug is found within some hundred seeds."""

from collections.abc import Callable

import pytest

from holdfast.cli.sim_dst import build
from holdfast.logs import catalog
from holdfast.sim.dst.run import play
from holdfast.sim.dst.setup import setup_of
from tests.sim.dst import planted
from tests.sim.dst.planted import PLANTED

SEEDS = 500
QUICK = (planted.no_fence, planted.acks_before_disk, planted.stops_are_believed, planted.restore_without_all)
RARE = tuple(bug for bug in PLANTED if bug not in QUICK)


def found(bug: Callable[[pytest.MonkeyPatch], None]) -> str:
    known = catalog.load()
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for seed in range(SEEDS):
            if failure := play(setup_of(seed), build, known).failure:
                return f"seed {seed}: {failure}"
    return ""


@pytest.mark.parametrize("bug", QUICK, ids=lambda bug: bug.__name__)
def test_bugs_that_show_at_once(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert found(bug), bug.__doc__


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", RARE, ids=lambda bug: bug.__name__)
def test_bugs_that_show_now_and_then(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert found(bug), bug.__doc__
