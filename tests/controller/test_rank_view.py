"""What is told of one rank: its node's beat, its newest collectives, and the stacks of its node alone."""

import asyncio
import time
from typing import Any

from holdfast.controller.access.caller_admission import PortAccess, Right, make_user_token
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Arrival, Trace
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import TOKEN_HEADER, TraceAnswer
from tests.controller.conftest import HEADERS, Desk, Open
from tests.controller.test_stack_tracing import looked_at
from tests.core.diagnose.places import REDUCE, process


async def view(desk: Desk, rank: int) -> tuple[int, dict[str, Any]]:
    answer = await desk.client.get(f"/api/v1/ranks/{rank}", headers=HEADERS)
    return answer.status, await answer.json()


async def test_a_rank_is_told_by_the_beat_of_its_node(desk_of: Open) -> None:
    async with desk_of() as desk:
        assert (await view(desk, 0))[0] == 404
        agent = await desk.train(nproc=2)
        now = desk.controller.clock()
        reached = (Arrival("dp", 6, now - 2.0), Arrival("tp", 40, now - 1.0), Arrival("dp", 7, now - 0.5))
        beat = Beat(
            node="a",
            generation=1,
            step=5,
            at=now - 3.0,
            sent=now - 0.25,
            first_step=1,
            counted=False,
            loss=0.5,
            phase="evaluation",
            arrivals={1: reached},
            mute=(0,),
        )
        await agent.ws.send_bytes(agent_messages.encode(beat))
        await desk.until(lambda: desk.controller.registry.beats["a"].step == 5, "the beat")
        status, told = await view(desk, 1)
        assert status == 200
        assert (told["node"], told["step"], told["loss"], told["phase"], told["mute"]) == (
            "a",
            5,
            0.5,
            "evaluation",
            False,
        )
        assert [(one["group"], one["number"]) for one in told["collectives"]] == [("dp", 7), ("tp", 40)]
        ages = [told["heard_s"], told["beat_s"], told["step_s"]]
        assert all(isinstance(age, float) for age in ages) and 0.25 <= told["beat_s"] < told["step_s"]
        assert (await view(desk, 0))[1]["mute"] is True and (await view(desk, 0))[1]["collectives"] == []
        assert (await view(desk, 2))[0] == 404


async def test_of_an_older_launch_nothing_is_told(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        await agent.beat(8, generation=0)
        await desk.until(lambda: desk.controller.registry.beats["a"].generation == 0, "the beat")
        told = (await view(desk, 0))[1]
        assert (told["beat_s"], told["step"], told["collectives"]) == (None, -1, [])


async def test_the_stacks_of_one_rank_are_those_of_its_node(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        began = time.monotonic()
        body = {"deadline_s": 20, "rank": 0}
        asking = asyncio.create_task(desk.client.post("/api/v1/trace", json=body, headers=HEADERS))
        look = await looked_at(agent)
        trace = Trace(node="a", at=1.0, processes=(process(0, REDUCE, node="a"),))
        await agent.ws.send_bytes(agent_messages.encode(TraceAnswer(id=look.id, trace=trace)))
        told = await (await asking).json()
        assert [one["node"] for one in told["traces"]] == ["a"] and told["naming"]["ranks"] == []
        assert time.monotonic() < began + 19
        assert (await desk.client.post("/api/v1/trace", json={"rank": 1}, headers=HEADERS)).status == 400


async def test_a_status_says_what_its_reader_may_do(desk_of: Open) -> None:
    badges = tuple(make_user_token(right.name, right, f"token-{right}") for right in Right)
    port = PortAccess(lambda: badges, "controller.test")
    async with desk_of(port=port) as desk:
        for right in Right:
            answer = await desk.client.get("/api/v1/status", headers={TOKEN_HEADER: f"token-{right}"})
            assert (await answer.json())["right"] == right.name.lower()
