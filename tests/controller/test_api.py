"""The one port, as people and Prometheus see it."""

import json
import math
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.controller.api_description import describe_api
from holdfast.controller.order_admission import NO_SUCH_ORDER
from holdfast.core.decide.node_roles import NodeRole
from holdfast.core.record.job_account import TimeUse
from holdfast.model.decider_events import Progress
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.observation import Beat
from holdfast.model.stored_checkpoint_report import MissedCheckpoint
from holdfast.wire import agent_messages
from tests.controller.conftest import HEADERS, Desk, Open

PATHS = ("/api/v1/status", "/api/v1/report", "/api/v1/entries", "/metrics", "/openapi.json", "/agent", "/nothing")


async def get(desk: Desk, path: str, status: int = 200) -> Any:
    answer = await desk.client.get(path, headers=HEADERS)
    assert answer.status == status
    return await answer.json()


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_token_there_is_nothing(desk_of: Open, path: str) -> None:
    async with desk_of() as desk:
        for guess in (None, "", "guess", "s\u00e9cret"):
            headers = {} if guess is None else {"X-Holdfast-Token": guess}
            answer = await desk.client.get(path, headers=headers)
            assert answer.status == 401
            assert "X-Holdfast-Token" in (await answer.json())["error"]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await desk.client.ws_connect("/agent")
        assert refused.value.status == 401
        refused_order = await desk.client.post("/api/v1/orders", data=b'{"verb": "stop"}')
        assert refused_order.status == 401
        assert desk.controller.view.phase is Phase.WAITING


async def test_a_token_is_never_taken_from_the_address(desk_of: Open) -> None:
    async with desk_of() as desk:
        assert (await desk.client.get("/api/v1/status?token=secret")).status == 401
        bearer = {"Authorization": "Bearer secret"}
        assert (await desk.client.get("/api/v1/status", headers=bearer)).status == 200


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"Host": "evil.test"}, 403),  # a page's own name, that now leads here
        ({"Host": "evil.test:80", "Origin": "http://evil.test:80"}, 403),
        ({"Origin": "http://evil.test"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
        ({"Host": "controller.test"}, 200),
        ({"Host": "[::1]:9"}, 200),
    ],
)
async def test_pages_of_others_are_not_served(desk_of: Open, said: dict[str, str], status: int) -> None:
    async with desk_of() as desk:
        assert (await desk.client.get("/api/v1/status", headers=HEADERS | said)).status == status
        answer = await desk.client.post("/api/v1/orders", data=b'{"verb": "hold"}', headers=HEADERS | said)
        assert answer.status == status
        assert bool(desk.controller.view.held_by) is (status == 200)


async def test_status(desk_of: Open) -> None:
    async with desk_of() as desk:
        status = await get(desk, "/api/v1/status")
        assert (status["run_id"], status["phase"]) == ("r", "waiting")
        assert status["nodes"] == [] and status["step"] == -1
        await desk.train()
        standby = await desk.link("b")
        await standby.hello()
        await desk.until(lambda: desk.controller.view.pool, "a standby")
        status = await get(desk, "/api/v1/status")
        assert (status["phase"], status["generation"], status["step"], status["incidents"]) == ("training", 1, 1, 0)
        active, waiting = status["nodes"]
        assert (active["node"], active["role"], active["ranks"], active["step"]) == ("a", "active", "0", 1)
        assert (waiting["node"], waiting["role"]) == ("b", "ready")


