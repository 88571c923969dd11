"""What a job that lacks nodes waits for: how many, in whose place, since when, what the fleet says, and until when."""

import msgspec

from holdfast.core.decide.decider import Decider
from holdfast.core.decide.node_wait_text import NodeWait
from holdfast.core.terminal_sanitizer import CUT
from holdfast.model.action import Say
from holdfast.model.decider_events import Begin, Event, Outcome, Progress, Ready, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase


class Waiting:
    """A job of two nodes, one of which is lost at 20 s."""

    def __init__(
        self, *, can_acquire: bool = True, min_nodes: int = 2, ask_s: float = 0.0, checks: bool = False
    ) -> None:
        self.decider = Decider()
        job = Job(run_id="r", min_nodes=min_nodes, max_nodes=2, can_acquire=can_acquire, checks=checks)
        self.hear(0.0, Begin(job=job, limits=Limits(wait_s=600.0, ready_s=100.0, ask_s=ask_s, last_call_s=30.0)))

    def hear(self, now: float, event: Event) -> None:
        self.decider.step(now, event)

    def ready(self, now: float, *nodes: str) -> None:
        for order, node in enumerate(nodes):
            self.hear(now, Ready(node=node, host=node, nproc=2, order=order))

    def lose(self) -> None:
        """Begin with a and b, train, and lose b."""
        self.give(1.0, "a", "b")
        self.ready(2.0, "a", "b")
        self.hear(3.0, Outcome(action=self.decider.view.awaited, ok=True))
        self.hear(4.0, Progress(generation=1, step=1, at=4.0, first_step=1, first_at=4.0, counted=False))
        silence = Alarm(kind=Kind.SILENCE, at=17.0, suspects=("b",), reason="has been silent for 3 s", signature="b")
        self.hear(20.0, silence)
        self.hear(20.0, Outcome(action=self.decider.view.awaited, ok=True))
        assert self.decider.view.phase is Phase.WAITING

    def give(self, now: float, *nodes: str) -> None:
        for asked in list(self.decider._state.nodes.standbys.acquiring):
            self.hear(now, Outcome(action=asked, ok=True, nodes=nodes))

    def told(self, now: float) -> str:
        wait = self.decider.view.node_wait(now)
        return wait.describe(now) if wait else ""


def test_a_lost_node_is_waited_for_by_its_place_and_until_when() -> None:
    job = Waiting()
    job.lose()
    node = "1 of 2 nodes, to replace b (ranks 2-3)"
    assert job.told(20.0) == f"the job waits for {node}: 1 is asked for; it gives up in 10 min"
    job.give(21.0, "c")
    assert job.told(55.0) == f"the job has waited 35 s for {node}: 1 is on the way; it gives up in 9 min"
    job.hear(60.0, FleetReport(nodes={"c": FleetNode(state=FleetState.QUEUED, reason="Priority")}))
    assert job.told(3620.0) == (
        f"the job has waited 60 min for {node}: 1 is queued, Priority; it waits however long the queue is"
    )


def test_what_the_fleet_says_of_those_that_did_not_come_is_told() -> None:
    job = Waiting()
    job.lose()
    job.give(21.0, "c")
    job.hear(30.0, FleetReport(nodes={"c": FleetNode(state=FleetState.GONE, reason="OutOfMemory")}))
    assert "(ranks 2-3): the fleet: OutOfMemory; " in job.told(31.0)


def test_a_job_that_asks_before_it_gives_up_says_so() -> None:
    job = Waiting(can_acquire=False, ask_s=300.0)
    job.lose()
    assert job.told(21.0).endswith(": no other host has joined; it asks a person in 10 min")
    asks = job.decider.step(620.0, Tick())
    assert [action.until for action in asks.actions if isinstance(action, Say)] == [920.0]
    assert job.told(630.0).endswith("; it gives up in 5 min")


def test_the_last_call_of_a_job_that_may_be_smaller() -> None:
    job = Waiting(can_acquire=False, min_nodes=1)
    job.ready(1.0, "a")
    assert job.told(6.0) == (
        "the job has waited 6 s for 1 of 2 nodes: no other host has joined; it begins without them in 25 s"
    )


def test_the_line_has_one_cause_whole_and_others_as_far_as_it_is_wide() -> None:
    wait = NodeWait(since=0.0, awaited="3 of 64 nodes, to replace n1, n2 and n3", causes=("first",), ends="it gives up")
    assert wait.describe(0.0) == "the job waits for 3 of 64 nodes, to replace n1, n2 and n3: first; it gives up"
    more = msgspec.structs.replace(wait, causes=("first", "x" * 40, "third"))
    assert more.describe(0.0) == wait.describe(0.0).replace("first", "first, third")
    assert more.facts != wait.facts
    long = msgspec.structs.replace(wait, causes=("the fleet: " + "many words " * 30,))
    told = long.describe(7300.0)
    assert 100 < len(told) <= 110 and CUT in told


def test_a_job_that_has_its_nodes_waits_for_none() -> None:
    job = Waiting()
    job.lose()
    job.give(21.0, "c")
    job.ready(22.0, "c")
    assert job.decider.view.phase is Phase.LAUNCHING and job.told(23.0) == ""


def test_a_node_whose_check_has_not_ended_is_waited_for_until_it_gets_ranks_unchecked() -> None:
    job = Waiting(checks=True)
    job.lose()
    job.give(21.0, "c")
    job.ready(30.0, "c")
    assert job.told(50.0) == (
        "the job has waited 30 s for the check of c, to replace b (ranks 2-3); it goes on unchecked in 40 s"
    )
    wait = job.decider.view.node_wait(50.0)
    assert wait and wait.describe(50.0, lambda at: f"{at:g} o'clock").endswith("it goes on unchecked at 90 o'clock")
    job.hear(90.0, Tick())
    assert job.decider.view.phase is Phase.LAUNCHING and job.told(90.0) == ""
