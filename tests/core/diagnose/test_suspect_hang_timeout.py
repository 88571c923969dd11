"""A job that stands because it waits for ranks that are named: when that is acted on, and what is waited for longer."""

import re
from collections.abc import Callable
from math import inf

import msgspec
import pytest

from holdfast.core.detect.hang import HangDetector, HangLimits
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.core.diagnose.suspect_hang_timeout import NamedStandstill, find_outside_waits, hang_terms
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace
from tests.core.detect.test_hang import LIMITS, beat, trained

MAIN = Frame("main", "train.py", 5)
REDUCE = (MAIN, Frame("all_reduce", "torch/distributed/distributed_c10d.py", 9))
RECEIVE = (MAIN, Frame("recv", "torch/distributed/distributed_c10d.py", 9))
BACKWARD = (MAIN, Frame("_engine_run_backward", "torch/autograd/graph.py", 9))
ITEM = (Frame("main", "train.py", 6),)
AUGMENT = (Frame("main", "train.py", 8), Frame("augment", "train.py", 30))
NAP, LOCK, CHILD = "hrtimer_nanosleep", "futex_wait_queue", "do_wait"
IN, OUT = Collective(group="0", entered=6, completed=5, op="all_reduce"), Collective(group="0", entered=5, completed=5)
Look = Callable[[float], tuple[Trace, ...]]


def rank_at(rank: int, frames: tuple[Frame, ...], sleeps_in: str = "", *, cpu_s: float = 0.0) -> Process:
    threads = (Thread(main=True, sleeps_in=sleeps_in, frames=frames),) if frames else ()
    return Process(node=f"n{rank}", rank=rank, pid=10 + rank, state="S", cpu_s=cpu_s, threads=threads)


def look(now: float, *ranks: tuple[Process, Collective]) -> tuple[Trace, ...]:
    return tuple(
        Trace(node=p.node, at=now, processes=(p,), flights=(Flight(node=p.node, rank=p.rank, groups=(group,)),))
        for p, group in ranks
    )


def waits_for(suspect: Process, *below: Process, cpu: float = 0.0) -> Look:
    """Rank 0 waits in a collective for this one, which uses so much of a core."""

    def traces(now: float) -> tuple[Trace, ...]:
        busy = msgspec.structs.replace(suspect, cpu_s=cpu * now)
        n0, n1 = look(now, (rank_at(0, REDUCE, "futex_wait_queue"), IN), (busy, OUT))
        return n0, msgspec.structs.replace(n1, processes=(*n1.processes, *below))

    return traces


def acted_after(made: HangDetector, now: float, seconds: float, traces: Look) -> tuple[float, Alarm | None]:
    """Looks whenever the detector asks; for how long it stood when it was acted on, or at the end."""
    began = now
    while now < began + seconds:
        now += 0.25
        if made.should_look(now):
            found = traces(now)
            alarm = made.on_traces(now, found, find_blocking(found))
            if alarm and alarm.stance is Stance.ACT:
                return now - began, alarm
    return now - began, None


def goes_on(made: HangDetector, now: float) -> None:
    """It makes a step, and keeps its state."""
    step = made.step + 1
    for node in ("n0", "n1"):
        made.on_beat(now, msgspec.structs.replace(beat(node, step), sealed=step))


SLEEPER = waits_for(rank_at(1, AUGMENT, NAP))


@pytest.mark.parametrize("sleeps_in", [NAP, LOCK, CHILD])
def test_a_sleeper_is_acted_on_when_that_has_cost_a_restart(sleeps_in: str) -> None:
    made, now = trained()
    stood_s, alarm = acted_after(made, now, 600.0, waits_for(rank_at(1, AUGMENT, sleeps_in)))
    assert alarm is not None and (alarm.ranks, alarm.suspects, alarm.hard) == ((1,), ("n1",), False)
    assert 13.0 <= stood_s <= 15.0, "3 s until the first look, and 10 s without a sign of life"
    assert re.findall(r" (\d+) s\b", alarm.reason)[-2:] == ["10", "8"], "and the restart"


