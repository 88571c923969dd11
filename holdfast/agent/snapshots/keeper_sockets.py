"""The sockets of a keeper: ranks ask it over one, and keepers of other nodes push and pull state over another."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.agent.snapshots.keeper_note_folder import KeeperNoteFolder
from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_server import PeerServer, PeerShelf
from holdfast.checkpoint.peer_transport import PeerKeeper, PeerRequest
from holdfast.decoding import from_json
from holdfast.model.state_copy import Address
from holdfast.wire import rank_keeper_messages, unix_sockets
from holdfast.wire.credentials.admitted_peers import AdmittedPeers, certificate_id, split_ids
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.rank_keeper_messages import AnswerRank

_BACKLOG = 256
_LINKS = "links-"
_PEERS = "peers.json"
_log = logging.getLogger("holdfast.keeper")


class KeeperSockets:
    def __init__(self, socket_path: Path, run_id: str, keys: KeyFiles | None, host: str) -> None:
        """`keys` let keepers verify each other; None if all run on this host. `host` is this keeper's address."""
        self._notes = KeeperNoteFolder(socket_path.parent)
        self._members = self._leaving = frozenset[bytes]()  # nobody, until the controller or a note tells
        self._admitted: AdmittedPeers | None = None  # as the note says
        if keys:
            self._recall_peers()
        self._socket_path = socket_path
        self._host = host
        self._guard = PeerAdmission(keys, self._is_peer, run_id, self._is_leaving) if keys else None
        # Of this life alone: who has sent us something before is to notice that we are new.
        self._links_path = socket_path.with_name(f"{_LINKS}{secrets.token_hex(4)}.sock")
        self._listener: socket.socket | None = None

    def admit_peers(self, peers: AdmittedPeers) -> None:
        self._members, self._leaving = split_ids(peers.members), split_ids(peers.leaving)
        if peers == self._admitted:
            return
        try:
            self._notes.write_note(_PEERS, msgspec.json.encode(peers))
            self._admitted = peers
        except OSError as e:
            _log.warning("cannot note whose certificates count, so the next agent may go by an old list: %s", e)

    def _recall_peers(self) -> None:
        """Accept those whom an earlier agent was told of; if that is not known, nobody until the controller tells."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._admitted = from_json(self._notes.read_note(_PEERS), AdmittedPeers)
            self.admit_peers(self._admitted)

    def _is_peer(self, node: str, serial: str) -> bool:
        shown = certificate_id(node, serial)
        return shown in self._members or shown in self._leaving

    def _is_leaving(self, node: str, serial: str) -> bool:
        return certificate_id(node, serial) in self._leaving

    @property
    def address(self) -> Address:
        """Where other keepers reach this keeper: host and port, or socket path and 0. Until it listens, ("", 0)."""
        if self._listener is None:
            return ("", 0)
        return (self._host, self._listener.getsockname()[1]) if self._guard else (str(self._links_path), 0)

    async def serve(self, answer_rank: AnswerRank, shelf: PeerShelf) -> None:
        if self._guard:
            self._listener = socket.create_server((self._host, 0), backlog=_BACKLOG)
        else:
            for old in self._socket_path.parent.glob(f"{_LINKS}*"):
                old.unlink(missing_ok=True)
            self._listener = unix_sockets.listen(self._links_path, backlog=_BACKLOG)
        PeerServer(self._listener, self._guard, shelf.receive_push, shelf.serve_pull).start()
        serve_rank = partial(_serve_rank, answer_rank)
        listener = unix_sockets.listen(self._socket_path)
        server = await asyncio.start_unix_server(serve_rank, sock=listener, limit=rank_keeper_messages.MAX_BYTES)
        try:
            async with server:
                await server.serve_forever()
        finally:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
            self._listener.close()

    def push_state(self, to: Address, ask: PeerRequest, views: Sequence[memoryview], pacer: BytePacer) -> int:
        return peer_transport.push_state(PeerKeeper(to, self._guard), ask, views, pacer)

    def pull_state(self, at: Address, ask: PeerRequest, views: Sequence[memoryview]) -> int:
        return peer_transport.pull_state(PeerKeeper(at, self._guard), ask, views)

    def fetch_content(self, at: Address, ask: PeerRequest) -> bytes:
        return peer_transport.fetch_content(PeerKeeper(at, self._guard), ask)


async def _serve_rank(answer_rank: AnswerRank, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while line := await reader.readline():
            writer.write(rank_keeper_messages.encode(await answer_rank(line)) + b"\n")
            await writer.drain()
    except (OSError, ValueError) as e:
        _log.info("the connection of a rank broke: %s", e)
    finally:
        writer.close()
