"""Asking all nodes at once, and what becomes of answers that are late, doubled or of somebody else."""

import asyncio
import json
import time

from holdfast.controller.node_links import NodeLinks, Outbox
from holdfast.controller.stack_tracing import NOT_CONNECTED, StackTracing
from holdfast.model.job_and_seats import Job
from holdfast.model.rank_traces import Trace
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import TraceAnswer, TraceRequest
from tests.controller.conftest import HEADERS, Agent, Open


async def looked_at(agent: Agent) -> TraceRequest:
    while not isinstance(heard := await agent.hear(), TraceRequest):
        pass
    return heard


async def answer(agent: Agent, look: TraceRequest, node: str = "") -> None:
    trace = Trace(node=node or agent.node, at=1.0)
    await agent.ws.send_bytes(agent_messages.encode(TraceAnswer(id=look.id, trace=trace)))


def linked(*nodes: str) -> tuple[NodeLinks, dict[str, Outbox]]:
    links = NodeLinks(lambda: 1)
    outboxes = {node: links.make_outbox() for node in nodes}
    for node, outbox in outboxes.items():
        links.open_link(node, outbox)
    return links, outboxes


async def test_everybody_answers() -> None:
    links, outboxes = linked("b", "a")
    tracing = StackTracing(links, time.monotonic)
    taking = asyncio.create_task(tracing.take_traces(30.0, native=True))
    await asyncio.sleep(0)
    heard = {node: agent_messages.decode_from_controller(outboxes[node].get_nowait()).message for node in ("a", "b")}
    asked = [(node, message) for node, message in heard.items() if isinstance(message, TraceRequest)]
    assert len(asked) == 2 and asked[0][1].native and asked[0][1].deadline_s == 30.0
    for node, look in asked:
        tracing.on_trace("c", TraceAnswer(id=look.id, trace=Trace(node=node, at=9.0)))  # speaks for another
        tracing.on_trace(node, TraceAnswer(id=look.id + 7, trace=Trace(node=node, at=8.0)))
        tracing.on_trace(node, TraceAnswer(id=look.id, trace=Trace(node=node, at=1.0)))
        tracing.on_trace(node, TraceAnswer(id=look.id, trace=Trace(node=node, at=2.0)))  # once more
    assert [(t.node, t.at) for t in await taking] == [("a", 1.0), ("b", 1.0)]
    tracing.on_trace("a", TraceAnswer(id=asked[0][1].id, trace=Trace(node="a", at=3.0)))  # long after


async def test_who_does_not_answer_is_named() -> None:
    links, outboxes = linked("a")
    tracing = StackTracing(links, time.monotonic)
    began = time.monotonic()
    traces = await tracing.take_traces(0.1, nodes=("a", "b"))
    assert time.monotonic() - began < 20
    assert [t.node for t in traces] == ["a", "b"]
    assert traces[0].error == "no answer within 1.1 s" and traces[1].error == NOT_CONNECTED
    links.close_link("a", outboxes["a"])
    assert await tracing.take_traces(30.0) == ()  # nobody is there


async def test_over_the_port(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        asking = asyncio.create_task(desk.client.post("/api/v1/trace", json={"deadline_s": 20}, headers=HEADERS))
        await answer(agent, await looked_at(agent))
        found = await (await asking).json()
        assert found["naming"]["ranks"] == [] and found["naming"]["reason"] == "no stacks; rank 0 has ended"
        assert [t["node"] for t in found["traces"]] == ["a"]
        quick = await desk.client.post("/api/v1/trace", json={"deadline_s": 0.1}, headers=HEADERS)
        assert (await quick.json())["traces"][0]["error"] == "no answer within 1.1 s"


async def test_bad_questions(desk_of: Open) -> None:
    async with desk_of(Job(run_id="r", min_nodes=1, max_nodes=1, can_acquire=False)) as desk:
        for body in (b"{", b"[]", b'{"deadline_s": "x"}', b'{"deadline_s": 0}', b'{"deadline_s": 1e9}'):
            refused = await desk.client.post("/api/v1/trace", data=body, headers=HEADERS)
            assert refused.status == 400 and "deadline_s" in (await refused.json())["error"]
        empty = await desk.client.post("/api/v1/trace", data=b"", headers=HEADERS)
        assert empty.status == 200 and json.loads(await empty.text())["traces"] == []  # no ranks yet
