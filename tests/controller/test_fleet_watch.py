"""The controller surveys its fleet: it tells the decider what changed, and of a loss at once."""

import asyncio
import json
import logging
import time

import pytest

from holdfast.config import Settings
from holdfast.controller_interfaces import FleetRefusal
from holdfast.core.detect.silence import SilenceLimits
from holdfast.model.detector_alarm import MACHINE_LOST, Alarm, Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import EndWarning
from tests.controller.conftest import HEADERS, Desk, Open
from tests.controller.fakes import FakeFleet

JOB = Job(run_id="r", min_nodes=1, max_nodes=1)
QUEUED = FleetNode(state=FleetState.QUEUED, reason="Resources")
GONE = FleetNode(state=FleetState.GONE, reason="NODE_FAIL", failed=True)


@pytest.fixture(autouse=True)
def surveyed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFleet, "survey_s", 0.01)


def fleet_of(desk: Desk) -> FakeFleet:
    fleet = desk.controller.fleet
    assert isinstance(fleet, FakeFleet)
    return fleet


def reports(desk: Desk) -> list[FleetReport]:
    return [event for event in desk.events() if isinstance(event, FleetReport)]


async def after(desk: Desk, surveys: int) -> None:
    """Wait until the fleet has been surveyed so often since."""
    fleet = fleet_of(desk)
    until = fleet.surveys + surveys
    await desk.until(lambda: fleet.surveys >= until, "surveys")


async def test_only_what_changed_is_told_and_status_shows_who_is_queued(desk_of: Open) -> None:
    async with desk_of(JOB) as desk:
        fleet_of(desk).seen["new0"] = QUEUED
        await desk.until(lambda: reports(desk), "the first report")
        await after(desk, 5)
        assert reports(desk) == [FleetReport(nodes={"new0": QUEUED})]
        status = json.loads(await (await desk.client.get("/api/v1/status", headers=HEADERS)).text())
        assert status["queued"] == {"new0": "Resources"}
        assert [(node["role"], node["reason"]) for node in status["nodes"]] == [("queued", "Resources")]


