"""Failures from a seed: the same for every policy, as many as the rate says, with the causes that the mix says."""

from collections import Counter
from itertools import pairwise
from statistics import mean

import msgspec
import pytest

from holdfast.sim.scale import failure_mixes
from holdfast.sim.scale.failure_schedule import ScaleSetup, draw_schedule

SETUP = ScaleSetup(gpus=9600, days=90.0, seed=5)
MIX = failure_mixes.load_mix("byterobust")


def test_the_same_seed_gives_the_same_failures_whatever_is_off() -> None:
    without = msgspec.structs.replace(SETUP, off=frozenset({"standbys", "health"}), standbys=0)
    assert draw_schedule(SETUP, MIX) == draw_schedule(without, MIX)
    assert draw_schedule(SETUP, MIX) != draw_schedule(msgspec.structs.replace(SETUP, seed=6), MIX)


def test_as_many_as_the_rate_says() -> None:
    seeds = [draw_schedule(msgspec.structs.replace(SETUP, seed=seed), MIX) for seed in range(40)]
    assert mean(len(one.strikes) for one in seeds) == pytest.approx(129.6, rel=0.05)
    assert mean(len(one.updates) for one in seeds) == pytest.approx(27, rel=0.1)
    assert draw_schedule(msgspec.structs.replace(SETUP, rate=0.0, updates=False), MIX).strikes == ()


def test_causes_are_those_of_the_mix() -> None:
    many = msgspec.structs.replace(SETUP, rate=0.1)
    strikes = draw_schedule(many, MIX).strikes
    assert all(a.at < b.at for a, b in pairwise(strikes))
    cuda = Counter(strike.why for strike in strikes if strike.fault.name == "CUDA error")
    assert cuda["machine"] / cuda.total() == pytest.approx(21 / 62, abs=0.03)
    blasts = Counter(strike.blast.name for strike in strikes if strike.blast)
    assert blasts["switch"] / len(strikes) == pytest.approx(0.007, abs=0.002)
    assert blasts["rack"] / len(strikes) == pytest.approx(0.003, abs=0.0015)
    assert mean(strike.fault.name == "hang" for strike in strikes) == pytest.approx(5506 / 45783, abs=0.015)
