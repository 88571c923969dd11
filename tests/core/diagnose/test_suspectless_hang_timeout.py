"""A job that stands still while nobody can be named for it: when that is acted on, and when it is waited for."""

from collections.abc import Callable

import msgspec
import pytest

from holdfast.core.detect.hang import HangDetector, HangLimits
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.core.diagnose.suspectless_hang_timeout import Standstill, find_reason
from holdfast.model.detector_alarm import UNNAMED, Alarm, Kind, Stance
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace
from tests.core.detect.test_hang import LIMITS, beat, trained

REDUCE = (Frame("main", "train.py", 5), Frame("all_reduce", "torch/distributed/distributed_c10d.py", 9))
ITEM = (Frame("main", "train.py", 6), Frame("item", "torch/_tensor.py", 9))
RUN = (Frame("main", "train.py", 7), Frame("evaluate", "train.py", 30))
SLEEP = (Frame("main", "train.py", 8), Frame("get", "queue.py", 3))
Look = Callable[[float], tuple[Trace, ...]]


def rank_at(
    rank: int, frames: tuple[Frame, ...], now: float, *, cpu: float = 0.0, io: float = 0.0, moves: bool = False
) -> Process:
    """A rank that has used so much of a core, and so many bytes a second, since the beginning."""
    shown = (*frames[:-1], msgspec.structs.replace(frames[-1], line=int(now))) if moves else frames
    thread = Thread(main=True, frames=shown)
    return Process(
        node=f"n{rank}", rank=rank, pid=10 + rank, state="S", cpu_s=cpu * now, io_bytes=int(io * now), threads=(thread,)
    )


def look(now: float, processes: list[Process], *groups: Collective) -> tuple[Trace, ...]:
    """The same collectives of all ranks."""
    return tuple(
        Trace(node=p.node, at=now, processes=(p,), flights=(Flight(node=p.node, rank=p.rank, groups=groups),))
        for p in processes
    )


def inside(now: float = 0.0, expires_at: float = 0.0) -> Collective:
    return Collective(group="0", entered=6, completed=5, op="all_reduce", at=now, expires_at=expires_at)


def stands(made: HangDetector, now: float, seconds: float, traces: Look) -> tuple[float, Alarm | None]:
    """Looks whenever the detector asks; for how long it stood at the first alarm, or at the end."""
    began = now
    while now < began + seconds:
        now += 0.25
        if made.should_look(now):
            found = traces(now)
            if alarm := made.on_traces(now, found, find_blocking(found)):
                return now - began, alarm
    return now - began, None


def both(
    frames: tuple[Frame, ...], *groups: Collective, cpu: float = 0.0, io: float = 0.0, moves: bool = False
) -> Look:
    return lambda now: look(now, [rank_at(r, frames, now, cpu=cpu, io=io, moves=moves) for r in (0, 1)], *groups)


@pytest.mark.parametrize(("frames", "cpu"), [(REDUCE, 0.0), (REDUCE, 1.0), (ITEM, 1.0)])
def test_all_in_one_collective_are_acted_on_though_nobody_is_named(frames: tuple[Frame, ...], cpu: float) -> None:
    """NCCL's ranks spin while they wait, often in a call that only asks for the result."""
    made, now = trained()
    stood_s, alarm = stands(made, now, 20_000.0, both(frames, inside(), cpu=cpu))
    assert alarm is not None and 180.0 <= stood_s <= 240.0
    assert (alarm.kind, alarm.stance, alarm.hard) == (Kind.HANG, Stance.ACT, False)
    assert (alarm.suspects, alarm.ranks, alarm.signature) == ((), (), UNNAMED), "nobody is blamed"
    blocking = find_blocking(both(frames, inside(), cpu=cpu)(now))
    assert alarm.reason.startswith("the job has stood at step 40 for ") and blocking.reason in alarm.reason


