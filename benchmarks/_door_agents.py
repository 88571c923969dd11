"""Two thousand agents that find a restarted controller again, by its unix socket or by TLS with certificates.

The controller is a real one in a process of its own; only the fleet and the store are left out. It is killed while the
job trains, and another one takes its place with the same journal and the same listener. Agents are light: each has one
link and speaks WebSocket by hand, beats once a second, and dials again as agent/agent_shell.py does.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import resource
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from benchmarks.ingest import make_ports
from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import PortAccess, admit_by_socket
from holdfast.controller.access.connection_gate import ConnectionGate
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.controller.api import ApiEntrance, make_api
from holdfast.controller.composition import build_controller
from holdfast.core.agent_state_machine import Post
from holdfast.core.decide.job_view import JobView
from holdfast.linux import own_process_settings
from holdfast.model.code_release import Release
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.node_errands import Done
from holdfast.model.observation import Beat
from holdfast.wire import agent_messages, unix_sockets
from holdfast.wire.agent_messages import ErrandMessage, Hello, Welcome
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles

AGENTS = int(os.environ.get("BENCH_AGENTS", "2000"))
_PROCESSES = 2
_JOINING_S = 8.0  # over which they come the first time, which is not what is measured
_JOIN_LIMIT_S = 180.0  # for everybody to be there the first time, on a busy machine as well
_LIMIT_S = 60.0  # and again
_QUIET_S = 8.0  # after the last came: who was forgotten would be silent for too long by then
_DIAL_S = 10.0  # as agent/connection/controller_dialer.py
_REDIAL_S, _SLOWEST_S = 0.05, 1.0  # as agent/agent_shell.py
_BINARY, _PING, _PONG = 2, 9, 10


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """How agents call their controller."""

    door: str  # path of the unix socket
    port: int = 0  # of TLS; 0: by the unix socket
    keys: str = ""  # folder of folders, one for each node
    one_host: bool = False  # all from one address, instead of one address each


class Back(NamedTuple):
    """How the agents came back."""

    joined_s: float  # the first time: from the controller's start to the last welcome
    back_s: float  # from the kill to the last welcome
    listening_s: float  # of that until the new controller listened
    half_s: float  # from the kill until half of them were welcome
    dials: int  # after the kill
    gone: int  # nodes of the job that it has no more
    incidents: int
    controller_cpu_s: float  # from the new controller's start to the last welcome, all of its start included
    controller_mb: float  # its memory afterwards
    agent_cpu_ms: float  # the controller's, for each: handshake, hello, welcome, and beats until all are there


class LateError(Exception):
    """Agents that are not all there in time."""


class Told(NamedTuple):
    """What one process of agents tells when all of its agents have been welcomed so many times."""

    welcomes: list[float]  # when each was
    dials: int


# --- the controller --------------------------------------------------------------------------------------------


async def _control(listener: socket.socket, listed: bool, out: Connection, folder: Path) -> None:
    """Without `listed` no list of certificates is made or sent, and each that the job's authority has signed counts."""
    training = asyncio.Event()

    def heard(entry: Entry, _: JobView) -> None:
        if entry.decision.phase is Phase.TRAINING and not training.is_set():
            training.set()
            out.send("training")

    built = build_controller(Settings(), make_ports(folder, heard))
    controller = built.controller
    door = web.AppRunner(make_api(built, ApiEntrance(admit_by_socket, AuditLog(folder))), access_log=None)
    await door.setup()
    await web.SockSite(door, unix_sockets.listen(folder / "door", backlog=4096)).start()
    authority = CertificateAuthority(folder / "authority")
    porch = ConnectionGate(lambda: port.server(), mutual_tls.server_tls(authority.keys, strangers=True))  # type: ignore[misc]
    audit = AuditLog(folder)
    anybodys = NodeCertificates(controller.view, lambda _: False, lambda _: None)
    enrolling = NodeEnrolment(
        authority,
        "token",
        "bench",
        audit=audit,
        tokens=NodeTokens(folder / "authority", lambda: None),
        certificates=built.certificates if listed else anybodys,
        admission=built.ingest.admission,
        announce=controller.process_event,
    )
    refusal = enrolling.certificate_refusal if listed else lambda shown: ""
    at_port = ApiEntrance(PortAccess(lambda: (), "127.0.0.1", refusal), audit, enrolling, porch.note_proved)
    port = web.AppRunner(make_api(built, at_port))
    await port.setup()

    async def answer() -> None:
        """Whatever is asked: how it stands."""
        while True:
            await asyncio.to_thread(out.recv)
            account = controller.ledger.make_account(controller.clock())
            view = controller.view
            incidents = len(account.incidents) + bool(view.open_incident)  # one may not be over yet
            gone = AGENTS - len({seat.node for seat in view.seats} - view.gone.keys())
            out.send((gone, incidents, time.process_time(), _resident_mb()))

    job = Job(run_id="bench", min_nodes=AGENTS, max_nodes=AGENTS, can_acquire=False)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(porch.run(listener))
        tasks.create_task(answer())
        tasks.create_task(
            controller.run(job, Release(number=1), lambda: out.send((time.monotonic(), time.process_time())))
        )


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def _controller(listener: socket.socket, listed: bool, out: Connection, folder: Path) -> None:
    own_process_settings.die_with(os.getppid())
    logging.basicConfig(level=logging.ERROR)
    own_process_settings.raise_file_limit()
    asyncio.run(_control(listener, listed, out, folder))


