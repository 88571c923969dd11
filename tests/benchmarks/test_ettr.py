"""The benchmark of ETTR: its goals, and a short real run of its script that ends with the weights of a calm one."""

import signal

import pytest

from benchmarks._exact_scene import RANKS, Scene
from benchmarks._harness import Job
from benchmarks.ettr import Calm, Stormy, ended, judge

STEPS = 40


def storm(ettr: float, digest: str) -> Stormy:
    return Stormy(steps=9, ettr=ettr, wall_s=1.0, spent_s={"train": 1.0}, digest=digest, incidents=0, struck=[], load=0)


def test_goals_are_the_share_of_time_and_the_same_bits() -> None:
    assert judge(Calm("a"), storm(0.9, "a")).goals == {"ettr_at_least_0.90": True, "weights_exact": True}
    assert judge(Calm("a"), storm(0.89, "b")).goals == {"ettr_at_least_0.90": False, "weights_exact": False}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_is_exact_whatever_befalls_it() -> None:
    digests = []
    for struck in (False, True):
        with Job(RANKS) as job:
            scene = Scene(job)
            scene.start(["--standbys=1"], steps=STEPS, period_s=0.1)
            if struck:
                scene.await_steps(10)
                fault = job.fault()
                scene.signal(2, signal.SIGKILL)
                assert job.wait_steps(5, fault) is not None
            ended(scene, 120.0)
            assert len(scene.records()) == struck
            digests.append(scene.out.read_text())
    assert len(digests[0]) == 64
    assert digests[0] == digests[1]
