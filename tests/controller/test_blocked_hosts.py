"""Nodes of blocked hosts are refused when they say hello, and hosts of bad machines are put on the list."""

from concurrent.futures import Future

import pytest

from holdfast.controller import blocked_hosts
from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.core.decide.decider import Decider
from holdfast.core.membership.host_blocking import BlockedHost, BlockLimits
from holdfast.model.action import Block
from holdfast.model.decider_events import Ready
from holdfast.model.job_and_seats import HostIdentity, Job
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import LaunchHere, Leave
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Hello, Welcome
from tests.controller.conftest import Agent, Open
from tests.controller.fakes import MemoryBlockList

ALONE = Job(run_id="r", min_nodes=1, max_nodes=1, can_acquire=False, blocks=True)
ENTRY = BlockedHost(
    host="h1", id="id1", gpus=("GPU-1",), reason="n1 lost a GPU", run_id="q", incident=3, at=0, until=9e9
)


async def say_hello(agent: Agent, id: str, *gpus: str, ready: bool = True) -> None:
    identity = HostIdentity(id=id, gpus=gpus)
    hello = Hello(node=agent.node, host="h1", nproc=1, order=0, generation=0, ready=ready, identity=identity)
    await agent.ws.send_bytes(agent_messages.encode(hello))


def hello_of(id: str, *gpus: str) -> Hello:
    identity = HostIdentity(id=id, gpus=gpus)
    return Hello(node="n", host="h1", nproc=1, order=0, generation=0, ready=True, identity=identity)


async def judge(admission: HostAdmission, hello: Hello) -> str:
    await admission.read_list(hello.identity)
    return admission.refusal_of(hello.host, hello.identity)


async def test_a_blocked_host_is_told_to_leave_before_it_is_ready(desk_of: Open) -> None:
    blocked = MemoryBlockList(ENTRY)
    async with desk_of(ALONE, blocked=blocked) as desk:
        for name, id, gpus in (("again", "id1", ()), ("moved", "id2", ("GPU-1",))):
            agent = await desk.link(name)
            await say_hello(agent, id, *gpus, ready=False)
            assert isinstance(await agent.hear(), Welcome)
            leave = await agent.errand()
            assert isinstance(leave, Leave) and leave.code == 93
            for words in ("incident 3 of run q", "n1 lost a GPU", f"--lift {gpus[0] if gpus else 'h1'}"):
                assert words in leave.reason
        assert desk.controller.view.phase is Phase.WAITING and not desk.controller.view.pool
        assert "blocked: h1" in desk.controller.view.summary

        blocked.entries = ()
        agent = await desk.link("lifted")
        await say_hello(agent, "id1", "GPU-1")
        await agent.hear()
        assert isinstance(await agent.errand(), LaunchHere)
        events = [event for event in desk.events() if isinstance(event, Ready)]
        assert [(event.node, bool(event.blocked)) for event in events] == [
            ("again", True),
            ("moved", True),
            ("lifted", False),
        ]


async def test_nodes_without_an_identity_and_lists_that_cannot_be_read_refuse_nobody(desk_of: Open) -> None:
    blocked = MemoryBlockList(ENTRY)
    async with desk_of(ALONE, blocked=blocked) as desk:
        agent = await desk.link("local")
        await say_hello(agent, "", "GPU-1")
        await agent.hear()
        assert isinstance(await agent.errand(), LaunchHere)
    said: list[str] = []
    blocked.error = OSError("the list is damaged")
    admission = HostAdmission(blocked, BlockLimits(), Decider().view, now=lambda: 1.0, say=said.append)
    hello = hello_of("id1")
    assert [await judge(admission, hello) for _ in range(3)] == ["", "", ""]
    assert said == ["the list is damaged; hosts join although they may be blocked"], "once"


async def test_a_list_that_does_not_answer_stops_nobody(desk_of: Open) -> None:
    blocked = MemoryBlockList()
    blocked.waiting = Future()
    async with desk_of(ALONE, blocked=blocked) as desk:
        asking = await desk.link("n")
        await say_hello(asking, "id1")
        local = await desk.link("local")
        await say_hello(local, "")
        assert isinstance(await local.hear(), Welcome), "the controller goes on meanwhile"
        blocked.waiting.set_result((ENTRY,))
        assert isinstance(await asking.hear(), Welcome)
        leave = await asking.errand()
        assert isinstance(leave, Leave) and leave.code == 93


async def test_while_the_list_does_not_answer_it_counts_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_hosts, "_READ_S", 0.05)
    said: list[str] = []
    blocked = MemoryBlockList(ENTRY)
    admission = HostAdmission(blocked, BlockLimits(), Decider().view, now=lambda: 1.0, say=said.append)
    assert await judge(admission, hello_of("id1"))
    waiting: Future[tuple[BlockedHost, ...] | OSError] = Future()
    blocked.waiting = waiting
    refused = [await judge(admission, hello_of(id)) for id in ("id1", "id1", "id2")]
    assert [bool(one) for one in refused] == [True, True, False]
    assert said == ["the list of blocked hosts does not answer; only hosts that it named before are refused"], "once"
    blocked.waiting, blocked.entries = None, ()
    assert await judge(admission, hello_of("id1")), "the first answer is awaited before it is asked again"
    waiting.set_result((ENTRY,))
    assert not await judge(admission, hello_of("id1")), "it answers again"


async def test_a_gpu_that_a_person_blocked_was_on_no_host() -> None:
    entry = BlockedHost(host="", gpus=("GPU-1",), reason="noisy", who="ann", at=0, until=3600)
    admission = HostAdmission(MemoryBlockList(entry), BlockLimits(), Decider().view, now=lambda: 0.0, say=print)
    refusal = await judge(admission, hello_of("id1", "GPU-1"))
    assert refusal.startswith("GPU-1 is blocked by ann for another 1.0 h: noisy; ")


@pytest.mark.parametrize("flag", ["", "--list /site/list.json"])
async def test_a_bad_machine_is_put_on_the_list(flag: str) -> None:
    said: list[str] = []
    blocked = MemoryBlockList()
    blocked.flag = flag
    limits = BlockLimits(age_s=7200)
    admission = HostAdmission(blocked, limits, Decider().view, now=lambda: 1000.0, say=said.append)
    block = Block(id=7, host="h1", identity=HostIdentity(id="id1", gpus=("GPU-1",)), reason="lost a GPU", incident=2)
    outcome = await admission.block_host(block)
    assert (outcome.action, outcome.ok) == (7, True)
    [entry] = blocked.entries
    assert (entry.host, entry.id, entry.gpus, entry.incident) == ("h1", "id1", ("GPU-1",), 2)
    assert (entry.at, entry.until) == (1000.0, 8200.0)
    option = f"{flag} " if flag else ""
    lift = f"holdfast blocked {option}--lift h1 on the controller's host lets it join again"
    assert said == [f"h1 is blocked for 2 h: lost a GPU; {lift}"]
    blocked.error = OSError("the disk is full")
    outcome = await admission.block_host(block)
    assert (outcome.ok, outcome.detail) == (False, str(blocked.error))
    assert said[1:] == [f"h1 is bad but not blocked, and may join again: {blocked.error}"]