# --- the agents ------------------------------------------------------------------------------------------------


class Agents:
    """Some of the agents, all in this process."""

    def __init__(self, where: Where, numbers: range, out: Connection) -> None:
        self._where, self._numbers, self._out = where, numbers, out
        self._welcomes: dict[int, list[float]] = {number: [] for number in numbers}
        self._dials = 0
        self._rounds = 0  # that all have been welcomed

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in self._numbers:
                tasks.create_task(_Agent(self, number).run())

    def proof(self, number: int) -> ssl.SSLContext | None:
        """Made once: a real agent has a processor of its own to read its keys at every dial."""
        if not self._where.port:
            return None
        return mutual_tls.client_tls(KeyFiles.in_folder(Path(self._where.keys) / f"n{number}"), controller=True)

    async def dial(self, number: int, proof: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, Any]:
        self._dials += 1
        if proof is None:
            return await asyncio.open_unix_connection(self._where.door)
        here = "127.0.0.1" if self._where.one_host else f"127.1.{number // 250}.{1 + number % 250}"
        return await asyncio.open_connection(
            "127.0.0.1", self._where.port, ssl=proof, server_hostname=mutual_tls.CONTROLLER, local_addr=(here, 0)
        )

    def welcomed(self, number: int) -> None:
        self._welcomes[number].append(time.monotonic())
        if all(len(each) > self._rounds for each in self._welcomes.values()):
            self._out.send(Told([each[self._rounds] for each in self._welcomes.values()], self._dials))
            self._rounds += 1


class _Agent:
    def __init__(self, all: Agents, number: int) -> None:
        self._all, self._number = all, number
        self._node = f"n{number}"
        self._generation = self._step = 0
        self._proof = all.proof(number)

    async def run(self) -> None:
        await asyncio.sleep(_JOINING_S * self._number / AGENTS)
        wait_s = _REDIAL_S
        while True:
            wait_s = _REDIAL_S if await self._dial() else min(2 * wait_s, _SLOWEST_S)
            await asyncio.sleep(wait_s)

    async def _dial(self) -> bool:
        """One link, from its beginning to its end; whether there was any."""
        writer: asyncio.StreamWriter | None = None
        linked = False
        with contextlib.suppress(OSError, TimeoutError, EOFError, ssl.SSLError):
            async with asyncio.timeout(_DIAL_S):
                reader, writer = await self._all.dial(self._number, self._proof)
                await _upgrade(reader, writer)
            linked = True
            await self._converse(reader, writer)
        if writer is not None:
            writer.transport.abort()
        return linked

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = Hello(node=self._node, host="h", nproc=8, order=self._number, generation=self._generation, ready=True)
        _say(writer, agent_messages.encode(hello))
        beating = asyncio.create_task(self._beat(writer))
        try:
            while True:
                kind, payload = await _frame(reader)
                if kind == _PING:
                    _say(writer, payload, _PONG)
                elif kind == _BINARY:
                    self._heard(writer, agent_messages.decode_from_controller(payload).message)
                else:
                    return
        finally:
            beating.cancel()

    def _heard(self, writer: asyncio.StreamWriter, told: agent_messages.FromController) -> None:
        match told:
            case Welcome():
                self._all.welcomed(self._number)
            case ErrandMessage(errand=errand):
                self._generation = getattr(errand, "generation", self._generation)
                done = Post(seq=errand.id, body=Done(id=errand.id, node=self._node, ok=True))
                _say(writer, agent_messages.encode(done))

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._number / AGENTS)
        while not writer.is_closing():
            now = time.time()
            self._step = self._step + 1 if self._generation else 0
            beat = Beat(node=self._node, generation=self._generation, step=self._step or -1, at=now, first_at=now)
            _say(writer, agent_messages.encode(beat))
            await asyncio.sleep(1.0)


