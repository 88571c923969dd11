"""A second hello in a node's name, over real sockets: who has the link keeps it, and the try is in the audit log."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from holdfast.agent.connection.controller_dialer import ControllerDialer, LinkRefusedError
from holdfast.cli.launch.enrolment_client import EnrolmentClient, EnrolmentRefusedError
from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import PortAccess, admit_by_socket
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.controller.api import ApiEntrance, make_api, make_runner
from holdfast.linux import own_process_settings
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.observation import Beat
from holdfast.wire import agent_messages, unix_sockets
from holdfast.wire.agent_messages import Hello, Welcome
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec
from tests.controller.conftest import Agent, Desk, Open
from tests.controller.test_hostile_node import PATIENT
from tests.wire.test_enrolment import TOKEN

WIDE = Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)
REFUSED = "another process speaks for this node"
OTHERS = "this link is another node's"
HELLO = Hello(node="a", host="h", nproc=1, order=0, generation=0, ready=False)

# A process of its own that says one hello and tells what came of it; then it holds its link until it is killed.
PROGRAM = """
import asyncio, sys
import aiohttp

async def call(path, hello):
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        async with session.ws_connect("http://controller.holdfast/agent") as ws:
            await ws.send_bytes(bytes.fromhex(hello))
            heard = await ws.receive()
            print(heard.data if heard.type is aiohttp.WSMsgType.CLOSE else "welcome", flush=True)
            await asyncio.sleep(1000)

asyncio.run(call(*sys.argv[1:]))
"""


class Doors:
    """A controller's two entrances, as its process opens them: the unix socket, and the port with TLS."""

    def __init__(self, folder: Path, desk: Desk) -> None:
        self.folder, self.desk = folder, desk
        self.socket = folder / "controller.sock"
        self.authority = CertificateAuthority(folder / "door")
        self.address = ("", 0)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Doors"]:
        audit, built = AuditLog(self.folder), self.desk.built
        enrolling = NodeEnrolment(
            self.authority,
            TOKEN,
            "r",
            audit=audit,
            tokens=NodeTokens(self.folder / "door", lambda: None),
            certificates=built.certificates,
            admission=built.ingest.admission,
            announce=self.desk.controller.process_event,
        )
        at_port = PortAccess(tuple, "h", enrolling.certificate_refusal)
        runners = [
            make_runner(make_api(built, door))
            for door in (ApiEntrance(admit_by_socket, audit), ApiEntrance(at_port, audit, enrolling))
        ]
        for runner in runners:
            await runner.setup()
        tls = mutual_tls.server_tls(self.authority.keys, strangers=True)
        await web.SockSite(runners[0], unix_sockets.listen(self.socket, backlog=16)).start()
        await web.TCPSite(runners[1], "127.0.0.1", 0, ssl_context=tls).start()
        self.address = runners[1].addresses[0]
        try:
            yield self
        finally:
            for runner in runners:
                await runner.cleanup()

    def enrol(self, name: str) -> KeyFiles:
        client = EnrolmentClient(self.address, TOKEN)
        try:
            return client.enrol_node(name, self.folder / "keys" / name)
        finally:
            client.close()

    def tries(self) -> list[dict[str, str]]:
        """Refused hellos, as the audit log has them."""
        log = self.folder / "audit.log"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if '"hello"' in line["what"]]


@pytest.fixture
async def doors(desk_of: Open, tmp_path: Path) -> AsyncIterator[Doors]:
    async with desk_of(job=WIDE, settings=PATIENT) as desk, Doors(tmp_path, desk).open() as opened:
        yield opened


@contextlib.asynccontextmanager
async def by_tls(doors: Doors, keys: KeyFiles, node: str = "a", source: str = "127.0.0.1") -> AsyncIterator[Agent]:
    """A link with a node's certificate, from an address of this host."""
    tls = mutual_tls.client_tls(keys, controller=True)
    connector = aiohttp.TCPConnector(ssl=tls, local_addr=(source, 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        url = f"https://127.0.0.1:{doors.address[1]}/agent"
        async with session.ws_connect(url, server_hostname=mutual_tls.CONTROLLER) as ws:
            yield Agent(ws, node)


@contextlib.asynccontextmanager
async def by_socket(doors: Doors) -> AsyncIterator[Agent]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(doors.socket))) as session,
        session.ws_connect(f"http://{mutual_tls.CONTROLLER}/agent") as ws,
    ):
        yield Agent(ws, "a")


async def comes_in(agent: Agent) -> None:
    await agent.hello()
    assert isinstance(await agent.hear(), Welcome)


async def is_refused(agent: Agent, why: str = REFUSED) -> None:
    await agent.hello()
    closed = await agent.ws.receive(timeout=30)
    assert (closed.type, closed.data, closed.extra) == (aiohttp.WSMsgType.CLOSE, 1008, why)


async def is_heard(doors: Doors, agent: Agent, at: float) -> None:
    """Whose link it was, has it still: its beats count."""
    await agent.ws.send_bytes(agent_messages.encode(Beat(node="a", generation=0, step=-1, at=at)))
    beats = doors.desk.controller.registry.beats
    await doors.desk.until(lambda: "a" in beats and beats["a"].at == at, "a beat of the first link")
    assert doors.desk.controller.links.is_linked("a")


@contextlib.contextmanager
def another_process(doors: Doors, hello: Hello = HELLO) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", PROGRAM, str(doors.socket), agent_messages.encode(hello).hex()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