async def test_a_fleet_that_cannot_be_asked_proves_nothing_and_is_logged_once(
    desk_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk_of(JOB) as desk:
        fleet_of(desk).seen["new0"] = QUEUED
        await desk.until(lambda: reports(desk), "the first report")
        with caplog.at_level(logging.WARNING, "holdfast.controller"):
            fleet_of(desk).survey_error = OSError("timed out")
            await after(desk, 5)
            fleet_of(desk).survey_error = None
            await after(desk, 5)
        assert [record.message for record in caplog.records] == [
            "the fleet cannot be surveyed: timed out",
            "the fleet can be surveyed again",
        ]
        assert len(reports(desk)) == 1 and desk.controller.view.queued == {"new0": "Resources"}


async def test_a_node_that_the_fleet_forgets_is_not_queued_for_ever(desk_of: Open) -> None:
    async with desk_of(JOB) as desk:
        fleet_of(desk).seen["new0"] = QUEUED
        await desk.until(lambda: reports(desk), "the first report")
        fleet_of(desk).here.remove("new0")
        await desk.until(lambda: len(reports(desk)) == 2, "the second")
        assert reports(desk)[-1].nodes["new0"].state is FleetState.UNKNOWN and not desk.controller.view.queued


@pytest.mark.parametrize("lost_by", ["the fleet's word", "silence"])
async def test_a_seated_node_that_is_gone_is_told_once(desk_of: Open, lost_by: str) -> None:
    heard_s = 3.0 if lost_by == "the fleet's word" else 0.2
    settings = Settings(silence=SilenceLimits(beat_s=0.1, silence_s=heard_s))
    async with desk_of(JOB, settings) as desk:
        fleet = fleet_of(desk)
        await desk.until(lambda: fleet.here, "a request for a node")
        await desk.train("new0")

        def alarms() -> list[Alarm]:
            return [event for event in desk.events() if isinstance(event, Alarm)]

        if lost_by == "the fleet's word":
            fleet.seen["new0"] = GONE
        await desk.until(alarms, "the alarm")
        fleet.seen["new0"] = GONE
        told_at = desk.controller.clock()
        await desk.until(lambda: desk.controller.clock() > told_at + 1.2 * heard_s, "the time of a silence")
        await after(desk, 5)
        [alarm] = alarms()
        signature = MACHINE_LOST if lost_by == "the fleet's word" else "silence new0"
        assert (alarm.kind, alarm.suspects, alarm.signature) == (Kind.SILENCE, ("new0",), signature)
        await desk.until(lambda: "new0" in desk.controller.view.gone, "its eviction")


async def test_a_closed_link_is_looked_into_at_once(desk_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(silence=SilenceLimits(beat_s=100.0, silence_s=600.0))
    async with desk_of(JOB, settings) as desk:
        await desk.until(lambda: fleet_of(desk).here, "a request for a node")
        agent = await desk.train("new0")
        monkeypatch.setattr(FakeFleet, "survey_s", 500.0)
        await after(desk, 1)
        fleet_of(desk).seen["new0"] = GONE
        await agent.ws.close()
        await desk.until(lambda: "new0" in desk.controller.view.gone, "its eviction by the fleet's word")


async def test_a_node_that_its_cluster_warns_is_asked_about_at_once(
    desk_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(silence=SilenceLimits(beat_s=100.0, silence_s=600.0))
    async with desk_of(JOB, settings) as desk:
        await desk.until(lambda: fleet_of(desk).here, "a request for a node")
        agent = await desk.train("new0")
        monkeypatch.setattr(FakeFleet, "survey_s", 500.0)
        await after(desk, 1)
        surveys = fleet_of(desk).surveys
        fleet_of(desk).seen["new0"] = FleetNode(state=FleetState.UP, reason="preempted", ends_at=time.time() + 20.0)
        await agent.ws.send_bytes(agent_messages.encode(EndWarning(node="new1")))  # for another, who has not said it
        await agent.ws.send_bytes(agent_messages.encode(EndWarning(node="new0")))
        await desk.until(lambda: "new0" in desk.controller.view.draining, "its drain")
        assert fleet_of(desk).surveys == surveys + 1


async def test_a_loss_that_is_known_while_ranks_are_being_stopped_is_not_told_again(desk_of: Open) -> None:
    settings = Settings(silence=SilenceLimits(beat_s=100.0, silence_s=600.0))
    async with desk_of(Job(run_id="r", min_nodes=2, max_nodes=2), settings) as desk:
        await desk.until(lambda: len(fleet_of(desk).here) == 2, "a request for nodes")
        agents = [await desk.link(node) for node in ("new0", "new1")]
        for agent in agents:
            await agent.hello()
        for agent in agents:
            await agent.answer(await agent.errand())
            await agent.beat(1)
        await desk.phase(Phase.TRAINING)
        silent = Alarm(kind=Kind.SILENCE, at=1.0, suspects=("new0",), reason="is silent", signature="silence new0")
        desk.controller._on_silence(silent)
        assert desk.controller.view.phase is Phase.STOPPING, "new1 has not answered"
        fleet_of(desk).seen["new0"] = GONE
        await after(desk, 5)
        assert [event for event in desk.events() if isinstance(event, Alarm)] == [silent]
        assert desk.controller.registry.heard_at("new0") is None, "nor will it fall silent again"


async def test_a_survey_that_hangs_holds_up_nothing(desk_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(fleet: FakeFleet) -> dict[str, FleetNode]:
        fleet.surveys += 1
        await asyncio.sleep(3600)
        return {}

    monkeypatch.setattr(FakeFleet, "survey", hang)
    async with desk_of(JOB) as desk:
        await desk.until(lambda: fleet_of(desk).here, "a request for a node")
        await desk.train("new0")
        assert fleet_of(desk).surveys == 1, "one at a time"


async def test_a_refusal_for_good_ends_a_job_that_has_not_begun(desk_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = FleetRefusal("sbatch: error: invalid partition specified: gpu9")

    def refuse(fleet: FakeFleet, count: int, evicted: object) -> None:
        raise refusal

    monkeypatch.setattr(FakeFleet, "acquire", refuse)
    async with desk_of(JOB) as desk:
        await desk.phase(Phase.DONE)
        finish = desk.controller.ledger.finish
        assert finish and finish.code == 2 and finish.reason.endswith(str(refusal))
