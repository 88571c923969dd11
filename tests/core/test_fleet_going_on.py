"""A job whose nodes' time was over goes on with others, in the same journal; no other end is taken back."""

from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.ledger import Ledger
from holdfast.model.action import Acquire, Dismiss, Finish, Launch
from holdfast.model.decider_events import Event, Order, Outcome, Successor
from holdfast.model.decider_limits import Limits
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from tests.core.test_fleet_news import LIMITS, Play, up

RESUME = Order(verb="resume", who="holdfast run --resume")


class BookedPlay(Play):
    """A play whose entries a ledger takes."""

    def __init__(self) -> None:
        self.ledger, self.seq = Ledger(), 0
        super().__init__(standbys=1)

    def end_again(self, now: float, *nodes: str, step: int) -> Finish:
        """Go on with other nodes, make the step again or anew unless it is 0, and end because these are taken away."""
        self.hear(now, RESUME)
        self.give(now, *nodes)
        self.ready(now, *nodes[:2])
        self.hear(now, Outcome(action=self.view.awaited, ok=True))
        if step:
            self.step(now, step)
        self.hear(now + 50.0, Order(verb="stop", who="SIGTERM", code=OUT_OF_TIME))
        finish = self.only(Finish)
        assert isinstance(finish, Finish)
        self.hear(now + 51.0, Outcome(action=finish.id, ok=True))
        return finish

    def hear(self, now: float, event: Event) -> list[object]:  # type: ignore[override]
        decision = self.decider.step(now, event)
        self.actions, self.wake_at = list(decision.actions), decision.wake_at
        self.seq += 1
        self.ledger.add(Entry(seq=self.seq, at=now, event=event, decision=decision))
        return [*self.actions]

    def run_out_of_time(self) -> None:
        """Train until the fleet takes all nodes away, and end so."""
        self.train(1.0, "a", "b", "c")
        self.survey(2.0, a=up(ends_at=2000.0), b=up(ends_at=2000.0), c=up(ends_at=2000.0))
        self.tick_until(1999.0)
        assert self.view.exit_code == OUT_OF_TIME
        self.hear(1999.5, Outcome(action=self.view.awaited, ok=True))
        assert self.view.phase is Phase.DONE


def test_it_waits_for_other_nodes_and_trains_with_them() -> None:
    play = BookedPlay()
    play.run_out_of_time()
    play.hear(9000.0, Successor(epoch=2))
    play.hear(9000.0, RESUME)
    assert play.view.phase is Phase.WAITING and play.view.exit_code is None
    assert {action.node for action in play.actions if isinstance(action, Dismiss)} >= {"a", "b"}
    asked = play.only(Acquire)
    assert isinstance(asked, Acquire) and asked.count == 3
    play.give(9001.0, "d", "e", "f")
    play.ready(9002.0, "d", "e")
    launch = play.only(Launch)
    assert isinstance(launch, Launch)
    assert (launch.generation, {seat.node for seat in launch.seats}) == (2, {"d", "e"})
    play.launched(9003.0)
    account = play.ledger.make_account()
    assert account.code is None and account.spent_s(TimeUse.WAIT) > 7000.0


def test_it_may_end_anew() -> None:
    play = BookedPlay()
    play.run_out_of_time()
    play.hear(9000.0, RESUME)
    play.hear(9001.0, Order(verb="stop", who="somebody", code=143))
    finish = play.only(Finish)
    assert isinstance(finish, Finish)
    play.hear(9002.0, Outcome(action=finish.id, ok=True))
    assert play.view.phase is Phase.DONE and play.ledger.make_account().code == 143
    play.hear(9003.0, RESUME)
    assert play.view.phase is Phase.DONE, "who stopped it meant it"
    assert LIMITS.leave_s > 0


def test_nodes_that_are_taken_away_again_and_again_before_a_new_step_end_the_job_for_good() -> None:
    play = BookedPlay()
    play.run_out_of_time()
    again = play.end_again(9000.0, "d", "e", "f", step=1)
    assert (again.code, again.reason) == (OUT_OF_TIME, "stopped by SIGTERM")
    assert play.end_again(9100.0, "g", "h", "i", step=0).code == OUT_OF_TIME
    assert play.end_again(9200.0, "j", "k", "l", step=2).code == OUT_OF_TIME, "a new step: it is worth another try"
    assert play.end_again(9300.0, "m", "n", "o", step=2).code == OUT_OF_TIME
    assert play.end_again(9400.0, "p", "q", "r", step=1).code == OUT_OF_TIME
    last = play.end_again(9500.0, "s", "t", "u", step=0)
    assert last.code == GAVE_UP
    assert last.reason == (
        "stopped by SIGTERM; the job has lost all nodes or was ended 3 times in a row without a new step after step 2,"
        " so no others are asked for: it needs more time each time, or checkpoints more often"
    )
    account = play.ledger.make_account()
    assert (account.code, account.ending) == (GAVE_UP, last.reason)
    play.hear(9600.0, RESUME)
    assert play.view.phase is Phase.DONE


def test_a_job_that_never_comes_to_a_step_before_its_time_limit_ends_for_good() -> None:
    play = Play(limits=Limits(ready_s=100.0, leave_s=120.0, attempts=1))
    play.give(1.0, "a", "b")
    play.survey(1.0, a=up(ends_at=3600.0), b=up(ends_at=3600.0))
    play.ready(2.0, "a", "b")
    play.hear(3.0, Outcome(action=play.view.awaited, ok=True))
    play.tick_until(3480.0)
    finish = play.only(Finish)
    assert isinstance(finish, Finish) and finish.code == GAVE_UP
    assert " once " in finish.reason and "after step" not in finish.reason, "it has made none"
