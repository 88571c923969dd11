"""Who is named when a job stands still, how soon, and when that is acted on."""

import random

import msgspec
import pytest

from holdfast.core.detect.hang import HangDetector, HangLimits
from holdfast.core.diagnose.blocking_ranks import BlockingRanks
from holdfast.core.incident.incident_text import describe_cause
from holdfast.model.detector_alarm import GPU_HANG, Alarm, Stance
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace

LIMITS = HangLimits()
NAMED = BlockingRanks(ranks=(1,), nodes=("n1",), wide=("n1",), how="missing", reason="it is in user code")
STOPPED = msgspec.structs.replace(NAMED, how="stopped", hard=True, reason="rank 1 is stopped")


def beat(node: str, step: int, phase: str = "", generation: int = 1) -> Beat:
    return Beat(node=node, generation=generation, step=step, at=0.0, phase=phase, origin=0)


def trained(steps: int = 40, step_s: float = 0.2, limits: HangLimits = LIMITS) -> tuple[HangDetector, float]:
    """Two nodes that have made some steps; and the time."""
    made = HangDetector(limits)
    made.on_launch(100.0, 1, ("n0", "n1"))
    now = 100.0
    for step in range(1, steps + 1):
        for part in range(1, 41):
            made.should_look(now + step_s * part / 40)
        now += step_s
        for node in ("n0", "n1"):
            made.on_beat(now, beat(node, step))
    return made, now


def passes(made: HangDetector, now: float, seconds: float) -> float:
    """Time in which nothing moves but the clock; when it becomes suspicious, or its end."""
    for _ in range(int(seconds / 0.25)):
        now += 0.25
        if made.should_look(now):
            break
    return now


def seen(at: float, *, cpu_s: float = 1.0, line: int = 7, io: int = 0) -> tuple[Trace, ...]:
    frames = (Frame("main", "train.py", 3), Frame("load", "train.py", line))
    thread = Thread(main=True, frames=frames)
    rank = Process(node="n1", rank=1, pid=11, state="S", cpu_s=cpu_s, io_bytes=io, threads=(thread,))
    waits = Thread(main=True, frames=(Frame("main", "train.py", 5), Frame("all_reduce", "distributed_c10d.py", 9)))
    other = Process(node="n0", rank=0, pid=10, state="S", cpu_s=2.0, threads=(waits,))
    return Trace(node="n0", at=at, processes=(other,)), Trace(node="n1", at=at, processes=(rank,))


def test_fast_steps_are_missed_within_seconds() -> None:
    made, now = trained()
    assert 3.0 <= passes(made, now, 60.0) - now <= 3.5


@pytest.mark.parametrize("least_s", [0.0, 0.2, 0.5])
def test_a_job_of_short_steps_may_be_looked_at_within_half_a_second(least_s: float) -> None:
    made, now = trained(step_s=0.01, limits=HangLimits(least_s=least_s))
    assert passes(made, now, 60.0) - now <= 0.5, "asked every quarter of a second, nobody stood still"


def test_long_steps_are_waited_for() -> None:
    made, _ = trained(steps=20, step_s=10.0)
    assert made.patience_s == pytest.approx(80.0)


def test_the_first_step_may_take_its_time() -> None:
    made = HangDetector(LIMITS)
    made.on_launch(100.0, 1, ("n0", "n1"))
    assert made.patience_s == LIMITS.start_s


def test_before_the_first_step_nothing_counts_but_a_stopped_rank() -> None:
    made = HangDetector(LIMITS)
    made.on_launch(100.0, 1, ("n0", "n1"))
    now = passes(made, 100.0, 60.0)
    assert 10.0 <= now - 100.0 <= 10.5
    assert made.on_traces(now, seen(now), NAMED) is None
    later = passes(made, now, 60.0)
    assert 10.0 <= later - now <= 10.5
    alarm = made.on_traces(later, seen(later), STOPPED)
    assert alarm is not None and (alarm.stance, alarm.hard, alarm.ranks) == (Stance.ACT, True, (1,))
    assert alarm.reason == f"has stood, no step seen yet, {later - 100.0:.0f} s after its launch: {STOPPED.reason}"
    assert alarm.at == now, "it was seen to run then"


def test_named_at_the_second_look() -> None:
    made, now = trained()
    now = passes(made, now, 10.0)
    assert made.on_traces(now, seen(now), NAMED) is None
    assert not made.should_look(now + 0.5)
    assert made.should_look(now + 1.1)
    alarm = made.on_traces(now + 1.1, seen(now + 1.1), NAMED)
    assert alarm is not None
    assert (alarm.stance, alarm.ranks, alarm.suspects, alarm.hard) == (Stance.NOTIFY, (1,), ("n1",), False)
    assert " step 40" in alarm.reason and alarm.reason.endswith(NAMED.reason)
    assert made.on_traces(now + 3.0, seen(now + 3.0), NAMED) is None, "once"