@pytest.mark.parametrize(("steps", "saves", "least_s"), [(300, True, 10.0), (300, False, 60.0), (3000, False, 180.0)])
def test_the_dearer_a_restart_the_longer_it_is_waited_for(steps: int, saves: bool, least_s: float) -> None:
    made = HangDetector(LIMITS)
    made.on_launch(100.0, 1, ("n0", "n1"))
    now = 100.0
    for step in range(1, steps + 1):
        now += 0.2
        made.should_look(now)
        for node in ("n0", "n1"):
            told = Beat(node=node, generation=1, step=step, at=now, origin=0, sealed=step if saves else -1)
            made.on_beat(now, told)
    stood_s, alarm = acted_after(made, now, 600.0, SLEEPER)
    assert alarm is not None and least_s + 3.0 <= stood_s <= least_s + 5.0, "to the second: a look is planned for it"


def test_before_any_step_the_cost_of_a_start_is_unknown() -> None:
    made = HangDetector(LIMITS)
    made.on_launch(100.0, 1, ("n0", "n1"))
    stood_s, alarm = acted_after(made, 100.0, 3000.0, SLEEPER)
    assert alarm is not None and stood_s >= LIMITS.start_s + LIMITS.act_s - 10.0


def in_file(*names: str, function: str = "get") -> tuple[Frame, ...]:
    return (MAIN, *(Frame(function, name, 3) for name in names), Frame("inner", "lib.py", 1))


OUTSIDE = [
    *[rank_at(1, AUGMENT, name) for name in ("", "poll_schedule_timeout", "pipe_read", "sk_wait_data", "nfs_wait")],
    msgspec.structs.replace(rank_at(1, AUGMENT, NAP), state="D"),
    rank_at(1, (), NAP),  # no stack
    rank_at(1, in_file("botocore/retryhandler.py"), NAP),
    rank_at(1, in_file("/usr/lib/python3.12/ssl.py"), LOCK),
    rank_at(1, in_file("/env/lib/python3.12/site-packages/torch/_inductor/codecache.py"), LOCK),
    rank_at(1, in_file("run/train.py", function="Trainer._save_checkpoint"), NAP),
    rank_at(1, in_file("run/train.py", function="evaluate"), NAP),
]


@pytest.mark.parametrize("suspect", OUTSIDE)
def test_who_may_wait_for_something_outside_is_waited_for_as_long_as_ever(suspect: Process) -> None:
    made, now = trained()
    stood_s, alarm = acted_after(made, now, 600.0, waits_for(suspect))
    assert alarm is not None and LIMITS.act_s <= stood_s <= LIMITS.act_s + 5.0
    assert re.findall(r" (\d+) s\b", alarm.reason)[-1] == "180"


@pytest.mark.parametrize(
    ("main", "other", "outside"),
    [
        (LOCK, LOCK, set()),
        (LOCK, NAP, set()),
        (LOCK, "sk_wait_data", {1}),
        (LOCK, "", {1}),
        (NAP, "sk_wait_data", set()),
    ],
)
def test_who_waits_for_a_lock_may_wait_for_a_thread_that_reads(main: str, other: str, outside: set[int]) -> None:
    suspect = rank_at(1, AUGMENT, main)
    reader = Thread(sleeps_in=other, frames=(Frame("run", "threading.py", 1), Frame("prefetch", "train.py", 2)))
    suspect = msgspec.structs.replace(suspect, threads=(*suspect.threads, reader))
    assert find_outside_waits(waits_for(suspect)(1.0), "") & {1} == outside


