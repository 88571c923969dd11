"""A person's word, from the port to the nodes: what is refused, what happens next, and that it happens."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from rich.console import Console

from holdfast.cli.commands.status_command import render_status
from holdfast.cli.terminal.quantity_text import clock_text
from holdfast.config import Settings
from holdfast.controller.order_admission import OrderFault, describe_effect, order_refusal
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.silence import SilenceLimits
from holdfast.model.decider_events import Order, OrderVerb
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.node_errands import Errand, LaunchHere, Leave, StopHere
from tests.controller.conftest import HEADERS, Agent, Desk, Open
from tests.core.transcript import parse

PAIR = Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)


async def order(desk: Desk, verb: str, node: str = "", status: int = 200) -> str:
    """What the controller says to it: what happens next, or why it is refused."""
    body = {"verb": verb} | ({"node": node} if node else {})
    answer = await desk.client.post("/api/v1/orders", json=body, headers=HEADERS)
    said = await answer.json()
    assert answer.status == status, said
    return str(said["next"] if status == 200 else said["error"])


async def refused(desk: Desk, verb: OrderVerb, node: str = "") -> OrderFault:
    """Why the controller refuses it: a value, whose sentence a person gets."""
    found = order_refusal(desk.controller.view, Order(verb=verb, who="Ada", node=node))
    assert found is not None and await order(desk, verb, node, status=400) == found.text
    return found.fault


async def status_of(desk: Desk) -> dict[str, Any]:
    found: dict[str, Any] = await (await desk.client.get("/api/v1/status", headers=HEADERS)).json()
    return found


async def roles(desk: Desk) -> dict[str, str]:
    return {view["node"]: view["role"] for view in (await status_of(desk))["nodes"]}


async def does(agent: Agent, kind: type[Errand]) -> Any:
    """The agent gets an errand of this kind, and does it."""
    errand = await agent.errand()
    assert isinstance(errand, kind), errand
    await agent.answer(errand)
    return errand


@contextlib.asynccontextmanager
async def pair(desk_of: Open, job: Job = PAIR) -> AsyncIterator[tuple[Desk, Agent, Agent]]:
    """A job of two nodes that trains."""
    async with desk_of(job) as desk:
        a, b = await desk.link("a"), await desk.link("b")
        for agent in (a, b):
            await agent.hello()
        await steps(desk, a, b)
        yield desk, a, b


async def steps(desk: Desk, *agents: Agent, step: int = 1) -> None:
    """A launch, answered, and a step of everybody."""
    launches = [await does(agent, LaunchHere) for agent in agents]
    await desk.phase(Phase.STARTING)
    for agent in agents:
        await agent.beat(step, generation=launches[0].generation)
    await desk.phase(Phase.TRAINING)


async def metric(desk: Desk, name: str) -> float:
    text = await (await desk.client.get("/metrics", headers=HEADERS)).text()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def test_status_and_metrics_tell_one_step(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, a, b):
        await a.beat(9)
        await b.beat(7)
        await desk.until(lambda: desk.controller.detectors.pace.step == 7, "both beats")
        assert (await status_of(desk))["step"] == await metric(desk, "holdfast_step") == 7
        await a.beat(-1)
        await b.beat(-1)  # their ranks have ended
        await desk.until(lambda: {beat.step for beat in desk.controller.registry.beats.values()} == {-1}, "both ends")
        assert (await status_of(desk))["step"] == await metric(desk, "holdfast_step") == 7


async def test_an_incident_that_is_open_is_one(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, _, _):
        assert ((await status_of(desk))["incidents"], (await status_of(desk))["failures"]) == (0, 0)
        crash = Alarm(kind=Kind.CRASH, at=1.0, suspects=("b",), ranks=(1,), generation=1, code=1, reason="ended")
        desk.controller.process_event(crash)
        status = await status_of(desk)
        assert (status["incidents"], status["failures"], status["last_incident"]) == (1, 1, "")


async def test_status_says_what_is_so_now_not_what_has_been(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        desk.controller.process_event(
            Alarm(kind=Kind.CRASH, at=1.0, suspects=("a",), ranks=(0,), generation=1, reason="ended")
        )
        await does(agent, StopHere)
        await steps(desk, agent, step=2)
        shown = Console(width=200)
        with shown.capture() as captured:
            shown.print(render_status(status := await status_of(desk)))
        [now] = [line for line in captured.get().splitlines() if line.startswith("now: ")]
        assert now.strip() == "now: training; every rank has made step 2"
        at, told = clock_text(status["last_incident_at"]), status["last_incident"]
        assert status["last_incident_at"] > 0 and f"last incident, {at}: {told[:40]}" in captured.get()


async def test_before_any_step_the_ettr_is_not_known(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("a")
        await agent.hello()
        await agent.answer(await agent.errand())
        await desk.phase(Phase.STARTING)
        status = await status_of(desk)
        assert (status["ettr"], status["step"]) == (None, -1)
        assert status["now"] == "the ranks of generation 1 run; no step was seen yet"
        metrics = await (await desk.client.get("/metrics", headers=HEADERS)).text()
        assert "holdfast_step" in metrics and "holdfast_ettr_ratio" not in metrics
        await agent.beat(1)
        await desk.phase(Phase.TRAINING)
        assert 0 <= (await status_of(desk))["ettr"] <= 1 and await metric(desk, "holdfast_ettr_ratio") <= 1


async def test_what_cannot_be_done_is_refused(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, _, _):
        seq = desk.controller.seq
        faults: tuple[tuple[OrderVerb, str, OrderFault], ...] = (
            ("resume", "", OrderFault.NOT_HELD),
            ("approve", "", OrderFault.NOT_ASKING),
            ("evict", "", OrderFault.NODE_NOT_NAMED),
            ("drain", "z", OrderFault.NO_SUCH_NODE),
            ("evict", "b", OrderFault.TOO_FEW_NODES),
            ("update", "", OrderFault.NO_RELEASE),
            ("rollback", "", OrderFault.NO_ROLLBACK),
        )
        for verb, node, fault in faults:
            assert await refused(desk, verb, node) is fault
        assert not any(isinstance(event, Order) for event in desk.events()[seq:])


async def test_hold_and_resume(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        assert await order(desk, "hold") == "all ranks stop now; nodes and state are kept until holdfast resume"
        assert (await status_of(desk))["phase"] == "pausing"
        await does(agent, StopHere)
        await desk.phase(Phase.HELD)
        status = await status_of(desk)
        assert (status["held"], status["nodes"][0]["role"], status["asking"]) == ("Ada", "active", "")
        assert await refused(desk, "hold") is OrderFault.HELD_ALREADY
        await order(desk, "resume")
        await steps(desk, agent, step=2)
        status = await status_of(desk)
        assert (status["held"], status["changes"], status["incidents"], status["generation"]) == ("", 1, 0, 2)
        assert status["last_change"] == desk.controller.ledger.changes[-1].sentence and "Ada" in status["last_change"]
        report = await (await desk.client.get("/api/v1/report", headers=HEADERS)).json()
        assert report["spent_s"]["hold"] > 0 and report["spent_s"]["pause"] > 0
        assert sum(report["spent_s"].values()) == pytest.approx(report["wall_s"])
        [change] = report["changes"]
        assert change["held_s"] > 0 and report["restarts"][0]["phases_s"]["hold"] == pytest.approx(change["held_s"])
        metrics = await (await desk.client.get("/metrics", headers=HEADERS)).text()
        assert "holdfast_planned_restarts_total 1.0" in metrics and "holdfast_held 0.0" in metrics


async def test_a_job_that_waits_for_nodes_can_be_held(desk_of: Open) -> None:
    async with desk_of() as desk:
        assert await order(desk, "hold") == "no rank is launched until holdfast resume; nodes and state are kept"
        await desk.phase(Phase.HELD)
        agent = await desk.link("a")
        await agent.hello()
        await desk.until(lambda: desk.controller.view.pool, "a node")
        assert desk.controller.view.phase is Phase.HELD
        await order(desk, "resume")
        await steps(desk, agent)


async def test_a_hold_amid_a_launch_takes_effect_after_it(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("a")
        await agent.hello()
        launch = await agent.errand()
        assert desk.controller.view.phase is Phase.LAUNCHING
        assert (await order(desk, "hold")).startswith("all ranks stop after this launch; ")
        await agent.answer(launch)
        await does(agent, StopHere)
        await desk.phase(Phase.HELD)


async def test_a_hold_amid_an_incident_takes_effect_before_the_next_launch(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        crash = Alarm(kind=Kind.CRASH, at=1.0, suspects=("a",), ranks=(0,), generation=1, code=1, reason="ended")
        desk.controller.process_event(crash)
        assert desk.controller.view.phase is Phase.STOPPING
        assert (await order(desk, "hold")).startswith("all ranks stop before the next launch; ")
        await does(agent, StopHere)
        await desk.phase(Phase.HELD)
        assert desk.controller.view.generation == 1


async def test_evict_a_node_that_trains(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, a, b):
        c = await desk.link("c")
        await c.hello()
        await desk.until(lambda: "c" in desk.controller.view.pool, "a standby")
        assert await order(desk, "evict", "b") == "b leaves now: all ranks stop and are launched again without it"
        assert (await roles(desk))["b"] == "draining"
        for agent in (a, b):
            await does(agent, StopHere)
        await desk.phase(Phase.LAUNCHING)
        assert await roles(desk) == {"a": "active", "b": "evicted", "c": "admitting"}
        await steps(desk, a, c, step=2)
        assert (await roles(desk))["c"] == "active"
        await desk.until(lambda: "b" in desk.controller.view.gone, "b has left")
        assert isinstance(await b.errand(), Leave)
        assert await refused(desk, "evict", "b") is OrderFault.NODE_LEFT
        changes = desk.controller.ledger.changes
        assert [(change.evicted, change.admitted) for change in changes] == [(("b",), ("c",))]


async def test_drain_waits_for_a_standby(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, a, b):
        assert await order(desk, "drain", "b") == (
            "b leaves when a standby can take its seat; this job keeps none, so one more is asked for "
            "(holdfast evict waits for none)"
        )
        assert await roles(desk) == {"a": "active", "b": "draining"}
        assert desk.controller.view.phase is Phase.TRAINING
        assert await refused(desk, "drain", "b") is OrderFault.ORDERED_ALREADY
        c = await desk.link("c")
        await c.hello()
        for agent in (a, b):
            await does(agent, StopHere)
        await steps(desk, a, c, step=2)
        assert isinstance(await b.errand(), Leave)
        assert desk.controller.ledger.changes[0].admitted == ("c",)


def test_a_standby_whose_link_is_down_takes_no_seat() -> None:
    decider = Decider()
    for line in ("begin nnodes 2 join", "ready a", "ready b", "outcome 1 ok", "progress 1", "ready c", "cut c"):
        decider.step(1.0, parse(line, 1.0, decider.view.generation))
    found = order_refusal(decider.view, Order(verb="evict", who="Ada", node="b"))
    assert found is not None and found.fault is OrderFault.TOO_FEW_NODES
    effect = describe_effect(decider.view, Order(verb="drain", who="Ada", node="b"))
    assert effect == "b leaves when a standby can take its seat; none is ready yet"


async def test_a_person_who_knows_that_a_node_is_dead_ends_the_wait_for_its_ranks(desk_of: Open) -> None:
    quick = Settings(silence=SilenceLimits(beat_s=0.1, silence_s=0.5))
    async with desk_of(Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, can_acquire=False), quick) as desk:
        await desk.train()
        await desk.phase(Phase.WAITING)  # it says no more
        b = await desk.link("b")
        await b.hello()
        await desk.until(lambda: "b" in desk.controller.view.pool, "a standby")
        assert "a" in desk.controller.view.fenced
        assert await refused(desk, "drain", "a") is OrderFault.NODE_LEFT
        assert await order(desk, "evict", "a") == "a counts as dead: the job no longer waits for its ranks to end"
        assert (await does(b, LaunchHere)).generation == 2
        assert await refused(desk, "evict", "a") is OrderFault.NODE_LEFT


async def test_evict_a_standby(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, _, _):
        c = await desk.link("c")
        await c.hello()
        await desk.until(lambda: "c" in desk.controller.view.pool, "a standby")
        assert await order(desk, "drain", "c") == "c has no ranks and leaves now"
        assert isinstance(await c.errand(), Leave)
        assert desk.controller.view.phase is Phase.TRAINING


async def test_a_question_is_answered(desk_of: Open) -> None:
    limits = msgspec.structs.replace(Limits(), ask_s=1000.0)
    async with desk_of(settings=Settings(recovery=limits)) as desk:
        agent = await desk.link("a")
        await agent.hello()
        await does(agent, LaunchHere)
        await agent.post(
            Alarm(
                kind=Kind.CRASH,
                at=1.0,
                suspects=("a",),
                ranks=(0,),
                generation=1,
                code=1,
                reason="exited with code 1 (SyntaxError: x)",
                raised="SyntaxError",
                klass="python_exception",
                group="user code",
                action="rollback_or_fix_code",
                confidence=1.0,
                signature="SyntaxError",
            )
        )
        await does(agent, StopHere)
        await desk.phase(Phase.HELD)
        status = await status_of(desk)
        assert "SyntaxError: x" in status["asking"]
        assert status["asks_until"] > desk.controller.clock()
        assert await refused(desk, "resume") is await refused(desk, "hold") is OrderFault.ASKING
        await order(desk, "approve")
        await steps(desk, agent)
        status = await status_of(desk)
        assert (status["asking"], status["asks_until"], status["incidents"]) == ("", None, 1)


async def test_an_order_is_on_disk_before_it_is_answered(desk_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(desk_of) as (desk, _, _):
        kept: list[bool] = []
        append = desk.controller.journal.append

        def watched(entry: Entry, durable: bool) -> None:
            kept.extend([durable] if isinstance(entry.event, Order) else [])
            append(entry, durable)

        monkeypatch.setattr(desk.controller.journal, "append", watched)
        await order(desk, "drain", "b")
        assert kept == [True]


async def test_a_job_that_ends_takes_no_more_orders(desk_of: Open) -> None:
    async with desk_of() as desk:
        await desk.train()
        await order(desk, "stop")
        await desk.phase(Phase.ENDING)
        assert await refused(desk, "hold") is OrderFault.JOB_ENDING


async def test_a_preview_says_what_an_order_would_do_and_does_nothing(desk_of: Open) -> None:
    async with pair(desk_of) as (desk, _, _):
        seq = desk.controller.seq

        async def preview(**body: str) -> tuple[int, dict[str, Any]]:
            answer = await desk.client.post("/api/v1/orders/preview", json=body, headers=HEADERS)
            return answer.status, await answer.json()

        status, said = await preview(verb="hold")
        assert status == 200 and not said["taken"]
        assert said["next"] == "all ranks stop now; nodes and state are kept until holdfast resume"
        status, said = await preview(verb="evict", node="c")
        assert status == 400 and "no node 'c'" in said["error"]
        assert desk.controller.view.phase is Phase.TRAINING and not desk.controller.view.held_by
        assert desk.controller.seq == seq
