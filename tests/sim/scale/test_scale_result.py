"""What remains of several seeds: differences are taken seed by seed."""

import msgspec
import pytest

from holdfast.sim.scale import failure_mixes, policy_study
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.scale_result import missed_ettr

SMALL = ScaleSetup(gpus=64 * 8, days=5.0, rate=0.02)


def test_what_is_missed_seed_by_seed() -> None:
    one = policy_study.play_seeds("byterobust", SMALL, failure_mixes.load_mix("byterobust"), range(1, 4))
    worse = msgspec.structs.replace(one, ettrs=tuple(ettr - 0.01 for ettr in one.ettrs))
    loses, error = missed_ettr(one, worse)
    assert loses == pytest.approx(0.01) and error == pytest.approx(0.0, abs=1e-12)
    assert one.ettr == pytest.approx(sum(one.ettrs) / 3) and min(one.ettrs) == one.ettr_least


def test_a_mechanism_that_no_failure_asks_for_makes_no_difference() -> None:
    mix = failure_mixes.load_mix("rsc1")  # readings alone
    whole, without = policy_study.ablate_mechanisms(
        msgspec.structs.replace(SMALL, updates=False), mix, range(1, 3), ("hang",)
    )
    assert missed_ettr(whole, without) == (0.0, 0.0), "chance is the same in both"