@pytest.mark.parametrize(
    ("child", "outside"),
    [
        (rank_at(1, AUGMENT, NAP), set()),
        (rank_at(1, AUGMENT, "pipe_read"), {1}),
        (rank_at(1, (Frame("write_state", "train.py", 1),), NAP), {1}),
        (rank_at(1, (), NAP), {1}),
    ],
)
def test_who_waits_for_a_child_is_judged_by_it(child: Process, outside: set[int]) -> None:
    child = msgspec.structs.replace(child, pid=99, child=True)
    assert find_outside_waits(waits_for(rank_at(1, AUGMENT, CHILD), child)(1.0), "") & {1} == outside


def test_an_idle_child_excuses_no_sleeper() -> None:
    """A data loader's worker waits for orders all day; only one that the kernel keeps counts."""
    idle = msgspec.structs.replace(rank_at(1, AUGMENT, "pipe_read"), pid=99, child=True)
    assert find_outside_waits(waits_for(rank_at(1, AUGMENT, NAP), idle)(1.0), "") == set()
    kept = msgspec.structs.replace(idle, state="D")
    assert find_outside_waits(waits_for(rank_at(1, AUGMENT, NAP), kept)(1.0), "") == {1}


@pytest.mark.parametrize(("phase", "longer"), [("", False), ("train", False), ("Training", False), ("eval", True)])
def test_a_phase_with_another_name_than_training_is_waited_for(phase: str, longer: bool) -> None:
    made, now = trained()
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, 41, phase))
    stood_s, alarm = acted_after(made, now, 600.0, SLEEPER)
    assert alarm is not None and (stood_s >= LIMITS.act_s) is longer


def test_a_moment_at_a_socket_begins_it_anew() -> None:
    made, now = trained()
    began = now

    def traces(at: float) -> tuple[Trace, ...]:
        return waits_for(rank_at(1, AUGMENT, "sk_wait_data" if began + 5.0 < at < began + 9.0 else NAP))(at)

    stood_s, alarm = acted_after(made, now, 600.0, traces)
    assert alarm is not None and 20.0 <= stood_s <= 22.0, "10 s from the look at 10 s on"


def test_a_rank_that_computes_is_waited_for_to_the_last() -> None:
    made, now = trained()
    stood_s, alarm = acted_after(made, now, 4000.0, waits_for(rank_at(1, AUGMENT, NAP), cpu=1.0))
    assert alarm is not None and stood_s >= LIMITS.last_s


def test_a_sleeper_for_whom_nobody_waits_is_waited_for() -> None:
    """Each of the others is at its own work: it is named for being elsewhere than most."""
    made, now = trained()
    run = (MAIN, Frame("forward", "model.py", 3))

    def traces(at: float) -> tuple[Trace, ...]:
        return look(at, *((rank_at(rank, run), OUT) for rank in (0, 2, 3)), (rank_at(1, AUGMENT, NAP), OUT))

    stood_s, alarm = acted_after(made, now, 600.0, traces)
    assert alarm is not None and stood_s >= LIMITS.act_s


def test_as_long_as_ranks_have_slept_before_they_may_sleep_again() -> None:
    made, now = trained()
    stood_s, alarm = acted_after(made, now, 12.0, SLEEPER)
    assert alarm is None
    goes_on(made, now + stood_s)
    elsewhere = waits_for(rank_at(1, (*AUGMENT[:1], Frame("shuffle", "train.py", 40)), NAP))
    slept_s, alarm = acted_after(made, now + stood_s, 600.0, elsewhere)
    assert alarm is not None and 3.0 + 1.5 * 9.0 <= slept_s <= 19.0


def test_a_long_pause_of_a_rank_that_worked_excuses_no_sleeper_elsewhere() -> None:
    made, now = trained()
    evaluation = waits_for(rank_at(1, (*AUGMENT[:1], Frame("evaluate", "train.py", 40)), ""), cpu=1.0)
    stood_s, _ = acted_after(made, now, 400.0, evaluation)
    goes_on(made, now + stood_s)
    slept_s, alarm = acted_after(made, now + stood_s, 600.0, SLEEPER)
    assert alarm is not None and slept_s <= 15.0