@pytest.mark.parametrize(
    ("origins", "counted", "said"),
    [
        ((20, 20), True, "has stood at step 61 for "),
        ((20, -1), True, "has stood 41 steps after its launch for "),
        ((-1, -1), False, "has stood at step 41 for "),
    ],
)
def test_the_step_has_the_number_that_the_script_gives_it(origins: tuple[int, int], counted: bool, said: str) -> None:
    """What is counted in a generation that went on from step 20 is no step of the job."""
    made, now = trained()
    for node, origin in zip(("n0", "n1"), origins, strict=True):
        made.on_beat(now, msgspec.structs.replace(beat(node, 41), origin=origin, counted=counted))
    now = passes(made, now, 10.0)
    alarm = made.on_traces(now, seen(now), STOPPED)
    assert alarm is not None and alarm.reason.startswith(said)


def test_ranks_that_all_wait_for_one_another_keep_no_others_waiting() -> None:
    made, now = trained()
    both = msgspec.structs.replace(NAMED, ranks=(0, 1), nodes=("n0", "n1"), wide=("n0", "n1"), how="crossed", all=True)
    now = passes(made, now, 10.0)
    made.on_traces(now, seen(now), both)
    alarm = made.on_traces(now + 1.1, seen(now + 1.1), both)
    assert alarm is not None
    assert describe_cause(alarm) == f"ranks 0-1 on n0, n1 have stood at step 40 for 4 s: {NAMED.reason}"


def test_a_stopped_rank_is_acted_on_at_once() -> None:
    made, now = trained()
    now = passes(made, now, 10.0)
    alarm = made.on_traces(now, seen(now), STOPPED)
    assert alarm is not None and (alarm.stance, alarm.hard) == (Stance.ACT, True)
    # Whether anybody waits for it is not known: ranks may train each for themselves.
    assert " step 40 " in alarm.reason and alarm.reason.endswith(f": {STOPPED.reason}")


def look_on(made: HangDetector, now: float, until: float, look: "dict[str, float]") -> tuple[float, list[Stance]]:
    """Looks whenever it asks; every second some of these grow."""
    stances = []
    began = now
    while now < until:
        now += 0.25
        if made.should_look(now):
            grown = {name: rate * (now - began) for name, rate in look.items()}
            found = seen(now, cpu_s=1 + grown.get("cpu", 0), line=int(grown.get("line", 0)), io=int(grown.get("io", 0)))
            alarm = made.on_traces(now, found, NAMED)
            stances += [alarm.stance] if alarm else []
            if Stance.ACT in stances:
                break
    return now, stances


def test_a_rank_without_a_sign_of_life_is_acted_on_in_the_end() -> None:
    made, now = trained()
    ended, stances = look_on(made, now, now + 600.0, {})
    assert stances == [Stance.NOTIFY, Stance.ACT]
    assert 180.0 <= ended - now <= 240.0


@pytest.mark.parametrize("life", [{"cpu": 0.5}, {"io": 100_000.0}, {"line": 1.0}])
def test_a_rank_that_works_is_not_acted_on(life: dict[str, float]) -> None:
    made, now = trained()
    _, stances = look_on(made, now, now + 900.0, life)
    assert stances == [Stance.NOTIFY]


def test_not_even_a_rank_that_spins_is_waited_for_for_ever() -> None:
    made, now = trained()
    ended, stances = look_on(made, now, now + 4000.0, {"cpu": 1.0})
    assert stances == [Stance.NOTIFY, Stance.ACT] and ended - now >= 1800.0


def pauses(made: HangDetector, now: float, seconds: float, line: int = 7, phase: str = "") -> tuple[float, list[float]]:
    """The rank stands there for so long, and comes back; when it does, and after how long it was named."""
    began, named = now, []
    while now < began + seconds:
        now += 0.25
        if made.should_look(now) and made.on_traces(now, seen(now, cpu_s=now, line=line), NAMED):
            named.append(now - began)
    step = made.step + 1
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, step, phase))
    return now, named


def test_a_place_where_it_has_stood_before_is_waited_for() -> None:
    made, now = trained()
    now, named = pauses(made, now, 40.0)
    assert len(named) == 1 and named[0] < 6.0
    now, named = pauses(made, now, 40.0)
    assert named == [], "it came back from there after 40 s"
    now, named = pauses(made, now, 10.0, line=8)
    assert len(named) == 1 and named[0] < 6.0, "another place"
    _, named = pauses(made, now, 90.0)
    assert len(named) == 1 and 60.0 <= named[0] <= 90.0