def test_it_is_acted_on_before_the_collective_times_out() -> None:
    made, now = trained()
    stood_s, alarm = stands(made, now, 20_000.0, both(REDUCE, inside(now, now + 60.0)))
    assert alarm is not None and 50.0 <= stood_s < 60.0
    left_s = round(60.0 - stood_s)
    assert alarm.signature == UNNAMED and alarm.reason.endswith(f" {left_s} s") and left_s <= 5


@pytest.mark.parametrize("expired_s", [-300.0, 2.0])
def test_a_forgotten_collective_that_times_out_in_a_short_pause_stops_nothing(expired_s: float) -> None:
    """Nobody waits for the result of an operation, so nobody hears whether it is over."""
    made, now = trained()
    traces = both(RUN, inside(now - 600.0, now + expired_s), cpu=1.0)
    assert stands(made, now, 8.0, traces)[1] is None


def test_a_hang_in_the_first_collective_is_acted_on_before_it_times_out() -> None:
    made = HangDetector(LIMITS)
    made.on_launch(100.0, 1, ("n0", "n1"))
    stood_s, alarm = stands(made, 100.0, 20_000.0, both(REDUCE, inside(130.0, 730.0)))
    assert alarm is not None and 610.0 <= stood_s < 630.0
    assert made.step == -1 and made.describe_step() == ", no step seen yet,"
    assert f", {stood_s:.0f} s " in alarm.reason.replace(made.describe_step(), ",")


@pytest.mark.parametrize("life", [{"moves": True}, {"io": 1e6}])
def test_a_job_in_which_ranks_move_is_left_alone(life: dict[str, float]) -> None:
    """An evaluation, or a checkpoint, without an end in sight: whoever stops it will stop it again."""
    made, now = trained()
    _, alarm = stands(made, now, 20_000.0, both(RUN, io=life.get("io", 0.0), moves="moves" in life))
    assert alarm is None


@pytest.mark.parametrize("cpu", [0.0, 1.0])
def test_ranks_that_do_not_wait_for_each_other_get_longer(cpu: float) -> None:
    """All wait for somebody outside, or compute in one call."""
    made, now = trained()
    stood_s, alarm = stands(made, now, 20_000.0, both(SLEEP, cpu=cpu))
    assert alarm is not None and 1800.0 <= stood_s <= 1900.0


def test_before_the_first_step_only_ranks_that_wait_for_each_other_are_acted_on() -> None:
    """A script that serves, or whose steps nobody counts."""
    for traces, acted in ((both(SLEEP), False), (both(RUN, cpu=1.0), False), (both(REDUCE, inside()), True)):
        made = HangDetector(LIMITS)
        made.on_launch(100.0, 1, ("n0", "n1"))
        assert bool(stands(made, 100.0, 20_000.0, traces)[1]) is acted


def test_one_rank_that_writes_its_log_does_not_keep_a_job_alive() -> None:
    made, now = trained()

    def traces(at: float) -> tuple[Trace, ...]:
        ranks = [rank_at(0, REDUCE, at, io=1e5), *(rank_at(r, REDUCE, at) for r in (1, 2, 3))]
        return look(at, ranks, inside())

    stood_s, alarm = stands(made, now, 20_000.0, traces)
    assert alarm is not None and stood_s <= 240.0


def test_a_pause_that_ended_by_itself_is_waited_for_the_next_time() -> None:
    made, now = trained()
    now += stands(made, now, 150.0, both(REDUCE, inside()))[0]
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, 41))
    stood_s, alarm = stands(made, now, 20_000.0, both(REDUCE, inside()))
    assert alarm is not None and 200.0 <= stood_s <= 260.0, "one and a half times as long"


