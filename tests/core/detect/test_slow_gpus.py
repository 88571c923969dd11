"""Which GPU makes the others wait, from how long collectives held each of them, while processes run ahead."""

import random
import re
from collections.abc import Callable

import msgspec
import pytest

from holdfast.core.detect.slow import SlowDetector, SlowLimits
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Arrival

STEP_S, MOVES_S = 0.2, 0.002


class GpuJob(msgspec.Struct, kw_only=True):
    """Data-parallel ranks, `factor(rank, step)` times slower than others, one to a node. Two thirds of the work of a
    step follow its first collective."""

    factor: Callable[[int, int], float]
    ranks: int = 4
    noise: float = 0.05
    seed: int = 0
    steps: int = 100
    collectives: int = 2  # in a step
    overlaps: bool = False  # a GPU goes on computing while it communicates, until the end of the step
    tells: Callable[[int], bool] = lambda rank: True  # how long collectives held its GPU
    gpus: dict[int, str] = {}
    limits: SlowLimits = SlowLimits()

    def play(self) -> list[Alarm]:
        chance, made = random.Random(self.seed), SlowDetector(self.limits)
        made.on_launch(0.0, 1)
        now, seq, beat_at, alarms = 0.0, 0, 1.0, []
        told: dict[int, list[Arrival]] = {rank: [] for rank in range(self.ranks)}
        later = [2 / 3 / max(1, self.collectives - 1)] * (self.collectives - 1)
        for step in range(1, self.steps + 1):
            entered, computed, ended = now, dict.fromkeys(told, now), now
            for part in (1 / 3 if later else 1.0, *later):
                seq += 1
                for rank in told:
                    computed[rank] += part * STEP_S * chance.gauss(self.factor(rank, step), self.noise)
                began = {rank: max(at, ended) for rank, at in computed.items()}
                ended = max(began.values()) + MOVES_S
                for rank, arrivals in told.items():  # processes queue all of a step's collectives at its begin
                    held_s = ended - began[rank] if self.tells(rank) else None
                    arrivals.append(Arrival("0", seq, entered + 1e-4 * seq + chance.uniform(0, 1e-4), held_s))
                computed = computed if self.overlaps else dict.fromkeys(told, ended)
            now = max(*computed.values(), ended)
            if now >= beat_at:
                beat_at += 1.0
                for rank, arrivals in told.items():
                    own = {rank: self.gpus[rank]} if self.gpus else {}
                    beat = Beat(node=f"n{rank}", generation=1, step=step, at=now, sent=now, gpus=own)
                    alarm = made.on_beat(now, beat, {rank: tuple(arrivals[-16:])})
                    alarms += [alarm] if alarm else []
        return alarms


def one_slow(rank: int | None, times: float, since: int = 0) -> Callable[[int, int], float]:
    return lambda other, step: times if other == rank and step > since else 1.0


def named(alarms: list[Alarm]) -> set[tuple[int, ...]]:
    return {alarm.ranks for alarm in alarms if alarm.ranks}


@pytest.mark.parametrize(("ranks", "seeds"), [(4, 12), (64, 2)])
def test_a_gpu_that_is_slow_from_the_beginning_is_named(ranks: int, seeds: int) -> None:
    for seed in range(seeds):
        job = GpuJob(factor=one_slow(seed % 4, 1.3), ranks=ranks, seed=seed)
        assert named(job.play()) == {(seed % 4,)}
        job.tells = lambda rank: False
        assert named(job.play()) == set(), "its process is as early as the others"
        job.tells = lambda rank: rank > 0
        assert named(job.play()) == set(), "one does not tell, so processes are compared"


@pytest.mark.parametrize(("ranks", "seeds"), [(4, 12), (64, 2)])
def test_nobody_is_named_where_no_gpu_is_slow(ranks: int, seeds: int) -> None:
    for seed in range(seeds):
        for overlaps in (False, True):
            job = GpuJob(factor=one_slow(None, 1.0), ranks=ranks, seed=seed, steps=150, overlaps=overlaps)
            assert job.play() == []


def test_what_is_told() -> None:
    [alarm] = GpuJob(factor=one_slow(2, 1.3), noise=0.01).play()
    assert (alarm.ranks, alarm.suspects, alarm.stance) == ((2,), ("n2",), Stance.NOTIFY)
    assert re.search("for 2[23] % of the time the other GPUs wait for its GPU alone in collectives", alarm.reason)


@pytest.mark.parametrize("collectives", [1, 3, 12, 25])
def test_gpus_are_never_quite_alike(collectives: int) -> None:
    """Communication beside computing waits for the last in the background, for much longer than the job does."""
    for seed in range(5):
        job = GpuJob(factor=one_slow(2, 1.02), noise=0.005, seed=seed, collectives=collectives, steps=150)
        job.overlaps = True
        assert job.play() == []


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("collectives", [1, 3, 25])
def test_a_gpu_that_becomes_slow_is_acted_on_once_it_has_cost_enough(collectives: int, overlaps: bool) -> None:
    job = GpuJob(factor=one_slow(2, 1.3, since=300), noise=0.03, steps=900, limits=SlowLimits(cost_s=10.0))
    job.collectives, job.overlaps = collectives, overlaps
    alarms = job.play()
    assert [(alarm.ranks, alarm.stance) for alarm in alarms if alarm.ranks] == [
        ((2,), Stance.NOTIFY),
        ((2,), Stance.ACT),
    ]
    assert all(alarm.at > 300 * STEP_S for alarm in alarms)


def test_ranks_that_share_a_gpu_are_not_named() -> None:
    job = GpuJob(factor=one_slow(2, 1.5), gpus=dict.fromkeys(range(4), "GPU-1"))
    assert job.play() == []
    job.limits = SlowLimits(shared_gpus=True)
    assert named(job.play()) == {(2,)}
    job.limits, job.gpus = SlowLimits(), {rank: f"GPU-{rank}" for rank in range(4)}
    assert named(job.play()) == {(2,)}
    job.gpus[0] = "GPU-2"
    assert job.play() == [], "nor is another one instead"
    job.gpus, job.tells = dict.fromkeys(range(4), "GPU-1"), lambda rank: False
    assert job.play() == []


def test_groups_whose_collectives_end_in_another_order() -> None:
    """A collective is told of when it has ended: one of another group, entered later, may have ended before."""
    made = SlowDetector(SlowLimits())
    made.on_launch(0.0, 1)
    beat = Beat(node="n0", generation=1, step=1, at=1.0)
    made.on_beat(1.0, beat, {0: (Arrival("1", 1, 0.9, 0.1),), 1: (Arrival("1", 1, 0.9, 0.1),)})
    made.on_beat(2.0, beat, {0: (Arrival("0", 1, 0.8, 0.1),), 1: (Arrival("0", 1, 0.8, 0.1),)})
    assert made._groups["0"].count == 1
