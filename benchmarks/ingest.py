"""How many agents one controller hears: simulated agents, a beat a second each, against a real controller on one core.

The controller runs in a process bound to one core: its decider, journal, ingest and HTTP server are the real ones;
only the fleet and the store are left out. The agents are 2,000 WebSocket links of another process, on the other core.
All join one job, are launched, and beat with a growing step; halfway one of them reports a crash, and all are
stopped and launched again.
"""

import asyncio
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.cli.launch.journal_and_notes import NotesFolder
from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.block_list_file import BlockListFile, BlockListThreads
from holdfast.controller.access.caller_admission import ANY_NODE, Caller, Right
from holdfast.controller.api import ApiEntrance, make_api
from holdfast.controller.composition import build_controller
from holdfast.controller.job_clock import SteadyClock
from holdfast.controller_interfaces import ControllerPorts, EntryListener
from holdfast.core.agent_state_machine import Post
from holdfast.core.decide.job_view import JobView
from holdfast.fleet.self_joining_fleet import JoinFleet
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Order
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.node_errands import Done
from holdfast.model.observation import Beat
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import ErrandMessage, Hello

AGENTS = 2000
BEATING_S = 60.0 if FULL else 20.0
GOAL_LAG_S = 0.100
SAMPLE_S = 0.005


class NoStore:
    host = "127.0.0.1"

    async def open(self, generation: int) -> int:
        return 1

    async def quit(self) -> None:
        return None


def make_ports(folder: Path, on_entry: EntryListener) -> ControllerPorts:
    """The real journal, notes and clock; no machines, no store, and nobody who reads the console."""
    return ControllerPorts(
        journal=SqliteJournal(folder / "journal.db"),
        fleet=JoinFleet(),
        store=NoStore(),
        notes=NotesFolder(folder),
        blocked=BlockListThreads(BlockListFile(folder / "blocked.json"), ""),
        checkpoints=None,
        archives=folder,
        probe_history=None,
        make_clock=SteadyClock,
        say=lambda text: None,
        on_entry=on_entry,
        on_replayed=lambda entry, view: None,
    )


class Measured(msgspec.Struct):
    lags_s: list[float]
    cpu_s: float
    wall_s: float
    generation: int
    incidents: int
    step: int


async def _control(listener: socket.socket, out: Connection, folder: Path) -> None:
    training = asyncio.Event()

    def heard(entry: Entry, _: JobView) -> None:
        if entry.decision.phase is Phase.TRAINING:
            training.set()

    built = build_controller(Settings(), make_ports(folder, heard))
    controller = built.controller
    everybody = Caller(name="bench", right=Right.ADMIN, node=ANY_NODE)
    runner = web.AppRunner(make_api(built, ApiEntrance(lambda request: everybody, AuditLog(folder))), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    job = Job(run_id="bench", min_nodes=AGENTS, max_nodes=AGENTS, can_acquire=False)
    lags: list[float] = []

    async def sample() -> None:
        await training.wait()
        started_s, started_at = time.process_time(), time.monotonic()
        while time.monotonic() < started_at + BEATING_S:
            before = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            lags.append(time.monotonic() - before - SAMPLE_S)
        spent_s, wall_s = time.process_time() - started_s, time.monotonic() - started_at
        account = controller.ledger.make_account(controller.clock())
        measured = Measured(lags, spent_s, wall_s, controller.view.generation, len(account.incidents), account.step)
        out.send_bytes(msgspec.json.encode(measured))
        controller.process_event(Order(verb="stop", who="the benchmark", now=True))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sample())
        tasks.create_task(controller.run(job, Release(number=1)))


def _controller(listener: socket.socket, out: Connection, folder: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asyncio.run(_control(listener, out, Path(folder)))


class Agents:
    """Two thousand agents' worth of talk."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.launched_at = 0.0
        self.crash_at = float("inf")

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
            for number in range(AGENTS):
                tasks.create_task(self._agent(session, number))
                if number % 50 == 49:
                    await asyncio.sleep(0.02)

    async def _agent(self, session: aiohttp.ClientSession, number: int) -> None:
        node = f"n{number}"
        async with session.ws_connect(f"{self.url}/agent") as ws:
            hello = Hello(node=node, host="h", nproc=8, order=number, generation=0, ready=True)
            await ws.send_bytes(agent_messages.encode(hello))
            state = {"generation": 0}
            beating = asyncio.create_task(self._beat(ws, node, number, state))
            async for message in ws:
                told = agent_messages.decode_from_controller(message.data).message
                if isinstance(told, ErrandMessage):
                    state["generation"] = getattr(told.errand, "generation", state["generation"])
                    done = Post(seq=told.errand.id, body=Done(id=told.errand.id, node=node, ok=True))
                    await ws.send_bytes(agent_messages.encode(done))
            beating.cancel()

    async def _beat(self, ws: aiohttp.ClientWebSocketResponse, node: str, number: int, state: dict[str, int]) -> None:
        await asyncio.sleep(number / AGENTS)
        step = 0
        while not ws.closed:
            now = time.time()
            generation = state["generation"]
            step = step + 1 if generation else 0
            if generation and not self.launched_at:
                self.launched_at = now
                self.crash_at = now + BEATING_S / 2
            if number == 7 and now > self.crash_at:
                self.crash_at = float("inf")
                reason = "was killed by SIGKILL"
                crash = Alarm(kind=Kind.CRASH, at=now, suspects=(node,), generation=generation, reason=reason)
                await ws.send_bytes(agent_messages.encode(Post(seq=1, body=crash)))
            beat = Beat(node=node, generation=generation, step=step or -1, at=now, first_at=now)
            await ws.send_bytes(agent_messages.encode(beat))
            await asyncio.sleep(1.0)


def _agents(url: str) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    asyncio.run(Agents(url).run())


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    spawn = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    out, into = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        controller = spawn.Process(target=_controller, args=(listener, into, folder), daemon=True)
        agents = spawn.Process(target=_agents, args=(f"http://127.0.0.1:{listener.getsockname()[1]}",), daemon=True)
        controller.start()
        agents.start()
        into.close()
        if not out.poll(180.0):
            raise SystemExit("the agents never all made a step")
        measured = msgspec.json.decode(out.recv_bytes(), type=Measured)
        agents.terminate()
        controller.join(30.0)
    _tell(measured)


def _tell(measured: Measured) -> None:
    lags = sorted(measured.lags_s)
    p50, p99 = statistics.median(lags), lags[int(0.99 * len(lags))]
    table = Table(title=f"{AGENTS} agents, one beat a second each, controller on one core, {measured.wall_s:.0f} s")
    for column in ("loop lag p50", "p99", "max", "core busy", "incidents healed"):
        table.add_column(column, justify="right")
    busy = measured.cpu_s / measured.wall_s
    row = (f"{1e3 * p50:.1f} ms", f"{1e3 * p99:.1f} ms", f"{1e3 * lags[-1]:.1f} ms", f"{100 * busy:.0f} %")
    table.add_row(*row, str(measured.incidents))
    figures = {"lag_p50_ms": 1e3 * p50, "lag_p99_ms": 1e3 * p99, "lag_max_ms": 1e3 * lags[-1], "busy": busy}
    goals = {"ingest_p99_lag_under_100_ms": p99 < GOAL_LAG_S, "incident_healed": measured.incidents == 1}
    report("ingest", table, Findings(figures={k: round(v, 3) for k, v in figures.items()}, goals=goals))


if __name__ == "__main__":
    main()
