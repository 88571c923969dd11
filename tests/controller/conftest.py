"""A controller in this process, with a fake fleet and a fake store, and agents that are played by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import (
    ANY_NODE,
    Admit,
    Caller,
    PortAccess,
    Refusal,
    Right,
    make_user_token,
)
from holdfast.controller.access.enrolment_token_api import TokenMinting
from holdfast.controller.api import ApiEntrance, make_api
from holdfast.controller.composition import BuiltController, build_controller
from holdfast.controller.control_loop import Controller
from holdfast.controller.job_clock import SteadyClock
from holdfast.controller_interfaces import ControllerPorts
from holdfast.core.agent_state_machine import Post
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Ended, Order
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import Dims, Job
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import Done, Errand
from holdfast.model.observation import Beat
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Ack, ErrandMessage, Hello, Welcome
from tests.controller.fakes import FakeFleet, FakeStore, MemoryBlockList, MemoryNotes

TOKEN = "secret"
HEADERS = {agent_messages.TOKEN_HEADER: TOKEN}
JOB = Job(run_id="r", min_nodes=1, max_nodes=1, can_acquire=False)


class Agent:
    """One end of a link, played by hand."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, node: str) -> None:
        self.ws = ws
        self.node = node
        self.epoch = 0  # of the newest packet that was heard
        self._seq = 0

    async def hello(self, *, generation: int = 0, ready: bool = True, nproc: int = 1) -> None:
        hello = Hello(node=self.node, host="h", nproc=nproc, order=0, generation=generation, ready=ready)
        await self.ws.send_bytes(agent_messages.encode(hello))

    async def beat(self, step: int, generation: int = 1, mesh: Dims = ()) -> None:
        beat = Beat(
            node=self.node,
            generation=generation,
            step=step,
            at=1.0,
            first_step=1,
            first_at=1.0,
            counted=False,
            mesh=mesh,
        )
        await self.ws.send_bytes(agent_messages.encode(beat))

    async def post(self, body: Alarm | Ended | Done) -> None:
        self._seq += 1
        await self.ws.send_bytes(agent_messages.encode(Post(seq=self._seq, body=body)))

    async def hear(self) -> Welcome | Ack | ErrandMessage:
        packet = agent_messages.decode_from_controller(await self.ws.receive_bytes(timeout=10))
        self.epoch = packet.epoch
        heard: Welcome | Ack | ErrandMessage = packet.message  # type: ignore[assignment]
        return heard

    async def errand(self) -> Errand:
        """The next errand; whatever else comes before it is let pass."""
        while not isinstance(heard := await self.hear(), ErrandMessage):
            pass
        return heard.errand

    async def answer(self, errand: Errand) -> None:
        await self.post(Done(id=errand.id, node=self.node, ok=True))


class Desk:
    """A controller that runs, and a client of its port."""

    def __init__(self, built: BuiltController, client: TestClient) -> None:  # type: ignore[type-arg]
        self.built = built
        self.controller = built.controller
        self.client = client

    async def link(self, node: str) -> Agent:
        return Agent(await self.client.ws_connect("/agent", headers=HEADERS), node)

    async def until(self, look: Callable[[], object], what: str) -> None:
        for _ in range(1000):
            if look():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"waited in vain: {what}")

    async def phase(self, phase: Phase) -> None:
        await self.until(lambda: self.controller.view.phase is phase, phase)

    async def train(self, node: str = "a", nproc: int = 1) -> Agent:
        """Bring the job of a single node to its first step."""
        agent = await self.link(node)
        await agent.hello(nproc=nproc)
        await agent.answer(await agent.errand())
        await agent.beat(1)
        await self.phase(Phase.TRAINING)
        return agent

    def events(self) -> list[object]:
        self.controller.journal.flush()
        return [entry.event for entry in self.controller.journal.read()]


RELEASE = Release(number=1)


def make_ports(folder: Path, **others: Any) -> ControllerPorts:
    """Ports whose files are in a folder, and whose news nobody hears; `others` take the place of some."""
    ports: dict[str, Any] = {
        "fleet": FakeFleet(),
        "store": FakeStore(),
        "notes": MemoryNotes(),
        "checkpoints": None,
        "archives": folder,
        "blocked": MemoryBlockList(),
        "probe_history": None,
        "make_clock": SteadyClock,
        "say": lambda text: None,
        "on_entry": lambda entry, view: None,
        "on_replayed": lambda entry, view: None,
    } | others
    return ControllerPorts(journal=ports.pop("journal", None) or SqliteJournal(folder / "journal.db"), **ports)


def make(folder: Path, settings: Settings, fleet: FakeFleet, **others: Any) -> BuiltController:
    return build_controller(settings, make_ports(folder, fleet=fleet, **others))


def admit(request: web.Request) -> Caller | Refusal:
    """People by the port's own rules; the token opens the place of agents too, who have other doors of their own."""
    caller = PortAccess(lambda: (make_user_token("Ada", Right.ADMIN, TOKEN),), "controller.test")(request)
    return caller if isinstance(caller, Refusal) else msgspec.structs.replace(caller, node=ANY_NODE)


Open = Callable[..., contextlib.AbstractAsyncContextManager[Desk]]


@pytest.fixture
def desk_of(tmp_path: Path) -> Open:
    @contextlib.asynccontextmanager
    async def open_desk(
        job: Job = JOB,
        settings: Settings | None = None,
        port: Admit = admit,
        minting: TokenMinting | None = None,
        **ports: Any,
    ) -> AsyncIterator[Desk]:
        built = make(tmp_path, settings or Settings(), FakeFleet(can_acquire=job.can_acquire), **ports)
        door = ApiEntrance(port, AuditLog(tmp_path), minting=minting)
        async with TestClient(TestServer(make_api(built, door))) as client:
            running = asyncio.create_task(built.controller.run(job, RELEASE))
            await asyncio.sleep(0)
            yield Desk(built, client)
            await _end(built.controller, running)

    return open_desk


async def _end(controller: Controller, running: "asyncio.Task[int]") -> None:
    if not running.done():
        controller.process_event(Order(verb="stop", who="the test", now=True))
        controller.end_at_once()
    async with asyncio.timeout(120):
        await _quietly(running)


async def _quietly(task: "asyncio.Task[int]") -> None:
    with contextlib.suppress(BaseExceptionGroup):  # a test that breaks the controller looks at it itself
        await task