def test_a_last_look_at_a_rank_that_goes_on_teaches_nothing() -> None:
    """Otherwise all that `main` calls would be a place where it may stand."""
    made, now = trained()
    ends, _ = pauses(made, now, 40.0)
    made, now = trained()
    while now < ends - 1.0:
        now += 0.25
        if made.should_look(now):
            made.on_traces(now, seen(now, cpu_s=now), NAMED)
    n0, n1 = seen(now, cpu_s=now)
    on_its_way = Thread(main=True, frames=(Frame("main", "train.py", 4), Frame("backward", "tensor.py", 1)))
    rank = msgspec.structs.replace(n1.processes[0], threads=(on_its_way,))
    made.on_traces(now, (n0, msgspec.structs.replace(n1, processes=(rank,))), NAMED)
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, 41))
    now, named = pauses(made, now, 10.0, line=8)
    assert len(named) == 1, "another place"
    _, named = pauses(made, now, 10.0)
    assert named == []


def test_a_phase_with_a_name_is_waited_for() -> None:
    made, now = trained()
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, 40, "eval"))
    now, named = pauses(made, now, 40.0, phase="eval")
    assert len(named) == 1
    assert made.patience_s == pytest.approx(60.0, rel=0.1)
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, 42, "train"))
    assert made.patience_s < 10.0


def test_two_looks_must_agree() -> None:
    made, now = trained()
    now = passes(made, now, 10.0)
    other = msgspec.structs.replace(NAMED, ranks=(0,), nodes=("n0",), wide=("n0",))
    for extra, named in ((0.0, NAMED), (1.1, other), (2.2, NAMED)):
        assert made.on_traces(now + extra, seen(now + extra), named) is None
    assert made.on_traces(now + 3.3, seen(now + 3.3), NAMED)


GPU = msgspec.structs.replace(NAMED, how="gpu", hard=True, reason="rank 1's GPU has not begun all_reduce 41")


def look_at_gpu(made: HangDetector, now: float, seconds: float) -> tuple[Alarm | None, float]:
    """Look whenever the detector wants to; return the alarm to act on, if there is one, and when."""
    until = now + seconds
    while now < until:
        now += 0.25
        alarm = made.on_traces(now, seen(now, cpu_s=now), GPU) if made.should_look(now) else None
        if alarm is not None and alarm.stance is Stance.ACT:
            return alarm, now
    return None, now


@pytest.mark.parametrize(("step_s", "after_s"), [(0.2, 10.0), (1.0, 40.0), (10.0, LIMITS.act_s)])
def test_a_gpu_that_stands_is_acted_on_when_waiting_has_cost_a_restart(step_s: float, after_s: float) -> None:
    """Here it costs the start and all of forty steps, since nothing is saved."""
    made, stood_at = trained(40, step_s)
    alarm, now = look_at_gpu(made, stood_at, 300.0)
    assert alarm is not None and after_s <= now - stood_at < after_s + 1
    assert (alarm.stance, alarm.hard, alarm.suspects, alarm.ranks) == (Stance.ACT, True, ("n1",), (1,))
    assert alarm.signature == f"{GPU_HANG} (1,)"
    assert alarm.reason == f"keeps the others waiting at step 40 for {now - alarm.at:.0f} s: {GPU.reason}"


def test_a_long_kernel_in_a_named_phase_is_no_proof_against_its_gpu() -> None:
    made, now = trained()
    for node in ("n0", "n1"):
        made.on_beat(now, beat(node, 40, "evaluation"))
    alarm, _ = look_at_gpu(made, now, 300.0)
    assert alarm is None


@pytest.mark.parametrize("before", [NAMED, msgspec.structs.replace(GPU, hard=False), BlockingRanks(reason="nobody")])
def test_a_gpu_that_was_not_certain_a_look_ago_is_looked_at_again(before: BlockingRanks) -> None:
    made, now = trained()
    now += 10.0
    for look in (GPU, before, GPU):
        alarm = made.on_traces(now, seen(now, cpu_s=now), look)
        assert alarm is None or alarm.stance is Stance.NOTIFY
        now += 1.1
    alarm = made.on_traces(now, seen(now, cpu_s=now), GPU)
    assert alarm is not None and alarm.stance is Stance.ACT and alarm.hard