def test_a_long_pause_in_which_ranks_moved_excuses_no_standstill() -> None:
    """An evaluation of an hour."""
    made, now = trained()
    now += stands(made, now, 3600.0, both(RUN, moves=True))[0]
    for node in ("n0", "n1"):
        made.on_beat(now, msgspec.structs.replace(beat(node, 41), sealed=41))
    stood_s, alarm = stands(made, now, 20_000.0, both(REDUCE, inside()))
    assert alarm is not None and stood_s <= 240.0


@pytest.mark.parametrize(("saves", "least"), [(True, 180.0), (False, 800.0)])
def test_where_a_restart_costs_more_it_is_waited_for_longer(saves: bool, least: float) -> None:
    """Two hundred steps of 4 s: all of them are lost unless something was saved."""
    made = HangDetector(LIMITS)
    now = 100.0
    made.on_launch(now, 1, ("n0", "n1"))
    for step in range(1, 201):
        for part in range(8):
            made.should_look(now + part / 2)
        now += 4.0
        for node in ("n0", "n1"):
            told = Beat(node=node, generation=1, step=step, at=now, origin=0, sealed=step if saves else -1)
            made.on_beat(now, told)
    stood_s, alarm = stands(made, now, 20_000.0, both(REDUCE, inside()))
    assert alarm is not None and least <= stood_s <= least + 70.0


def test_a_job_whose_stacks_nobody_could_read_is_left_to_its_timeouts() -> None:
    """It may be in an evaluation as well."""
    made, now = trained()
    assert stands(made, now, 20_000.0, both((), inside(now, now + 600.0), cpu=1.0))[1] is None


def test_shadow_mode_tells_it_once() -> None:
    made, now = trained(limits=HangLimits(stance="notify"))
    stood_s, alarm = stands(made, now, 600.0, both(REDUCE, inside()))
    assert alarm is not None and alarm.stance is Stance.NOTIFY
    assert stands(made, now + stood_s, 3000.0, both(REDUCE, inside()))[1] is None


@pytest.mark.parametrize(
    ("stall", "acts"),
    [
        (Standstill(quiet_s=179.0, waits=True, stepped=True), False),
        (Standstill(quiet_s=180.0, waits=True, stepped=True), True),
        (Standstill(quiet_s=180.0, waits=False, stepped=True), False),
        (Standstill(quiet_s=1800.0, waits=False, stepped=True), True),
        (Standstill(quiet_s=1800.0, waits=False, stepped=False), False),
        (Standstill(quiet_s=180.0, waits=True, stepped=True, restart_s=200.0), False),
        (Standstill(quiet_s=200.0, waits=True, stepped=True, restart_s=200.0), True),
        (Standstill(quiet_s=1800.0, waits=True, stepped=True, restart_s=9e9), True),
        (Standstill(quiet_s=200.0, waits=True, stepped=True, usual_s=300.0), False),
        (Standstill(quiet_s=15.0, waits=True, stepped=True, expires_s=6.0), False),
        (Standstill(quiet_s=15.0, waits=True, stepped=True, expires_s=5.0), True),
        (Standstill(quiet_s=15.0, waits=False, stepped=True, expires_s=5.0), False),
        (Standstill(quiet_s=5.0, waits=True, stepped=True, expires_s=5.0), False),
        (Standstill(quiet_s=15.0, waits=True, stepped=False, usual_s=300.0, expires_s=5.0), True),
    ],
)
def test_the_rule(stall: Standstill, acts: bool) -> None:
    assert bool(find_reason(stall, LIMITS.act_s, LIMITS.last_s)) is acts


def test_the_rule_says_why() -> None:
    expiring = Standstill(quiet_s=15.0, waits=True, stepped=True, expires_s=4.0)
    assert find_reason(expiring, LIMITS.act_s, LIMITS.last_s) == "a collective times out in 4 s"
    cheap = Standstill(quiet_s=200.0, waits=True, stepped=True, restart_s=90.0)
    assert find_reason(cheap, LIMITS.act_s, LIMITS.last_s) == (
        "nothing has moved for 200 s, and a restart costs at most 90 s"
    )
