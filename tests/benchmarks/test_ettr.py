"""The benchmark of ETTR: its goals, and a short real run of its script that ends with the weights of a calm one."""

import signal

import msgspec
import pytest

from benchmarks._exact_scene import RANKS, Scene
from benchmarks._harness import Job
from benchmarks.ettr import Calm, Stormy, ended, judge
from holdfast.core.record.job_account import Span, TimeUse

STEPS = 40


def storm(ettr: float, digest: str) -> Stormy:
    return Stormy(steps=9, ettr=ettr, wall_s=1.0, spent_s={"train": 1.0}, digest=digest, incidents=0, struck=[], load=0)


def test_goals_are_the_share_of_time_and_the_same_bits() -> None:
    assert judge(Calm("a"), storm(0.9, "a")).goals == {"ettr_at_least_0.90": True, "weights_exact": True}
    assert judge(Calm("a"), storm(0.89, "b")).goals == {"ettr_at_least_0.90": False, "weights_exact": False}


def test_the_worst_windows_are_in_the_record() -> None:
    uses = ((TimeUse.TRAIN, 100.0), (TimeUse.STOP, 130.0), (TimeUse.TRAIN, 400.0))
    starts = (0.0, 100.0, 130.0)
    spans = [Span(use=use, start_at=at, end_at=end_at) for at, (use, end_at) in zip(starts, uses, strict=True)]
    told = judge(Calm("a"), msgspec.structs.replace(storm(0.9, "a"), spans=spans)).figures
    assert (told["of_any_60_s_least"], told["of_any_60_s_median"]) == (0.5, 1.0)
    assert (told["of_any_300_s_least"], told["of_any_300_s_median"]) == (0.9, 0.9)


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