def test_a_place_that_ranks_have_come_back_from_is_waited_for() -> None:
    made, now = trained()
    stood_s, _ = acted_after(made, now, 60.0, waits_for(rank_at(1, AUGMENT, ""), cpu=1.0))
    goes_on(made, now + stood_s)
    slept_s, alarm = acted_after(made, now + stood_s, 600.0, SLEEPER)
    assert alarm is not None and 90.0 <= slept_s <= 95.0, "one and a half times as long"


def test_where_a_restart_did_not_help_it_is_waited_for_twice_as_long() -> None:
    """A pause of a minute at one place, in every epoch, is lived through at the fourth time."""
    made, now = trained()
    stood = []
    for generation in range(2, 6):
        stood_s, alarm = acted_after(made, now, 63.0, SLEEPER)
        stood.append(round(stood_s - 3.0, -1) if alarm else None)
        now += stood_s
        made.on_launch(now, generation, ("n0", "n1"))
        for step in (1, 2):
            now += 1.0
            made.should_look(now)
            for node in ("n0", "n1"):
                made.on_beat(now, beat(node, step, generation=generation))
    assert stood == [10.0, 20.0, 40.0, None]


# --- what cannot end by itself ---------------------------------------------------------------------------------------


def operations(now: float) -> tuple[Trace, ...]:
    """Rank 1 gathers where the others reduce; NCCL's ranks spin in a call that only asks for the result."""
    other = msgspec.structs.replace(IN, op="all_gather")
    spins = [(rank_at(rank, ITEM, cpu_s=now), IN) for rank in (0, 2, 3)]
    return look(now, *spins, (rank_at(1, ITEM, cpu_s=now), other))


def circle(frames: tuple[Frame, ...], cpu: float = 0.0) -> Look:
    """Ranks 0 and 1 wait for each other in two groups; the rest for rank 1."""

    def traces(now: float) -> tuple[Trace, ...]:
        side = Collective(group="side", entered=1, completed=0, op="all_reduce")
        found = [(rank_at(rank, REDUCE if rank > 1 else frames, cpu_s=cpu * now), IN) for rank in range(4)]
        told = list(look(now, *found))
        for rank, groups in ((0, (IN, msgspec.structs.replace(side, entered=0))), (1, (OUT, side))):
            flight = Flight(node=f"n{rank}", rank=rank, groups=groups)
            told[rank] = msgspec.structs.replace(told[rank], flights=(flight,))
        return tuple(told)

    return traces


@pytest.mark.parametrize(
    ("traces", "ranks"), [(operations, (1,)), (circle(REDUCE), (0, 1)), (circle(BACKWARD), (0, 1))]
)
def test_a_deadlock_is_acted_on_at_the_second_look(traces: Look, ranks: tuple[int, ...]) -> None:
    made, now = trained(steps=2000)
    stood_s, alarm = acted_after(made, now, 600.0, traces)
    assert alarm is not None and alarm.ranks == ranks
    assert stood_s <= 5.0, "whatever a restart costs"
    assert alarm.reason.endswith("which cannot end by itself")


def test_one_look_is_not_enough() -> None:
    made, now = trained()
    alarms = []
    for turn in range(6):  # now it is this, now that: records are up to a second old
        now += 1.1
        found = operations(now) if turn % 2 else SLEEPER(now)
        alarms.append(made.on_traces(now, found, find_blocking(found)))
    assert all(alarm is None or alarm.stance is Stance.NOTIFY for alarm in alarms)


