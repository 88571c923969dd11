"""What the controller asks about the network, and what it makes of the answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.config import Settings
from holdfast.core.detect.hang import HangLimits
from holdfast.core.detect.health import HealthLimits
from holdfast.model.decider_events import LinksDown, LinksUp
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.observation import Beat, LinkTraffic, Reach, Strain, StrainKind
from holdfast.model.rank_traces import Trace
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Hello, ReachRequest, TraceAnswer, TraceRequest, TrafficReport
from tests.controller.conftest import HEADERS, Agent, Desk, Open

NODES = ("a", "b", "c", "d")
QUIET = LinkTraffic(link="mlx5_0 port 1", rdma=True, in_bytes_s=0.0, out_bytes_s=0.0)
JOB = Job(run_id="r", min_nodes=4, max_nodes=4, can_acquire=False)
QUICK = msgspec.structs.replace(
    Settings(), health=HealthLimits(network_s=0.5), hang=HangLimits(quiet_s=0.3, start_s=900.0)
)


def greet(node: str) -> Hello:
    place = (f"192.0.2.{1 + NODES.index(node)}", 7)
    return Hello(node=node, host=node, nproc=1, order=0, generation=0, ready=True, keeper=place)


async def started(desk: Desk, hello: Callable[[str], Hello] = greet) -> dict[str, Agent]:
    """Four nodes, on hosts of their own unless told otherwise, whose ranks run and make no step."""
    agents = {node: await desk.link(node) for node in NODES}
    for node, agent in agents.items():
        await agent.ws.send_bytes(agent_messages.encode(hello(node)))
    for agent in agents.values():
        await agent.answer(await agent.errand())
    await desk.phase(Phase.STARTING)
    return agents


async def attend(agent: Agent, reached: tuple[str, ...], traffic_s: float | None = None) -> None:
    """Answer all that is asked: only these are reached, and so much goes over the links."""
    while True:
        heard = await agent.hear()
        match heard:
            case ReachRequest(peers=peers):
                assert agent.node not in peers
                there = tuple(peer for peer in peers if peer in reached)
                missed = tuple(peer for peer in peers if peer not in reached)
                reach = Reach(node=agent.node, reached=there, missed=missed, gateway=bool(reached))
                await agent.ws.send_bytes(agent_messages.encode(reach))
                if traffic_s is not None:
                    links = (msgspec.structs.replace(QUIET, in_bytes_s=traffic_s, signs={"np_cnp_sent": 5.0}),)
                    await agent.ws.send_bytes(agent_messages.encode(TrafficReport(node=agent.node, links=links)))
            case TraceRequest(id=id):
                trace = Trace(node=agent.node, at=1.0)
                await agent.ws.send_bytes(agent_messages.encode(TraceAnswer(id=id, trace=trace)))


@asynccontextmanager
async def attending(deeds: list[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(deed) for deed in deeds]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def alarms(desk: Desk) -> list[Alarm]:
    return [event for event in desk.events() if isinstance(event, Alarm) and event.kind is Kind.HEALTH]


async def test_a_switch_that_is_down_is_no_nodes_fault(desk_of: Open) -> None:
    async with desk_of(job=JOB, settings=QUICK) as desk:
        agents = await started(desk)
        for node in NODES:
            others = tuple(other for other in NODES if other != node)
            reach = Reach(node=node, reached=others, missed=(), gateway=True)  # as long as the switch was up
            await agents[node].ws.send_bytes(agent_messages.encode(reach))
        async with attending([attend(agents[node], () if node in "cd" else ("a", "b")) for node in NODES]):
            await desk.until(lambda: alarms(desk), "an alarm about the network")
            [alarm] = alarms(desk)
            assert alarm.reason == "c and d reach neither their gateway nor a peer: the network between is down"
            assert alarm.suspects == () and desk.controller.view.phase is Phase.STARTING, "nobody is evicted"


async def test_a_link_is_told_when_it_is_down_and_when_it_is_up(desk_of: Open) -> None:
    async with desk_of(job=JOB, settings=QUICK) as desk:
        agents = await started(desk)

        async def tell(*down: str) -> None:
            cut = (Strain(kind=StrainKind.CUT, sign="net.down eth0", nodes=down, since=1.0, text="has no link"),)
            beat = Beat(node="a", generation=1, step=-1, at=0.0, strains=cut if down else ())
            await agents["a"].ws.send_bytes(agent_messages.encode(beat))

        def told() -> list[LinksDown | LinksUp]:
            return [event for event in desk.events() if isinstance(event, LinksDown | LinksUp)]

        unread = Beat(node="a", generation=1, step=-1, at=0.0, links_read=False)
        await tell(*NODES)  # all are on one machine: nobody needs its link
        for _ in range(2):
            await tell("a")
        await agents["a"].ws.send_bytes(agent_messages.encode(unread))  # of a new agent, which knows nothing yet
        await agents["b"].beat(1)
        await desk.until(lambda: "b" in desk.built.ingest.registry.beats, "what was said after it")
        assert told() == [LinksDown(nodes=("a",))]
        await tell()
        await desk.until(lambda: len(told()) >= 2, "that the link is up again")
        assert told() == [LinksDown(nodes=("a",)), LinksUp(nodes=("a",))]
        assert desk.controller.view.without_links == frozenset()


async def test_a_new_controller_waits_for_the_node_that_tells_of_its_hosts_links(desk_of: Open) -> None:
    """One agent reads the links of a host, for all nodes there: what another does not tell is not up for that."""
    async with desk_of(job=JOB, settings=QUICK) as desk:
        agents = await started(
            desk, lambda node: msgspec.structs.replace(greet(node), host="h" if node in "ab" else node)
        )
        desk.controller.process_event(LinksDown(nodes=("a", "b")))  # its journal knows, and no beat has come yet

        async def tell(node: str, *down: str) -> None:
            cut = (Strain(kind=StrainKind.CUT, sign="net.down eth0", nodes=down, since=1.0, text="has no link"),)
            beat = Beat(node=node, generation=1, step=-1, at=0.0, strains=cut if down else ())
            desk.built.ingest.registry.beats.pop(node, None)
            await agents[node].ws.send_bytes(agent_messages.encode(beat))
            await desk.until(lambda: node in desk.built.ingest.registry.beats, "its beat")

        def told() -> list[LinksUp]:
            return [event for event in desk.events() if isinstance(event, LinksUp)]

        await tell("b")
        assert told() == []
        await tell("a", "a", "b")
        await tell("b")
        assert told() == []
        await tell("a")
        await tell("b")
        assert told() == [LinksUp(nodes=("a",)), LinksUp(nodes=("b",))]


async def test_nodes_of_one_host_ask_nobody(desk_of: Open) -> None:
    """Their keepers are reached by paths, not over a network, and the links of their host are not between them."""
    async with desk_of(job=JOB, settings=QUICK) as desk:
        agents = await started(desk, lambda node: Hello(
            node=node, host="h", nproc=1, order=0, generation=0, ready=True, keeper=(f"/run/{node}/keeper.sock", 0),
        ))  # fmt: skip
        async with attending([attend(agent, (), traffic_s=0.0) for agent in agents.values()]):
            for agent in agents.values():
                report = TrafficReport(node=agent.node, links=(QUIET,))
                await agent.ws.send_bytes(agent_messages.encode(report))
            asked_at = desk.controller.clock()
            await desk.until(lambda: desk.controller.clock() > asked_at + 4 * QUICK.health.network_s, "four rounds")
            assert alarms(desk) == []


async def test_quiet_links_lead_to_a_look_and_to_nothing_else(desk_of: Open) -> None:
    async with desk_of(job=JOB, settings=QUICK) as desk:
        agents = await started(desk)
        async with attending([attend(agent, NODES, traffic_s=0.0) for agent in agents.values()]):
            await desk.until(lambda: alarms(desk), "a look")
            [alarm, *_] = alarms(desk)
            assert (alarm.klass, alarm.signature) == ("process_hang", "quiet links") and "no stacks" in alarm.reason
            assert (alarm.suspects, desk.controller.view.phase) == ((), Phase.STARTING)


async def test_traffic_is_shown(desk_of: Open) -> None:
    async with desk_of(job=JOB, settings=QUICK) as desk:
        agents = await started(desk)
        async with attending([attend(agent, NODES, traffic_s=2e9) for agent in agents.values()]):
            network, clock = desk.controller.detectors.network, desk.controller.clock
            await desk.until(lambda: len(network.list_traffic(clock())) == 4, "the traffic of all")
            status = await (await desk.client.get("/api/v1/status", headers=HEADERS)).json()
            assert [(node["in_bytes_s"], node["out_bytes_s"]) for node in status["nodes"]] == [(2e9, 0.0)] * 4
            text = await (await desk.client.get("/metrics", headers=HEADERS)).text()
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            flows = [s for s in samples if s.name == "holdfast_link_bytes_per_second"]
            [into] = [s.value for s in flows if s.labels == {"node": "a", "link": "mlx5_0 port 1", "direction": "in"}]
            assert into == pytest.approx(2e9) and len(flows) == 8
            [sign, *_] = [s for s in samples if s.name == "holdfast_link_rdma_events_per_second"]
            assert (sign.labels["counter"], sign.value) == ("np_cnp_sent", 5.0)
            total = {s.labels["direction"]: s.value for s in samples if s.name == "holdfast_network_bytes_per_second"}
            assert total == {"in": 8e9, "out": 0.0}
            [signs] = [s for s in samples if s.name == "holdfast_network_rdma_events_per_second"]
            assert (signs.labels, signs.value) == ({"counter": "np_cnp_sent"}, 20.0)
            assert alarms(desk) == []


async def test_traffic_that_is_out_of_date_is_not_shown(desk_of: Open) -> None:
    async with desk_of(job=JOB) as desk:  # machines are read every half minute
        agents = await started(desk)
        network, clock = desk.controller.detectors.network, desk.controller.clock
        await agents["a"].ws.send_bytes(agent_messages.encode(TrafficReport(node="a", links=(QUIET,))))
        await desk.until(lambda: network.list_traffic(clock()), "what a has told")
        assert network.list_traffic(clock() + 60) == {"a": (QUIET,)} and network.list_traffic(clock() + 91) == {}
        network.forget_node("a")
        assert network.list_traffic(clock()) == {}, "it is lost"
