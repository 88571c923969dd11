"""A job whose nodes' time was over goes on with others, in the same journal; no other end is taken back."""

from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.ledger import Ledger
from holdfast.model.action import Acquire, Dismiss, Finish, Launch
from holdfast.model.event import Entry, Event, Order, Outcome, Phase, Successor
from tests.core.test_fleet_news import LIMITS, Play, up

RESUME = Order(verb="resume", who="holdfast run --resume")


class BookedPlay(Play):
    """A play whose entries a ledger takes."""

    def __init__(self) -> None:
        self.ledger, self.seq = Ledger(), 0
        super().__init__(standbys=1)

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
