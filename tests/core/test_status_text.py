"""What a job is doing now: told from its state, whatever was said last."""

from collections.abc import Iterator

from holdfast.core.decide.decider import Decider
from holdfast.model.action import Finish, Launch, Stop
from holdfast.model.decider_events import Begin, Event, Order, Outcome, Progress, Ready, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import NO_STEP, Alarm, Kind, Stance
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision


class Told:
    """A decider that hears an event a second."""

    def __init__(self) -> None:
        self.decider, self.now, self.awaited = Decider(), 0.0, 0
        job = Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)
        self.hear(Begin(job=job, limits=Limits()))

    def hear(self, event: Event) -> str:
        self.decide(event)
        return self.present()

    def decide(self, event: Event) -> Decision:
        self.now += 1.0
        decision = self.decider.step(self.now, event)
        self.awaited = next((a.id for a in decision.actions if isinstance(a, Launch | Stop | Finish)), self.awaited)
        return decision

    @property
    def summary(self) -> str:
        return self.decider.view.summary

    def present(self) -> str:
        return self.decider.view.describe_present(self.now, 7, "all ranks ended well")

    def outcome(self) -> str:
        return self.hear(Outcome(action=self.awaited, ok=True))

    def step(self, number: int) -> str:
        g = self.decider.view.generation
        at = self.now + 1
        return self.hear(Progress(generation=g, step=number, at=at, first_step=number, first_at=at, counted=False))


def lives() -> Iterator[tuple[Told, str]]:
    """A job from its begin to its end, and what it is doing at each turn."""
    told = Told()
    yield told, told.present()
    told.hear(Ready(node="a", host="h", nproc=1, order=0))
    yield told, told.hear(Ready(node="b", host="h", nproc=1, order=1))
    yield told, told.outcome()
    yield told, told.step(1)
    why = "was killed by SIGKILL"
    yield (
        told,
        told.hear(Alarm(kind=Kind.CRASH, at=told.now, suspects=("b",), ranks=(1,), generation=1, code=-9, reason=why)),
    )
    yield told, told.outcome()
    yield told, told.outcome()
    yield told, told.step(2)


def test_a_job_whose_ranks_have_left_their_process_groups_is_not_called_training() -> None:
    *_, (told, _) = lives()
    said = told.hear(
        Progress(generation=2, step=7, at=told.now, first_step=2, first_at=told.now, counted=False, parted=True)
    )
    assert told.decider.view.phase is Phase.TRAINING
    assert said == "ending: every rank has left its process group, or its script has returned, after step 7"
    assert told.step(8) == "training; every rank has made step 7"


def test_steps_that_are_counted_since_the_launch_are_told_so() -> None:
    *_, (told, _) = lives()
    now = told.now
    counted = Progress(generation=2, step=7, at=now, first_step=1, first_at=now, counted=True)
    assert told.hear(counted) == "training; every rank has made 7 steps since the last launch"
    parted = Progress(generation=2, step=7, at=now, first_step=1, first_at=now, counted=True, parted=True)
    assert told.hear(parted).endswith("or its script has returned, after 7 steps since the last launch")


def test_ranks_that_tell_of_no_step_are_not_said_to_have_made_one() -> None:
    *_, (told, _) = lives()
    view = told.decider.view
    said = view.describe_present(told.now, 7, "", (0,))
    assert said == "training; the ranks that tell of steps have made step 7; rank 0 tells of none"
    assert view.describe_present(told.now, 7, "", (0, 1)).endswith("; ranks 0-1 tell of none")


