"""A rank that survives is told to leave its generation, wherever its main thread is, and to go on in the next."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.client.elastic.agent_hand_over_request import HAND_OVER
from holdfast.client.survival.order_line import OrderLine, Parting
from holdfast.model.action import HandOver
from holdfast.wire import survivor_messages, unix_sockets
from holdfast.wire.survivor_messages import PartOrder, RejoinOrder, SurvivorState


class Agent:
    """An agent, played by hand; and a group of the rank, in which its main thread may wait."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = threading.Event()
        self.listener = unix_sockets.listen(path)
        self.line = OrderLine(path, self.broken.set)

    def accept(self) -> None:
        self.listener.settimeout(60)
        self.rank, _ = self.listener.accept()
        self.rank.settimeout(60)
        self.heard = self.rank.makefile("rb")

    def hear(self) -> SurvivorState:
        state: SurvivorState = survivor_messages.to_agent(self.heard.readline())
        return state

    def tell(self, order: survivor_messages.SurvivorOrder) -> None:
        self.rank.sendall(survivor_messages.encode(order) + b"\n")

    def enter(self, generation: int = 1) -> None:
        self.line.enter(3, generation)
        self.accept()
        assert self.hear() == SurvivorState(rank=3, generation=generation, parked=False)

    def tell_soon(self) -> None:
        """Tell the rank a little later, while the test is its main thread."""
        threading.Timer(0.1, self.tell, [PartOrder(generation=1)]).start()

    def close(self) -> None:
        self.line.close()
        self.heard.close()
        self.rank.close()
        self.listener.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "s")
    made.enter()
    yield made
    made.close()


def leave(agent: Agent, failure: BaseException, patience_s: float = 0.0) -> bool:
    agent.line.leave()
    return agent.line.was_told(patience_s, failure)


def compute() -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass


def test_a_rank_that_computes_is_interrupted(agent: Agent) -> None:
    agent.tell_soon()
    with pytest.raises(Parting) as caught:
        compute()
    assert leave(agent, caught.value) and agent.broken.is_set()


def test_a_rank_that_waits_in_a_group_leaves_by_its_error(agent: Agent) -> None:
    agent.tell_soon()
    assert agent.broken.wait(60)
    assert leave(agent, RuntimeError("Connection closed by peer"))
    time.sleep(0.2)  # nothing is raised here any more


def test_it_learns_later_why_its_group_broke(agent: Agent) -> None:
    agent.tell_soon()
    assert not leave(agent, ValueError("its own fault")), "a failure of its own waits for nobody"
    assert leave(agent, RuntimeError("Connection closed by peer"), 60.0)


def test_nobody_tells_it(agent: Agent) -> None:
    assert not leave(agent, RuntimeError("Connection closed by peer"), 0.1)


def test_an_order_for_another_generation_is_none(agent: Agent) -> None:
    agent.tell(PartOrder(generation=7))
    assert not leave(agent, RuntimeError("Connection closed by peer"), 0.2) and not agent.broken.is_set()


def test_it_hands_over_first_if_it_makes_steps(agent: Agent) -> None:
    HAND_OVER.serving = True
    agent.tell(PartOrder(generation=1, hand_over=HandOver(leaving=(3,), within_s=60.0)))
    until = time.monotonic() + 60
    while HAND_OVER.leaving is None and time.monotonic() < until:
        time.sleep(0.01)
    assert HAND_OVER.leaving == (3,) and not agent.broken.is_set()
    threading.Timer(0.1, HAND_OVER.finish).start()
    with pytest.raises(Parting) as caught:
        compute()
    assert leave(agent, caught.value) and agent.broken.is_set()


def test_a_failure_meanwhile_is_not_waited_for(agent: Agent) -> None:
    HAND_OVER.serving = True
    agent.tell(PartOrder(generation=1, hand_over=HandOver(leaving=(3,), within_s=60.0)))
    assert leave(agent, RuntimeError("Connection closed by peer"), 30.0)


def test_a_rank_that_makes_no_steps_leaves_at_once(agent: Agent) -> None:
    agent.tell(PartOrder(generation=1, hand_over=HandOver(leaving=(3,), within_s=60.0)))
    with pytest.raises(Parting) as caught:
        compute()
    assert leave(agent, caught.value)
    assert HAND_OVER.leaving is None


def test_it_parks_and_goes_on(agent: Agent) -> None:
    agent.tell(PartOrder(generation=1))
    assert leave(agent, RuntimeError("Connection closed by peer"), 60.0)
    threading.Timer(0.1, agent.tell, [RejoinOrder(env={"RANK": "3"})]).start()
    assert agent.line.park() == {"RANK": "3"}
    assert agent.hear() == SurvivorState(rank=3, generation=1, parked=True)
    agent.line.enter(3, 2)
    assert agent.hear() == SurvivorState(rank=3, generation=2, parked=False)
    agent.tell(PartOrder(generation=1))  # it was on its way
    assert not leave(agent, RuntimeError("Connection closed by peer"), 0.2)


def test_the_next_agent_learns_that_it_is_parked(agent: Agent) -> None:
    agent.tell(PartOrder(generation=1))
    assert leave(agent, RuntimeError("Connection closed by peer"), 60.0)
    parking = threading.Thread(target=agent.line.park, daemon=True)
    parking.start()
    assert agent.hear().parked
    agent.heard.close()
    agent.rank.shutdown(socket.SHUT_RDWR)
    agent.rank.close()
    agent.accept()
    assert agent.hear() == SurvivorState(rank=3, generation=1, parked=True)
    agent.tell(RejoinOrder(env={}))
    parking.join(60)
    assert not parking.is_alive()


def test_a_spare_rank_waits_for_its_seat(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "s")
    found: list[dict[str, str]] = []
    waiting = threading.Thread(target=lambda: found.append(agent.line.wait_for_seat(3)))
    waiting.start()
    agent.accept()
    assert agent.hear() == SurvivorState(rank=3, generation=0, parked=True)
    agent.tell(RejoinOrder(env={"RANK": "3"}))
    waiting.join(60)
    assert found == [{"RANK": "3"}]
    agent.line.enter(3, 2)
    assert agent.hear() == SurvivorState(rank=3, generation=2, parked=False)
    agent.close()
