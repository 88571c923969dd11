"""One node over links that lose, repeat and reorder: everything happens once, and everything is told."""

from random import Random

import pytest

from holdfast.core.agent_state_machine import (
    CarryOut,
    Deed,
    ErrandDone,
    ErrandReceived,
    JudgeExit,
    LinkLost,
    LinkOpened,
    Post,
    PostAcknowledged,
    RankExited,
    RememberDone,
    SendPost,
)
from holdfast.model.decider_events import Ended
from holdfast.model.detector_alarm import Alarm
from holdfast.model.node_errands import Done, Errand, LaunchHere, Leave, StopHere
from tests.core.test_agent_state_machine import exited, judged, launch, life, stop


class Wire:
    """A node and a controller's side of it, over a link that loses, delays, doubles and breaks."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.node = life(linked=False)
        self.linked = False
        self.to_node: list[Errand | int] = []  # errands and acknowledgements under way
        self.to_controller: list[Post] = []
        self.untold: dict[int, Errand] = {}  # errands without an answer
        self.carrying: list[Errand] = []
        self.carried: list[int] = []
        self.exits: list[RankExited] = []
        self.judging: list[JudgeExit] = []
        self.heard: dict[int, Alarm | Ended | Done] = {}

    def deeds(self, deeds: tuple[Deed, ...]) -> None:
        for deed in deeds:
            match deed:
                case SendPost(post):
                    self.to_controller.append(post)
                case CarryOut(errand):
                    self.carrying.append(errand)
                case JudgeExit():
                    self.judging.append(deed)
                case RememberDone(done):
                    self.carried.append(done.id)

    def tell(self, errand: Errand) -> None:
        self.untold[errand.id] = errand
        if self.linked:
            self.to_node.append(errand)

    def relink(self) -> None:
        self.to_node.clear()
        self.to_controller.clear()
        self.deeds(self.node.step(0.0, LinkLost()))
        self.linked = True
        self.deeds(self.node.step(0.0, LinkOpened()))
        self.to_node += self.untold.values()

    def move(self, lossy: bool) -> None:
        """One message, errand or exit goes its way, whichever chance picks."""
        ways = [self._to_node] * bool(self.to_node) + [self._to_controller] * bool(self.to_controller)
        ways += [self._carry] * bool(self.carrying) + [self._exit] * bool(self.exits)
        ways += [self._judge] * bool(self.judging)
        if lossy and self.rng.random() < 0.1:
            self.relink()
        elif ways:
            self.rng.choice(ways)(lossy)

    def run(self, moves: int, lossy: bool) -> None:
        for _ in range(moves):
            self.move(lossy)

    def _take(self, queue: list[Errand | int] | list[Post], lossy: bool) -> Errand | int | Post | None:
        at = self.rng.randrange(len(queue)) if lossy else 0
        found = queue[at]
        if lossy and self.rng.random() < 0.2:
            return found  # and once more later
        del queue[at]
        return None if lossy and self.rng.random() < 0.2 else found

    def _to_node(self, lossy: bool) -> None:
        match self._take(self.to_node, lossy):
            case int(seq):
                self.deeds(self.node.step(0.0, PostAcknowledged(seq)))
            case LaunchHere() | StopHere() | Leave() as errand:
                self.deeds(self.node.step(0.0, ErrandReceived(errand)))

    def _to_controller(self, lossy: bool) -> None:
        post = self._take(self.to_controller, lossy)
        if isinstance(post, Post):
            assert self.heard.setdefault(post.seq, post.body) == post.body
            if isinstance(post.body, Done):
                self.untold.pop(post.body.id, None)
            self.to_node.append(post.seq)

    def _carry(self, lossy: bool) -> None:
        errand = self.carrying.pop(self.rng.randrange(len(self.carrying)))
        if isinstance(errand, LaunchHere):
            self.exits += [exited(rank, self.rng.choice((0, 1)), errand.generation) for rank in (2, 3)]
        self.deeds(self.node.step(0.0, ErrandDone(errand, True)))

    def _exit(self, lossy: bool) -> None:
        self.deeds(self.node.step(0.0, self.exits.pop(0)))

    def _judge(self, lossy: bool) -> None:
        self.deeds(judged(self.node, self.judging.pop(self.rng.randrange(len(self.judging)))))


def four_generations(wire: Wire) -> int:
    """Launched and stopped one after the other over a bad link, which holds at last; returns the last id."""
    id = 0
    for generation in range(1, 5):
        for errand in (launch(id + 1, generation), stop(id + 2, generation)):
            id += 1
            wire.tell(errand)
            wire.run(wire.rng.randrange(30), lossy=True)
    for _ in range(3):
        wire.relink()
        wire.run(500, lossy=False)
    return id


@pytest.mark.parametrize("seed", range(200))
def test_over_a_bad_link_everything_happens_once_and_everything_is_told(seed: int) -> None:
    wire = Wire(Random(seed))
    last = four_generations(wire)
    assert not wire.untold
    assert sorted(wire.carried) == list(range(1, last + 1))
    assert sorted(wire.heard) == list(range(1, len(wire.heard) + 1)), "a post was lost"
    for generation in range(1, 5):
        told = [b for b in wire.heard.values() if not isinstance(b, Done) and b.generation == generation]
        ended = [b for b in told if isinstance(b, Ended)]
        assert len(ended) <= 1 and (not ended or len(told) == 1), told