def test_what_only_stacks_have_shown_is_looked_at_again() -> None:
    """Nobody could read the records at the first look."""
    made, now = trained()
    gather = (MAIN, Frame("all_gather", "torch/distributed/distributed_c10d.py", 9))
    ranks = [(rank_at(rank, REDUCE), IN) for rank in (0, 2, 3)]
    known = look(now, *ranks, (rank_at(1, gather), msgspec.structs.replace(IN, op="all_gather")))
    unknown = tuple(msgspec.structs.replace(trace, flights=()) for trace in known)
    stances = []
    for turn, found in enumerate((unknown, known, known)):
        alarm = made.on_traces(now + 1.1 * turn, found, find_blocking(found))
        stances.append(alarm.stance if alarm else None)
    assert stances == [None, Stance.NOTIFY, Stance.ACT]


def test_a_deadlock_in_which_frames_move_is_none() -> None:
    made, now = trained()

    def traces(at: float) -> tuple[Trace, ...]:
        *rest, n1 = operations(at)
        moving = Thread(main=True, frames=(Frame("main", "train.py", int(at * 4)),))
        process = msgspec.structs.replace(n1.processes[0], threads=(moving,))
        return (*rest, msgspec.structs.replace(n1, processes=(process,)))

    assert acted_after(made, now, 600.0, traces)[1] is None


@pytest.mark.parametrize("frames", [ITEM, RECEIVE, BACKWARD])
def test_a_circle_that_stacks_do_not_confirm_follows_the_rule_of_costs(frames: tuple[Frame, ...]) -> None:
    """Another thread may have entered the collective, and a message is in no record; NCCL's ranks spin meanwhile."""
    made, now = trained()
    stood_s, alarm = acted_after(made, now, 600.0, circle(frames, cpu=1.0))
    assert alarm is not None and 13.0 <= stood_s <= 15.0
    assert "without a move for 10 s" in alarm.reason


def test_shadow_mode_acts_on_nothing() -> None:
    made, now = trained(limits=HangLimits(stance="notify"))
    for traces in (SLEEPER, operations):
        assert acted_after(made, now, 60.0, traces)[1] is None


@pytest.mark.parametrize(
    ("hang", "acts"),
    [
        (NamedStandstill(stood_s=15.0, asleep_s=9.9), False),
        (NamedStandstill(stood_s=15.0, asleep_s=10.0), True),
        (NamedStandstill(stood_s=50.0, asleep_s=40.0, restart_s=41.0), False),
        (NamedStandstill(stood_s=50.0, asleep_s=40.0, restart_s=40.0), True),
        (NamedStandstill(stood_s=50.0, asleep_s=40.0, slept_s=41.0), False),
        (NamedStandstill(stood_s=50.0, asleep_s=40.0, usual_s=900.0), True),
        (NamedStandstill(stood_s=50.0, asleep_s=40.0, tried_s=30.0), False),
        (NamedStandstill(stood_s=900.0, asleep_s=180.0, tried_s=170.0, restart_s=inf), True),
        (NamedStandstill(stood_s=900.0, still_s=180.0, usual_s=200.0), False),
        (NamedStandstill(stood_s=900.0, still_s=180.0), True),
        (NamedStandstill(stood_s=1799.0, quiet_s=1799.0), False),
        (NamedStandstill(stood_s=1800.0), True),
        (NamedStandstill(stood_s=5.0, deadlock="circle", certain=True, usual_s=900.0), True),
        (NamedStandstill(stood_s=5.0, certain=True), False),
        (NamedStandstill(stood_s=5.0, deadlock="circle"), False),
        (NamedStandstill(stood_s=50.0, quiet_s=40.0, deadlock="circle", restart_s=20.0), True),
        (NamedStandstill(stood_s=50.0, quiet_s=40.0, restart_s=20.0), False),
    ],
)
def test_the_rule(hang: NamedStandstill, acts: bool) -> None:
    terms = hang_terms(hang, LIMITS.act_s, LIMITS.last_s)
    assert any(term.lasts_s >= term.limit_s for term in terms) is acts


def test_no_floor_is_above_the_users_limit() -> None:
    terms = hang_terms(NamedStandstill(stood_s=9.0, asleep_s=4.0), 4.0, 1800.0)
    assert any(term.lasts_s >= term.limit_s for term in terms)
