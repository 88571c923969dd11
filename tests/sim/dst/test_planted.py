"""A checker that finds nothing proves nothing: every planted bug is found within some hundred rough seeds."""

from collections.abc import Callable

import msgspec
import pytest

from holdfast.cli.commands.sim_dst import build_controller
from holdfast.logs import catalog_files
from holdfast.sim.dst.seed_run import play_seed
from holdfast.sim.dst.seed_setup import SeedSetup, draw_setup
from tests.sim.dst import planted
from tests.sim.dst.planted import PLANTED

SEEDS = 1500
QUICK = (planted.no_fence, planted.acks_before_disk, planted.stops_are_believed, planted.restore_without_all)
RARE = tuple(bug for bug in PLANTED if bug not in QUICK)


def rough(seed: int) -> SeedSetup:
    """More faults, closer together, and nobody ends the job before they are over."""
    return msgspec.structs.replace(draw_setup(seed), pause_s=1.5, faults_s=120.0, stop_s=0.0, last_step=0)


def found(bug: Callable[[pytest.MonkeyPatch], None]) -> str:
    known = catalog_files.load_failures()
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for seed in range(SEEDS):
            if failure := play_seed(rough(seed), build_controller, known).failure:
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
