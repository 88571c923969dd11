"""A checker that finds nothing proves nothing: every planted bug is found within some hundred rough seeds."""

from collections.abc import Callable

import msgspec
import pytest

from holdfast.cli.sim_dst import build
from holdfast.logs import catalog
from holdfast.sim.dst.run import play
from holdfast.sim.dst.setup import Setup, setup_of
from tests.sim.dst import planted
from tests.sim.dst.planted import PLANTED

SEEDS = 1500
QUICK = (planted.no_fence, planted.acks_before_disk, planted.stops_are_believed, planted.restore_without_all)
RARE = tuple(bug for bug in PLANTED if bug not in QUICK)


def rough(seed: int) -> Setup:
    """More faults, closer together, and nobody ends the job before they are over."""
    return msgspec.structs.replace(setup_of(seed), pause_s=1.5, faults_s=120.0, stop_s=0.0, last_step=0)


def found(bug: Callable[[pytest.MonkeyPatch], None]) -> str:
    known = catalog.load()
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for seed in range(SEEDS):
            if failure := play(rough(seed), build, known).failure:
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
