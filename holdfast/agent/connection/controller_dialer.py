"""Dials the controller through a private unix socket or TLS, and refuses an answer from anybody else."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from holdfast.core.agent_state_machine import PING_S
from holdfast.linux import peer_credentials
from holdfast.wire import agent_messages
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.run_and_node_specs import NodeSpec, RunSpec, read_json

_DIAL_S = 10.0  # for one try to reach the controller
# The same where the controller may move to another machine: then that one answers within seconds.
_TURN_S, _TURN_PING_S = 3.0, 4.0
_FILE_S = 2.0  # for a file system to say where the controller is


class UnprovenPeerError(OSError):
    """The process that answered has not proved that it is our controller."""


class BrokenLinkError(OSError):
    """The link to the controller cannot be opened, or has broken."""


class LinkRefusedError(OSError):
    """The controller has closed the link because it refuses this node."""


class WebSocketLink:
    """A WebSocket to the controller."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = await self._ws.receive()
        if message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.POLICY_VIOLATION:
            raise LinkRefusedError(f"the controller refuses this node: {message.extra}")
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise StopAsyncIteration
        packet: bytes = message.data
        return packet

    async def send_bytes(self, packet: bytes) -> None:
        try:
            await self._ws.send_bytes(packet)
        except aiohttp.ClientError as e:
            raise BrokenLinkError(str(e)) from e


class ControllerDialer:
    def __init__(self, node: NodeSpec) -> None:
        urls = [urlsplit(url) for url in node.url.split(",")]
        self._path = Path(unquote(urls[0].path)) if urls[0].scheme == "unix" else None
        self._folder = -1
        self._addresses = [(url.hostname or "", url.port or 0) for url in urls]  # the one to dial next is the first
        self._dial_s, self._ping_s = (_TURN_S, _TURN_PING_S) if node.moves else (_DIAL_S, PING_S)
        self._keys = KeyFiles.in_folder(Path(node.keys))
        self._run_id = node.run_id
        self._run_file = node.run_file

    @property
    def same_machine(self) -> bool:
        return self._path is not None

    def url_for(self, path: str) -> str:
        """Return the URL of a path on the controller, for a session of `open_session`."""
        if self._path is not None:
            return f"http://{mutual_tls.CONTROLLER}{path}"
        return f"https://{mutual_tls.CONTROLLER}:{self._addresses[0][1]}{path}"

    def open_session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        """Open an HTTP session to the controller; raise UnprovenPeerError if its socket's folder is not private."""
        if self._path is not None:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(self._through_folder(self._path))
        else:
            context = mutual_tls.client_tls(self._keys, controller=True)
            resolver = _FixedHostResolver(self._addresses[0][0])
            connector = aiohttp.TCPConnector(ssl=context, resolver=resolver, use_dns_cache=False)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)

    def _through_folder(self, path: Path) -> str:
        """Return a short path to the socket by way of its folder's fd; raise if other users may write to the folder."""
        if self._folder < 0:
            self._folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        seen = os.fstat(self._folder)
        if seen.st_uid != os.getuid() or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnprovenPeerError(f"other users may write to {path.parent}: what answers there cannot be trusted")
        return f"/proc/self/fd/{self._folder}/{path.name}"

    @contextlib.asynccontextmanager
    async def open_link(self) -> AsyncIterator[WebSocketLink]:
        """Open a WebSocket to the next known address of the controller, after a look whether the controller has moved.
        Raises UnprovenPeerError if another process answers. Raises BrokenLinkError or another OSError if the link
        cannot be opened or breaks."""
        await self._find_moved()
        url = self.url_for("/agent")
        try:
            async with (
                self.open_session(aiohttp.ClientTimeout(total=self._dial_s)) as session,
                session.ws_connect(url, max_msg_size=agent_messages.MAX_BYTES, heartbeat=self._ping_s) as ws,
            ):
                self._verify_peer(ws)
                yield WebSocketLink(ws)
        except aiohttp.ClientError as e:
            raise BrokenLinkError(str(e)) from e
        finally:
            self._addresses.append(self._addresses.pop(0))

    async def _find_moved(self) -> None:
        """Read the controller's present address from the run file, if there is one. Keep the known address if the file
        cannot be read in time. A process at a new address has to prove, as usual, that it is the controller."""
        if self._run_file:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                async with asyncio.timeout(_FILE_S):
                    run = await asyncio.to_thread(read_json, Path(self._run_file), RunSpec)
                self._addresses = [(run.host, run.port)]

    def _verify_peer(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        """Raise UnprovenPeerError unless this run's controller has answered. With TLS, its key is already verified."""
        if self._path is None:
            run = mutual_tls.certificate_run(ws.get_extra_info("peercert"))
            if run and self._run_id and run != self._run_id:
                raise UnprovenPeerError(f"the controller's certificate is for run {run}, not for run {self._run_id}")
            return
        sock: socket.socket = ws.get_extra_info("socket")
        if peer_credentials.read_peer(sock).user != os.getuid():
            raise UnprovenPeerError(f"the process that listens at {self._path} belongs to another user")


class _FixedHostResolver(AbstractResolver):
    """Resolves the controller's name to the host that this node was told to dial."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(self._host, port, family)
        return [{**one, "hostname": host} for one in found]

    async def close(self) -> None:
        await self._resolver.close()
