"""Nodes whose ranks use a tracker get the job's figures: after each incident, now and then, and no others do."""

from typing import Any

from holdfast.controller.tracker_figures import TrackerFigures
from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import Ledger
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import LaunchHere, StopHere
from holdfast.model.observation import Beat
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import JobFigures
from tests.controller.conftest import Agent, Desk, Open


async def send_beat(desk: Desk, agent: Agent, step: int, generation: int) -> None:
    now = desk.controller.clock()
    beat = Beat(
        node=agent.node,
        generation=generation,
        step=step,
        at=now,
        first_step=step,
        first_at=now,
        counted=False,
        trackers="W&B",
    )
    await agent.ws.send_bytes(agent_messages.encode(beat))


async def hear_figures(agent: Agent) -> JobFigures:
    while not isinstance(heard := await agent.hear(), JobFigures):
        pass
    return heard


async def test_figures_and_the_incident_that_this_generation_came_from(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        await send_beat(desk, agent, 5, 1)
        first = await hear_figures(agent)
        assert (first.generation, first.incidents, first.restarts, first.notes) == (1, 0, 0, ())
        assert first.ettr is not None and first.lost_s >= 0.0
        now = desk.controller.clock()
        await agent.post(Alarm(kind=Kind.CRASH, at=now, suspects=("a",), ranks=(0,), reason="boom", generation=1))
        stop = await agent.errand()
        assert isinstance(stop, StopHere)
        await agent.answer(stop)
        launch = await agent.errand()
        assert isinstance(launch, LaunchHere) and launch.generation == 2
        await agent.answer(launch)
        await desk.phase(Phase.STARTING)
        await send_beat(desk, agent, 5, 2)
        second = await hear_figures(agent)
        assert (second.generation, second.incidents, second.restarts) == (2, 1, 1)
        assert [(note.number, "boom" in note.text) for note in second.notes] == [(1, True)]


class FakeLinks:
    """Takes messages, or is full."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, JobFigures]] = []
        self.full = False

    def send_message(self, node: str, message: JobFigures) -> bool:
        if not self.full:
            self.sent.append((node, message))
        return not self.full


def test_a_node_gets_them_once_a_minute_and_only_if_it_asks() -> None:
    links: Any = FakeLinks()
    said: list[str] = []
    figures = TrackerFigures(Decider().view, Ledger(), links, said.append)

    def hear(now: float, node: str = "a", trackers: str = "W&B", generation: int = 0) -> None:
        figures.on_beat(now, Beat(node=node, generation=generation, step=1, at=0.0, trackers=trackers))

    hear(0.0, trackers="")
    hear(0.0, generation=3)  # of another generation than the one that runs
    assert links.sent == [] and said == []
    links.full = True
    hear(1.0)
    links.full = False
    for now in (2.0, 3.0, 61.0, 62.0):
        hear(now)
    hear(62.0, node="b")
    assert [node for node, _ in links.sent] == ["a", "a", "b"]
    assert links.sent[1][1] is links.sent[2][1]  # made once for all nodes
    assert links.sent[0][1].ettr is None
    assert said == ["incidents, restarts and ETTR are logged to W&B, too"]