async def answer_to(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def is_refused_elsewhere(doors: Doors) -> int:
    """Return the pid of another process, whose hello was refused."""
    with another_process(doors) as process:
        assert await answer_to(process) == "1008"
        return process.pid


async def test_another_process_of_this_host_does_not_take_a_link_over(doors: Doors) -> None:
    async with by_socket(doors) as first:
        await comes_in(first)
        with another_process(doors) as second:
            assert await answer_to(second) == "1008"
            [told] = doors.tries()
            assert told["origin"] == f"process {second.pid} of this host"
        assert told["who"] and told["refused"] == REFUSED and '"a"' in told["what"]
        await is_heard(doors, first, 3)
    with another_process(doors) as next_one:  # the link was closed
        assert await answer_to(next_one) == "welcome"
    assert len(doors.tries()) == 1


async def test_an_agent_hears_that_it_is_refused(doors: Doors, tmp_path: Path) -> None:
    keys, port = await asyncio.to_thread(doors.enrol, "a"), doors.address[1]
    spec = NodeSpec(
        node="a",
        order=0,
        nproc=1,
        url=f"https://127.0.0.1:{port}",
        keys=str(keys.key.parent),
        log_dir="",
        entry=EntryPoint(argv=("t.py",)),
        settings=Settings(),
        run_id="r",
    )
    async with by_socket(doors) as first:
        await comes_in(first)
        async with ControllerDialer(spec).open_link() as link:
            await link.send_bytes(agent_messages.encode(HELLO))
            with pytest.raises(LinkRefusedError, match=REFUSED):
                await anext(aiter(link))


async def test_who_follows_a_dead_process_gets_its_link(doors: Doors) -> None:
    """It is killed and not even waited for: a new agent must not have to wait until pings go unanswered."""
    with another_process(doors) as first:
        assert await answer_to(first) == "welcome"
        os.kill(first.pid, signal.SIGSTOP)  # stopped is not dead
        async with by_socket(doors) as second:
            await is_refused(second)
        os.kill(first.pid, signal.SIGKILL)
        await doors.desk.until(lambda: own_process_settings.process_state(first.pid) == "Z", "its end")
        async with by_socket(doors) as third:
            await comes_in(third)
    assert len(doors.tries()) == 1


async def test_the_same_process_may_dial_again(doors: Doors) -> None:
    async with by_socket(doors) as first, by_socket(doors) as second:
        await comes_in(first)
        await comes_in(second)
        await is_heard(doors, second, 4)
    assert not doors.tries()


async def test_another_nodes_certificate_says_no_hello_in_its_name(doors: Doors) -> None:
    ours, theirs = [await asyncio.to_thread(doors.enrol, name) for name in ("a", "b")]
    async with by_tls(doors, ours) as first, by_tls(doors, theirs, source="127.0.0.2") as second:
        await comes_in(first)
        await is_refused(second, OTHERS)
        [told] = doors.tries()
        assert (told["who"], told["origin"], told["refused"]) == ("b", "127.0.0.2", OTHERS)
        assert '"a"' in told["what"]
        await is_heard(doors, first, 5)


async def test_a_certificate_from_elsewhere_waits_until_its_nodes_link_has_ended(doors: Doors) -> None:
    """A copy of the key: whoever has it is not told from the node, but for where it calls from."""
    keys = await asyncio.to_thread(doors.enrol, "a")
    async with by_tls(doors, keys) as first:
        await comes_in(first)
        async with by_tls(doors, keys, source="127.0.0.2") as second:
            await is_refused(second)
        [told] = doors.tries()
        assert (told["who"], told["origin"], told["refused"]) == ("a", "127.0.0.2", REFUSED)
        await is_heard(doors, first, 6)
        async with by_tls(doors, keys) as again:  # the node itself, whose older link nobody has closed
            await comes_in(again)
            await is_heard(doors, again, 7)
    async with by_tls(doors, keys, source="127.0.0.2") as moved:
        await comes_in(moved)
    assert len(doors.tries()) == 1


async def test_a_name_that_is_taken_is_not_enrolled_again(doors: Doors) -> None:
    await asyncio.to_thread(doors.enrol, "a")
    with pytest.raises(EnrolmentRefusedError, match="already has a node a"):
        await asyncio.to_thread(doors.enrol, "a")
    lines = [json.loads(line) for line in (doors.folder / "audit.log").read_text().splitlines()]
    assert [(line["who"], line["origin"], bool(line.get("refused"))) for line in lines] == [
        ("the job's secret", "127.0.0.1", False),
        ("the job's secret", "127.0.0.1", True),
    ]


async def test_neither_socket_nor_certificate_takes_a_link_of_the_other(doors: Doors) -> None:
    keys = enrol_local_node(doors.authority, "a", doors.folder / "keys" / "a")
    doors.desk.built.certificates.take_recorded(doors.authority.node_serials())
    async with by_socket(doors) as local:
        await comes_in(local)
        async with by_tls(doors, keys) as distant:
            await is_refused(distant)
        await is_heard(doors, local, 8)
    async with by_tls(doors, keys) as distant:
        await comes_in(distant)
        async with by_socket(doors) as local:
            await is_refused(local)
        await is_heard(doors, distant, 9)
    assert [told["origin"] for told in doors.tries()] == ["127.0.0.1", f"process {os.getpid()} of this host"]


async def test_people_are_told_once(desk_of: Open, tmp_path: Path) -> None:
    said: list[str] = []
    async with desk_of(job=WIDE, settings=PATIENT, say=said.append) as desk, Doors(tmp_path, desk).open() as doors:
        async with by_socket(doors) as first:
            await comes_in(first)
            pids = []
            for _ in range(2):
                pids.append(await is_refused_elsewhere(doors))
        assert desk.controller.view.phase is Phase.WAITING
    assert [line for line in said if "second" in line] == [
        f"refused a second a, at process {pids[0]} of this host: process {os.getpid()} of this host has its link"
    ]
    assert len(doors.tries()) == 2