def test_each_phase_says_what_is_so() -> None:
    said = [(told.decider.view.phase, words) for told, words in lives()]
    killed = "rank 1 on b was killed by SIGKILL"
    assert said == [
        (Phase.WAITING, "the job waits for 2 nodes: no host has joined; it gives up in 10 min"),
        (Phase.LAUNCHING, "generation 1 is being launched on a, b"),
        (Phase.STARTING, "the ranks of generation 1 run; no step was seen yet"),
        (Phase.TRAINING, "training; every rank has made step 7"),
        (Phase.STOPPING, f"all ranks are being stopped, as {killed}"),
        (Phase.LAUNCHING, f"generation 2 is being launched on a, b, as {killed}"),
        (Phase.STARTING, f"the ranks of generation 2 run; no step was seen yet, after incident 1: {killed}"),
        (Phase.TRAINING, "training; every rank has made step 7"),
    ]


def test_planned_restarts_and_holds_are_told_with_who_wanted_them() -> None:
    *_, (told, _) = lives()
    assert told.hear(Order(verb="hold", who="Ada")) == "all ranks are being ended for a planned restart: held by Ada"
    assert told.outcome() == "no rank runs; Ada holds the job"
    assert told.hear(Order(verb="resume", who="Ada")).endswith("launched on a, b, after a planned restart: held by Ada")
    assert told.hear(Order(verb="stop", who="Ada")) == "the job is ending: all ranks ended well"
    assert told.outcome() == "the job has ended: all ranks ended well"


def test_a_planned_restart_is_told_with_its_reason_also_while_an_incident_is_open() -> None:
    told = next(told for told, words in lives() if words.startswith("the ranks of generation 2 run"))
    assert told.decider.view.open_incident and told.decider.view.phase is Phase.STARTING
    paused = told.hear(Order(verb="evict", who="Ada", node="b"))
    assert paused == "all ranks are being ended for a planned restart: b evicted by Ada"


def test_the_summary_is_what_the_job_does_now_and_lasts_until_there_is_another() -> None:
    *_, (told, _) = lives()
    reason = told.decide(Order(verb="hold", who="Ada")).reason
    assert (reason, told.summary) == ("held by Ada; pausing: held by Ada", "pausing: held by Ada")
    told.step(2)  # no reason is given
    assert told.summary == "pausing: held by Ada"
    told.outcome()
    assert told.summary == "held by Ada"
    reason = told.decide(Order(verb="resume", who="Ada")).reason
    assert (reason, told.summary) == (f"resume by Ada; {told.summary}", "launching generation 3 on a, b")
    told.hear(Order(verb="stop", who="Ada"))
    assert told.summary == "stopped by Ada"


def test_the_summary_of_a_job_that_asks_is_its_question() -> None:
    job = Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)
    decider = Decider()
    decider.step(0.0, Begin(job=job, limits=Limits(wait_s=60.0, ask_s=600.0)))
    reason = decider.step(60.0, Tick()).reason
    assert "0 of 2 nodes after 60 s" in reason and "; " in reason
    assert decider.view.summary == reason


def test_who_keeps_the_others_waiting_is_told_while_it_does() -> None:
    *_, (told, _) = lives()
    why, at = "keeps the others waiting at step 2 for 10 s: it sleeps", told.now
    stands = told.hear(
        Alarm(kind=Kind.HANG, at=at, suspects=("b",), ranks=(1,), generation=2, stance=Stance.NOTIFY, reason=why)
    )
    assert stands == "training; every rank has made step 7; rank 1 on b keeps the others waiting for 1 s"
    assert told.step(3) == "training; every rank has made step 7"


def test_a_job_that_stands_is_not_just_called_training() -> None:
    *_, (told, _) = lives()
    at, why = told.now, "no step for 12 s at step 7: all 2 ranks are in load (s/train.py)"
    stands = Alarm(
        kind=Kind.HANG, at=at, suspects=(), reason=why, signature=NO_STEP, generation=2, stance=Stance.NOTIFY
    )
    told.now += 84.0
    words = "training; every rank has made step 7; no step for 85 s: all 2 ranks are in load (s/train.py)"
    assert told.hear(stands) == words
    assert told.step(8) == "training; every rank has made step 7"
