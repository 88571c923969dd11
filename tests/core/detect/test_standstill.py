"""A job that makes no step is told of, whether or not somebody is named for it."""

from collections.abc import Callable

import msgspec

from holdfast.core.detect.hang import HangDetector
from holdfast.core.detect.standstill import StandstillDetector
from holdfast.core.diagnose.blocking_ranks import BlockingRanks, find_blocking
from holdfast.model.detector_alarm import NO_STEP, Alarm, Stance
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace
from tests.core.detect.test_hang import NAMED, beat, trained

Look = Callable[[float], tuple[Trace, ...]]
LOADS = (Frame("main", "/srv/s/ld.py", 3), Frame("DS.__getitem__", "/srv/s/ld.py", 7))


def all_load(at: float, entered: int = 30) -> tuple[Trace, ...]:
    """Both ranks are in their dataset, outside of any collective."""
    thread = Thread(main=True, frames=LOADS)
    processes = [Process(node=f"n{rank}", rank=rank, pid=10 + rank, state="S", threads=(thread,)) for rank in (0, 1)]
    group = Collective(group="0", entered=entered, completed=entered)
    return tuple(
        Trace(
            node=one.node,
            at=at,
            processes=(one,),
            flights=(Flight(node=one.node, rank=one.rank, groups=(group,), at=at),),
        )
        for one in processes
    )


class Watched:
    """A job of two nodes that has made forty steps, and what is told of its stands."""

    def __init__(self) -> None:
        self.hang, self.now = trained()
        self.standstill = StandstillDetector(self.hang)

    def stand(self, seconds: float, traces: Look = all_load, named: BlockingRanks | None = None) -> list[Alarm]:
        """Let the job stand; return what the detectors of hangs and of stands tell meanwhile."""
        told, until = [], self.now + seconds
        while self.now < until:
            self.now += 0.25
            if self.hang.should_look(self.now):
                looked = traces(self.now)
                blocking = named or find_blocking(looked)
                alarm = self.hang.on_traces(self.now, looked, blocking)
                stands = self.standstill.on_traces(self.now, looked, blocking)
                told += [one for one in (alarm or stands,) if one]
        return told

    def go_on(self) -> bool:
        step = self.hang.step + 1
        for node in ("n0", "n1"):
            self.hang.on_beat(self.now, beat(node, step))
        return self.hang.resumed


def test_a_stand_in_which_nobody_is_named_is_told() -> None:
    job = Watched()
    began = job.now
    booked, said = job.stand(420.0)
    assert {(one.at, one.signature, one.suspects, one.generation) for one in (booked, said)} == {
        (began, NO_STEP, (), 1)
    }
    assert (booked.stance, said.stance) == (Stance.OBSERVE, Stance.NOTIFY)
    assert said.reason == "no step for 10 s at step 40: all 2 ranks are in DS.__getitem__ (s/ld.py)"
    assert job.go_on(), "the account needs the step with which a stand ends at once"
    job.now += 0.2
    assert not job.go_on()


def test_a_stand_as_long_as_before_is_booked_but_a_person_is_not_told_again() -> None:
    job = Watched()
    job.stand(40.0)
    job.go_on()
    assert [one.stance for one in job.stand(45.0)] == [Stance.OBSERVE]
    job.go_on()
    assert [one.stance for one in job.stand(120.0)] == [Stance.OBSERVE, Stance.NOTIFY]


def test_a_pause_that_the_job_is_used_to_is_booked_all_the_same() -> None:
    """The rank is named once; later the same place is waited for, and the time is still no training."""
    job = Watched()
    assert Stance.NOTIFY in [one.stance for one in job.stand(25.0, named=NAMED)]
    job.go_on()
    began = job.now
    [booked] = job.stand(25.0, named=NAMED)
    assert (booked.stance, booked.signature, booked.at) == (Stance.OBSERVE, NO_STEP, began)


def test_who_comes_to_collectives_or_names_a_phase_does_not_stand() -> None:
    evaluating = Watched()
    assert not evaluating.stand(60.0, lambda at: all_load(at, entered=int(at)))
    named = Watched()
    named.hang._phase = "evaluation"
    assert not named.stand(60.0)


def test_a_person_who_only_observes_hangs_is_not_told() -> None:
    job = Watched()
    job.hang.limits = msgspec.structs.replace(job.hang.limits, stance="observe")
    assert [one.stance for one in job.stand(60.0)] == [Stance.OBSERVE]


def test_before_the_first_step_nothing_is_told() -> None:
    job = Watched()
    job.hang = HangDetector(job.hang.limits)
    job.hang.on_launch(job.now, 2, ("n0", "n1"))
    job.standstill = StandstillDetector(job.hang)
    assert not job.stand(60.0)


def test_a_stand_that_a_restart_ended_is_not_taken_for_an_earlier_pause() -> None:
    """The earlier one was longer, and a rank was named for it."""
    job = Watched()
    job.stand(100.0, named=NAMED)
    job.go_on()
    assert [one.stance for one in job.stand(12.0)] == [Stance.OBSERVE, Stance.NOTIFY]
    job.hang.on_launch(job.now, 2, ("n0", "n1"))
    for step in (1, 2):
        job.now += 0.2
        for node in ("n0", "n1"):
            job.hang.on_beat(job.now, beat(node, step, generation=2))
    assert [one.stance for one in job.stand(20.0)] == [Stance.OBSERVE, Stance.NOTIFY]