def test_a_gpu_that_stands_for_less_than_a_record_or_begins_something_is_not_acted_on() -> None:
    made, now = trained()
    now += 10.0
    for turn in range(6):
        n0, n1 = seen(now, cpu_s=now)
        flight = Flight(node="n1", rank=1, groups=(Collective(group="0", entered=99, completed=9, started=10 + turn),))
        assert made.on_traces(now, (n0, msgspec.structs.replace(n1, flights=(flight,))), GPU) is None
        now += 1.1
    made, now = trained()
    now += 10.0
    for later in (0.0, 0.9):
        alarm = made.on_traces(now + later, seen(now + later, cpu_s=now + later), GPU)
        assert alarm is None or alarm.stance is Stance.NOTIFY


def test_who_still_comes_to_collectives_is_not_named() -> None:
    """An evaluation: records are up to a second old, and somebody is always last."""
    made, now = trained()
    now = passes(made, now, 10.0)
    for turn in range(8):
        now += 1.1 + 2.0 ** (turn // 2)
        n0, n1 = seen(now)
        flight = Flight(node="n1", rank=1, groups=(Collective(group="0", entered=100 + turn, completed=99 + turn),))
        assert made.on_traces(now, (n0, msgspec.structs.replace(n1, flights=(flight,))), NAMED) is None


def test_a_script_without_steps_is_judged_by_its_collectives() -> None:
    """Pure collectives, or an evaluation, for hours: somebody is always last. Then rank 1 stands for good."""
    made, now, stands_at = HangDetector(LIMITS), 100.0, 100.0 + 9000.0
    made.on_launch(now, 1, ("n0", "n1"))
    alarm = None
    while alarm is None and now < stands_at + 3000.0:
        now += 0.25
        if made.should_look(now):
            n0, n1 = seen(now, cpu_s=now)
            entered = int(min(now, stands_at))
            flight = Flight(node="n1", rank=1, groups=(Collective(group="0", entered=entered, completed=entered - 1),))
            alarm = made.on_traces(now, (n0, msgspec.structs.replace(n1, flights=(flight,))), NAMED)
    assert alarm is not None and alarm.stance is Stance.NOTIFY
    assert stands_at < now < stands_at + LIMITS.start_s + 60.0
    assert abs(alarm.at - stands_at) < 21.0, "the others have waited since then, not since the launch"


def test_nobody_is_an_answer() -> None:
    made, now = trained()
    now = passes(made, now, 10.0)
    for extra in (0.0, 1.1, 4.0):
        assert made.on_traces(now + extra, seen(now + extra), BlockingRanks(reason="nobody")) is None


def test_the_own_clock_standing_still_is_nobodys_fault() -> None:
    made, now = trained()
    assert not made.should_look(now + 100.0)


def test_looks_grow_rare() -> None:
    made, now = trained()
    looks = 0
    for _ in range(4 * 300):
        now += 0.25
        if made.should_look(now):
            looks += 1
            made.on_traces(now, seen(now, cpu_s=now), NAMED)
    assert 8 <= looks <= 20


def test_shadow_mode() -> None:
    made, now = trained(limits=msgspec.structs.replace(LIMITS, stance="observe"))
    now = passes(made, now, 10.0)
    alarm = made.on_traces(now, seen(now), STOPPED)
    assert alarm is not None and alarm.stance is Stance.OBSERVE


class Looked:
    """A beat that counts how often its step is looked at."""

    count = 0

    def __init__(self, node: str, step: int) -> None:
        self.node, self.generation, self.phase, self._step = node, 1, f"{node} at {step}", step
        self.sealed = self.stored = -1

    @property
    def step(self) -> int:
        Looked.count += 1
        return self._step


def test_the_slowest_is_found_without_looking_at_all_at_every_beat() -> None:
    """The same as by looking at all; two thousand nodes beat two thousand times a second."""
    made, chance = HangDetector(LIMITS), random.Random(7)
    nodes = [f"n{number}" for number in range(200)]
    made.on_launch(100.0, 1, tuple(nodes))
    newest: dict[str, Looked] = {}
    Looked.count = beats = 0
    for _ in range(20):
        for node in chance.sample(nodes, len(nodes)):
            last = newest[node]._step if node in newest else 0
            newest[node] = Looked(node, max(0, last + chance.choice((-1, 0, 1, 1, 2))))
            made.on_beat(100.0, newest[node])  # type: ignore[arg-type]
            beats += 1
            if len(newest) == len(nodes):
                assert made._phase == min(newest.values(), key=lambda one: one._step).phase
    assert Looked.count < 20 * beats


def test_since_when_the_job_stands() -> None:
    made, now = trained()
    assert made.stands_since(now + 2.0) is None, "that is no time"
    assert made.stands_since(passes(made, now, 60.0)) == now
    made.on_beat(now + 10.0, beat("n0", 1000))
    made.on_beat(now + 10.0, beat("n1", 1000))
    assert made.stands_since(now + 10.1) is None