async def test_the_step_of_a_node_is_numbered_as_the_jobs_is(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("a")
        await agent.hello()
        await agent.answer(await agent.errand())
        beat = Beat(node="a", generation=1, step=11, at=1.0, first_step=1, first_at=1.0, counted=True, origin=80)
        await agent.ws.send_bytes(agent_messages.encode(beat))
        await desk.phase(Phase.TRAINING)
        status = await get(desk, "/api/v1/status")
        assert (status["step"], status["nodes"][0]["step"]) == (91, 91)


async def test_ranks_without_a_step_have_run_for_less_than_the_job(desk_of: Open) -> None:
    async with desk_of() as desk:
        assert (await get(desk, "/api/v1/status"))["run_s"] == 0
        agent = await desk.link("a")
        await agent.hello()
        await agent.answer(await agent.errand())
        await desk.phase(Phase.STARTING)
        status = await get(desk, "/api/v1/status")
        assert 0 < status["run_s"] < status["wall_s"]


async def test_report_and_entries(desk_of: Open) -> None:
    async with desk_of() as desk:
        await desk.train()
        report = await get(desk, "/api/v1/report")
        assert report["phase"] == "training" and report["code"] is None
        assert sum(report["spent_s"].values()) == pytest.approx(report["wall_s"])
        entries = await get(desk, "/api/v1/entries")
        assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
        assert entries[0]["event"]["type"] == "begin"
        later = await get(desk, "/api/v1/entries?after=2")
        assert later == entries[2:]
        assert await get(desk, "/api/v1/entries?after=99") == []
        await get(desk, "/api/v1/entries?after=x", 400)


async def test_orders(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        for body in (b"", b"{", b"[]", b'{"verb": 1}', b'{"verb": "dance"}'):
            answer = await desk.client.post("/api/v1/orders", data=body, headers=HEADERS)
            assert answer.status == 400
            assert ((await answer.json())["error"] == NO_SUCH_ORDER) is (b"dance" in body)
        large = json.dumps({"verb": "stop", "node": "x" * (1 << 16)}).encode()
        answer = await desk.client.post("/api/v1/orders", data=large, headers=HEADERS)
        assert answer.status == 413 and answer.headers["Connection"] == "close", "the rest of it is not read"
        assert desk.controller.view.phase is Phase.TRAINING
        order = {"verb": "stop", "who": "somebody else", "code": 5}
        answer = await desk.client.post("/api/v1/orders", json=order, headers=HEADERS)
        assert answer.status == 200
        assert (await answer.json())["seq"] == desk.controller.seq
        await agent.answer(await agent.errand())  # ranks are stopped first
        leave = await agent.errand()
        assert (leave.reason, leave.code) == ("stopped by Ada", 5)  # type: ignore[union-attr]
        await agent.answer(leave)
        await desk.phase(Phase.DONE)


async def test_metrics(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        alarm = Alarm(kind=Kind.CRASH, at=1.0, suspects=("a",), ranks=(0,), generation=1, code=-9, reason="died")
        await agent.post(alarm)
        for _ in range(2):
            await agent.answer(await agent.errand())
        await agent.beat(2, generation=2)
        await desk.phase(Phase.TRAINING)
        missed = MissedCheckpoint(step=2, why="step 2 was not written")
        desk.built.controller.registry.storage.on_told(7.0, 2, 1, missed)
        answer = await desk.client.get("/metrics", headers=HEADERS)
        assert answer.content_type == "text/plain"
        found = {family.name: family for family in text_string_to_metric_families(await answer.text())}
        value = {name: family.samples[0].value for name, family in found.items()}
        assert value["holdfast_generation"] == 2
        kinds = {sample.labels["kind"]: sample.value for sample in found["holdfast_incidents"].samples}
        assert kinds == dict.fromkeys(Kind, 0) | {"crash": 1}
        phases = {sample.labels["phase"]: sample.value for sample in found["holdfast_phase"].samples}
        assert phases == dict.fromkeys(Phase, 0) | {"training": 1}
        assert [value[f"holdfast_{of}"] for of in ("stored_step", "stored_timestamp_seconds", "storage_failing")] == [
            1,
            7,
            1,
        ]
        assert 0 <= value["holdfast_ettr_ratio"] <= 1
        assert found["holdfast_incidents"].type == "counter"
        uses = {sample.labels["use"]: sample.value for sample in found["holdfast_spent_seconds"].samples}
        assert set(uses) == {use.value for use in TimeUse}
        roles = {sample.labels["role"]: sample.value for sample in found["holdfast_nodes"].samples}
        assert roles == dict.fromkeys(NodeRole, 0) | {"active": 1}
        assert (value["holdfast_planned_restarts"], value["holdfast_release"], value["holdfast_held"]) == (0, 1, 0)
        restarts = {(s.labels["kind"], s.labels["phase"]) for s in found["holdfast_restart_seconds"].samples}
        assert {("incident", "stop"), ("incident", "first step")} <= restarts


async def test_the_pace_of_releases_in_metrics_and_status(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        for step, at in ((11, 10.0), (31, 30.0)):
            beat = Beat(node="a", generation=1, step=step, at=at, first_step=1, first_at=1.0, counted=False)
            work = {"tokens": 500.0 * step, "flops": 3e12 * step, "peak_flops": 1e13, "tensor_share": 0.25}
            work |= {"loss": 0.5, "loss_step": step - 1}
            await agent.ws.send_bytes(agent_messages.encode(msgspec.structs.replace(beat, **work)))
            alarm = Alarm(kind=Kind.SLOW, at=at, suspects=(), reason="", generation=1, stance=Stance.OBSERVE)
            await agent.post(alarm)  # which makes progress be told
            await agent.hear()
        answer = await desk.client.get("/metrics", headers=HEADERS)
        families = text_string_to_metric_families(await answer.text())
        value = {family.name: family.samples[0].value for family in families if family.samples}
        assert value["holdfast_steps_per_second"] == pytest.approx(1.0)
        assert value["holdfast_tokens_per_second"] == pytest.approx(500.0)
        assert value["holdfast_mfu_ratio"] == pytest.approx(0.3)
        assert "holdfast_last_hour_ettr_ratio" not in value, "it is not that old"
        assert value["holdfast_tensor_active_ratio"] == pytest.approx(0.25)
        told = await (await desk.client.get("/api/v1/status", headers=HEADERS)).json()
        assert "500 tokens/s, MFU 30.0 %" in told["pace"][0] and told["hour_ettr"] is None
        assert [node["tensor_share"] for node in told["nodes"]] == [0.25]
        assert [(node["step"], node["loss"], node["loss_step"]) for node in told["nodes"]] == [(31, 0.5, 30)]


async def test_the_description_is_served_and_hangs_together(desk_of: Open) -> None:
    async with desk_of() as desk:
        assert await get(desk, "/openapi.json") == json.loads(json.dumps(describe_api()))
        served = {route.resource.canonical for route in desk.client.app.router.routes() if route.resource}
    description = describe_api()
    assert description["openapi"].startswith("3.1")
    assert set(description["paths"]) | {"/agent", "/openapi.json"} == served
    schemas = description["components"]["schemas"]
    text = json.dumps(description)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas
    assert "phase" in schemas["Status"]["properties"]
    assert description["components"]["securitySchemes"]["token"]["name"] == "X-Holdfast-Token"
    for path in description["paths"].values():
        for operation in path.values():
            assert operation["responses"]


async def test_numbers_that_are_none_are_valid_json(desk_of: Open) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    async with desk_of() as desk:
        await desk.train()
        for number in (math.nan, math.inf, -math.inf):
            progress = Progress(generation=1, step=3, at=2.0, first_step=1, first_at=1.0, counted=True)
            desk.controller.process_event(msgspec.structs.replace(progress, grouped_at=number, restored_at=number))
        for path in ("/api/v1/entries", "/api/v1/status", "/api/v1/report"):
            answer = await desk.client.get(path, headers=HEADERS)
            assert answer.status == 200
            json.loads(await answer.text(), parse_constant=refuse)


async def test_status_and_report_agree_on_what_steps_are_counted_from(desk_of: Open) -> None:
    async with desk_of() as desk:
        await desk.train()
        assert (await get(desk, "/api/v1/status"))["since"] == (await get(desk, "/api/v1/report"))["since"] == ""
        progress = Progress(generation=1, step=3, at=2.0, first_step=1, first_at=1.0, counted=True)
        desk.controller.process_event(progress)
        found = (await get(desk, "/api/v1/status"))["since"]
        assert found and found == (await get(desk, "/api/v1/report"))["since"]


async def test_the_place_of_enrolment_is_guarded_where_nobody_enrols_and_against_pages(desk_of: Open) -> None:
    async with desk_of() as desk:
        answer = await desk.client.get("/enrol")
        assert (answer.status, answer.headers["Connection"]) == (401, "close")
        page = await desk.client.get("/enrol", headers={"Origin": "http://evil.example"})
        assert (page.status, page.headers["Connection"]) == (403, "close")
