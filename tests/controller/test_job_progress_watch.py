"""What is said of a slow rank: who, and what is known of its machine. And what stays of the stacks of a hang."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.config import Settings
from holdfast.controller.job_progress_watch import StallWatch
from holdfast.core.detect.slow import LostPace
from holdfast.model.action import Launch
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.job_phase import Phase
from holdfast.model.observation import Beat, Strain, StrainKind
from holdfast.model.rank_traces import Arrival, Trace
from tests.core.diagnose.places import process, trace

SLOWED = "slows GPU 2 down for heat or power at 88 °C"


def test_what_slowness_costs_is_measured_while_the_job_trains_and_does_not_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view: Any = SimpleNamespace(phase=Phase.TRAINING, some_ended=False, generation=1)
    tracing: Any = None
    watch = StallWatch(Settings(), view, tracing, lambda: 0.0)
    monkeypatch.setattr(watch.slow, "find_lost_pace", lambda now: LostPace(since=100.0, ratio=2.0, blur_s=0.0))
    stands: list[float] = []
    monkeypatch.setattr(watch.hang, "stands_since", lambda now: stands[0] if stands else None)
    told = watch.measure_slow_time(130.0)
    assert told and (told.since, told.until, told.cost_s) == (100.0, 130.0, 15.0)
    assert watch.measure_slow_time(134.0) is None
    stands.append(134.0)
    told = watch.measure_slow_time(300.0)
    assert told and (told.until, told.cost_s) == (134.0, 17.0), "the time in which it stands is another's"
    stands.clear()
    view.phase = Phase.STOPPING
    assert watch.measure_slow_time(310.0) is None


@pytest.mark.parametrize(("hot", "said"), [("n2", f"; its machine {SLOWED}"), ("n1", ""), ("", "")])
def test_a_slow_gpu_is_named_with_what_slows_its_machine_down(hot: str, said: str) -> None:
    view: Any = SimpleNamespace(phase=Phase.TRAINING, some_ended=False)
    tracing: Any = None
    watch = StallWatch(Settings(), view, tracing, lambda: 0.0)
    seats = tuple(Seat(node=f"n{rank}", group_rank=rank, first_rank=rank, nproc=1) for rank in range(4))
    watch.on_launch(0.0, Launch(id=1, generation=1, seats=seats))
    strains = (Strain(kind=StrainKind.SLOWS, sign="gpu.slowed GPU 2", nodes=(hot,), since=1.0, text=SLOWED),)
    told: list[Arrival] = []
    alarms = []
    for step in range(1, 60):
        now = 0.26 * step
        told = [*told[-15:], Arrival("0", step, now)]
        for rank in range(4):
            held = tuple(Arrival(one.group, one.seq, one.at, 0.002 if rank == 2 else 0.062) for one in told)
            beat = Beat(node=f"n{rank}", generation=1, step=step, at=now, sent=now, arrivals={rank: held})
            beat = msgspec.structs.replace(beat, strains=strains if beat.node == hot else ())
            alarm = watch.on_beat(now, beat)
            alarms += [alarm] if alarm else []
    [alarm] = alarms
    assert alarm.ranks == (2,) and alarm.reason.endswith(f" rounds{said}")


async def test_the_alarm_of_a_hang_keeps_the_stacks_that_it_was_raised_for() -> None:
    seats = tuple(Seat(node=f"n{rank}", group_rank=rank, first_rank=rank, nproc=1) for rank in range(4))
    ranks = [process(rank, node=f"n{rank}", state="T" if rank == 2 else "S") for rank in range(4)]

    async def take_traces(deadline_s: float, nodes: tuple[str, ...]) -> tuple[Trace, ...]:
        return tuple(trace(*ranks))

    view: Any = SimpleNamespace(
        phase=Phase.TRAINING, some_ended=False, generation=1, seats=seats, mesh=(), has_ended=lambda node: False
    )
    tracing: Any = SimpleNamespace(take_traces=take_traces)
    now = 100.0
    watch = StallWatch(Settings(), view, tracing, lambda: now)
    watch.on_launch(now, Launch(id=1, generation=1, seats=seats))
    for step in range(1, 20):
        now += 0.2
        for seat in seats:
            watch.on_beat(now, Beat(node=seat.node, generation=1, step=step, at=now, sent=now))
    now += 60.0
    [alarm] = await watch.look_at_ranks()
    assert isinstance(alarm, Alarm) and alarm.stance is Stance.ACT and alarm.ranks == (2,)
    assert alarm.stacks[0].count == 4
    assert [row.ranks for row in alarm.stacks if row.named] == ["rank 2"]