async def _upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    lines = (
        "GET /agent HTTP/1.1",
        f"Host: {mutual_tls.CONTROLLER}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    )
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 101 " not in answer[:20]:
        raise ConnectionError(answer[:100])


def _say(writer: asyncio.StreamWriter, payload: bytes, kind: int = _BINARY) -> None:
    """One frame, masked by zeros."""
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", 0x80 | kind, 0x80 | size)
    else:
        head = struct.pack("!BBH", 0x80 | kind, 0x80 | 126, size)
    writer.write(head + bytes(4) + payload)


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, size = await reader.readexactly(2)
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack("!Q", await reader.readexactly(8))
    return first & 0xF, await reader.readexactly(size)


def _agents(where: Where, numbers: range, out: Connection) -> None:
    own_process_settings.die_with(os.getppid())
    own_process_settings.raise_file_limit()
    asyncio.run(Agents(where, numbers, out).run())


# --- the scene -------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> float:
    """One for every node; the seconds that it takes."""
    began = time.monotonic()
    authority = CertificateAuthority(folder / "authority")
    for number in range(AGENTS):
        enrol_local_node(authority, f"n{number}", folder / "nodes" / f"n{number}")
    return time.monotonic() - began


def restart(folder: Path, tls: bool, one_host: bool = False, listed: bool = True) -> Back:
    """Kill the controller of a job that trains, and start another; `folder` has the certificates, which are listed."""
    for left in folder.glob("journal.db*"):
        left.unlink()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=4096)) as listener:
        port = listener.getsockname()[1] if tls else 0
        where = Where(door=str(folder / "door"), port=port, keys=str(folder / "nodes"), one_host=one_host)
        began_at = time.monotonic()
        with contextlib.ExitStack() as stack:
            first, first_out = stack.enter_context(_started(_controller, listener, listed, folder=folder))
            _hear(first_out, _JOIN_LIMIT_S)
            talks = []
            for part in range(_PROCESSES):
                numbers = range(part * AGENTS // _PROCESSES, (part + 1) * AGENTS // _PROCESSES)
                talks.append(stack.enter_context(_started(_agents, where, numbers))[1])
            joined = [_hear(talk, _JOIN_LIMIT_S) for talk in talks]
            if _hear(first_out, _JOIN_LIMIT_S) != "training":
                raise LateError("the job never trained")
            killed_at = time.monotonic()
            first.kill()
            _, out = stack.enter_context(_started(_controller, listener, listed, folder=folder))
            return _back(out, talks, (began_at, killed_at), joined)


def _back(out: Connection, talks: list[Connection], since: tuple[float, float], joined: list[Told]) -> Back:
    began_at, killed_at = since
    listening_at, begun_cpu_s = _hear(out)
    back = [_hear(talk) for talk in talks]
    cpu_s = _asked(out)[2]
    welcomes = sorted(at for told in back for at in told.welcomes)
    time.sleep(_QUIET_S)
    gone, incidents, _, resident_mb = _asked(out)
    return Back(
        joined_s=max(at for told in joined for at in told.welcomes) - began_at,
        back_s=welcomes[-1] - killed_at,
        listening_s=listening_at - killed_at,
        half_s=welcomes[len(welcomes) // 2] - killed_at,
        dials=sum(told.dials for told in back) - sum(told.dials for told in joined),
        gone=gone,
        incidents=incidents,
        controller_cpu_s=cpu_s,
        controller_mb=resident_mb,
        agent_cpu_ms=1000 * (cpu_s - begun_cpu_s) / AGENTS,
    )


def _asked(out: Connection) -> tuple[int, int, float, float]:
    out.send(None)
    while not isinstance(told := _hear(out), tuple):
        pass  # that it trains
    return told


def _hear(out: Connection, limit_s: float = _LIMIT_S) -> Any:
    if not out.poll(limit_s):
        when = "the first time" if limit_s == _JOIN_LIMIT_S else "after the restart"
        raise LateError(f"not all agents were welcome {when} within {limit_s:g} s")
    return out.recv()


@contextlib.contextmanager
def _started(target: Any, *args: object, folder: Path | None = None) -> Iterator[tuple[Any, Connection]]:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    given = (*args, theirs) if folder is None else (*args, theirs, folder)
    process = spawn.Process(target=target, args=given, daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, mine
    finally:
        process.kill()
        process.join()
