"""The connection from a rank to the keeper of its node."""

import os
import socket
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.wire import rank_keeper_messages, replay_environment, unix_sockets
from holdfast.wire.progress_environment import GENERATION, KEEPER

_AGAIN_S = 0.2
_LOST_S = 60.0  # an agent that died is back by then
_ROOM_S = 5.0  # between two tries to write to a full disk


def current_generation() -> int:
    """Return the generation of this launch; 0 without an agent."""
    return int(os.environ.get(GENERATION, "0"))


def make_want(
    layout: ImageLayout, slots: int, metadata_path: str, storage: rank_keeper_messages.CheckpointPolicy | None
) -> rank_keeper_messages.ArenaRequest:
    """Build the arena request for snapshots of this layout."""
    return rank_keeper_messages.ArenaRequest(
        rank=layout.rank,
        world=layout.world,
        generation=current_generation(),
        layout=layout.digest.hex(),
        image_bytes=layout.image_bytes,
        slots=slots,
        share=tuple((part.start, part.end) for part in layout.owned_ranges()),
        metadata_path=metadata_path,
        storage=storage,
    )


class KeeperError(Exception):
    """Says in one sentence why the keeper did not do what was asked."""


class StateFetchError(KeeperError):
    """Says why the keeper could not fetch a state from nodes that hold it. The failure catalog has the class's name."""


class KeeperClient:
    """Sends one request at a time to the keeper, and repeats it if the agent is replaced meanwhile."""

    def __init__(self, path: str, lost_s: float = _LOST_S) -> None:
        self.path = Path(path)
        self._lost_s = lost_s
        self._unwritten: dict[str, bytes] = {}  # files for the keeper, by name
        self._tried_at, self._problem = -_ROOM_S, ""  # the newest try to write them

    @classmethod
    def for_this_rank(cls) -> "KeeperClient | None":
        """Return a client of this node's keeper; None without an agent, and None in a replay, which saves nothing."""
        path = os.environ.get(KEEPER)
        return cls(path) if path and not replay_environment.is_replay() else None

    def request_arena(self, want: rank_keeper_messages.ArenaRequest, layout: ImageLayout) -> str:
        """Ask the keeper for an arena; return its path. First write the layout to a file, for other nodes' keepers."""
        self.put_file(rank_keeper_messages.layout_file_name(want.rank, want.layout), msgspec.msgpack.encode(layout))
        match self._send_request(want):
            case rank_keeper_messages.ArenaGrant(path=path):
                return path
            case answer:
                raise KeeperError(f"the keeper answered a request for memory with {answer}")

    def request_state(self, resume: rank_keeper_messages.StateRequest) -> rank_keeper_messages.StateGrant:
        """Return where the state to resume from lies; blocks until it is available."""
        match self._send_request(resume):
            case rank_keeper_messages.StateGrant() as state:
                return state
            case answer:
                raise KeeperError(f"the keeper answered a request for state with {answer}")

    def _send_request(self, message: rank_keeper_messages.ToKeeper) -> rank_keeper_messages.FromKeeper:
        line = rank_keeper_messages.encode(message) + b"\n"
        until = time.monotonic() + self._lost_s
        while True:
            try:
                with unix_sockets.connect(self.path) as peer:
                    answer = _exchange_line(peer, line)
            except OSError as e:
                if time.monotonic() > until:
                    raise KeeperError(f"the keeper at {self.path} does not answer: {e}") from None
            else:
                if answer:
                    return _parse_answer(answer)
                until = time.monotonic() + self._lost_s  # it was there, and hung up
            time.sleep(_AGAIN_S)

    def put_file(self, name: str, content: bytes) -> str:
        """Write a file into the keeper's folder atomically; return its path. If the disk is full, write it later."""
        self._unwritten[name], self._tried_at = content, -_ROOM_S
        self.write_files()
        return str(self.path.parent / name)

    def remove_file(self, name: str) -> None:
        """Remove a file that `put_file` has written, or was to write later."""
        self._unwritten.pop(name, None)
        with suppress(OSError):
            (self.path.parent / name).unlink(missing_ok=True)

    def put_metadata(self, metadata: bytes) -> str:
        return self.put_file(f"metadata-{blake2b(metadata, digest_size=16).hexdigest()}", metadata)

    def write_files(self) -> str:
        """Retry the files that `put_file` could not write; return in one sentence why some are still missing, or ""."""
        if self._unwritten and time.monotonic() >= self._tried_at + _ROOM_S:
            self._problem = self._write_left()
            self._tried_at = time.monotonic()
        return self._problem

    def _write_left(self) -> str:
        for name, content in list(self._unwritten.items()):
            path = self.path.parent / name
            draft = path.with_name(f".{name}.{os.getpid()}.{socket.gethostname()}")
            try:
                draft.write_bytes(content)
                draft.replace(path)
            except OSError as e:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
                return f"cannot write into {path.parent}: {e.strerror}; until it can, its state has no copies elsewhere"
            del self._unwritten[name]
        return ""


def _exchange_line(peer: socket.socket, line: bytes) -> bytes:
    """Send a line and return the answer; empty if the other end closed the connection first."""
    peer.sendall(line)
    with peer.makefile("rb") as answers:
        answer = answers.readline(rank_keeper_messages.MAX_BYTES)
    return answer if answer.endswith(b"\n") else b""


def _parse_answer(line: bytes) -> rank_keeper_messages.FromKeeper:
    answer: rank_keeper_messages.FromKeeper = rank_keeper_messages.from_keeper(line)
    if isinstance(answer, rank_keeper_messages.KeeperRefusal):
        raise StateFetchError(answer.why) if answer.unfetched else KeeperError(answer.why)
    return answer
