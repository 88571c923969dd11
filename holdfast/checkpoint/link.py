"""A rank's line to the keeper of its node."""

import os
import socket
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.layout import Layout
from holdfast.wire import keeping, replaying, unixpath

_AGAIN_S = 0.2
_LOST_S = 60.0  # an agent that died is back by then


def generation() -> int:
    """Of this launch; 0 without an agent."""
    return int(os.environ.get("HOLDFAST_GENERATION", "0"))


def want_of(layout: Layout, slots: int, metadata_path: str, storage: keeping.Storage | None) -> keeping.Want:
    """What to ask for, for snapshots of this layout."""
    return keeping.Want(
        rank=layout.rank,
        world=layout.world,
        generation=generation(),
        layout=layout.digest.hex(),
        image_bytes=layout.image_bytes,
        slots=slots,
        share=tuple((part.start, part.end) for part in layout.share()),
        metadata_path=metadata_path,
        storage=storage,
    )


class KeeperError(Exception):
    """One sentence: why the keeper did not do what it was asked."""


class Link:
    """One question at a time; an agent that is replaced meanwhile is asked again."""

    def __init__(self, path: str, lost_s: float = _LOST_S) -> None:
        self.path = Path(path)
        self._lost_s = lost_s

    @classmethod
    def here(cls) -> "Link | None":
        """The keeper of this rank's node; None without an agent, and in a replay, which keeps nothing."""
        path = os.environ.get(keeping.KEEPER)
        return cls(path) if path and not replaying.is_replay() else None

    def want(self, want: keeping.Want, layout: Layout) -> str:
        """The path of the arena for these snapshots; the keeper may have to tell others how they are laid out."""
        self.put(keeping.plan_name(want.rank, want.layout), msgspec.msgpack.encode(layout))
        match self._ask(want):
            case keeping.Arena(path=path):
                return path
            case answer:
                raise KeeperError(f"the keeper answered a request for memory with {answer}")

    def resume(self, resume: keeping.Resume) -> keeping.State:
        """Where the state to go on from lies; waits until it is there."""
        match self._ask(resume):
            case keeping.State() as state:
                return state
            case answer:
                raise KeeperError(f"the keeper answered a request for state with {answer}")

    def _ask(self, message: keeping.ToKeeper) -> keeping.FromKeeper:
        line = keeping.encode(message) + b"\n"
        until = time.monotonic() + self._lost_s
        while True:
            try:
                with unixpath.connect(self.path) as peer:
                    answer = _answered(peer, line)
            except OSError as e:
                if time.monotonic() > until:
                    raise KeeperError(f"the keeper at {self.path} does not answer: {e}") from None
            else:
                if answer:
                    return _allowed(answer)
                until = time.monotonic() + self._lost_s  # it was there, and hung up
            time.sleep(_AGAIN_S)

    def put(self, name: str, content: bytes) -> str:
        """Leave a file where the keeper finds it; returns its path."""
        path = self.path.parent / name
        draft = path.with_name(f".{name}.{os.getpid()}.{socket.gethostname()}")
        draft.write_bytes(content)
        draft.replace(path)
        return str(path)


def _answered(peer: socket.socket, line: bytes) -> bytes:
    """One line back; empty if the other end went away first."""
    peer.sendall(line)
    with peer.makefile("rb") as answers:
        answer = answers.readline(keeping.MAX_BYTES)
    return answer if answer.endswith(b"\n") else b""


def _allowed(line: bytes) -> keeping.FromKeeper:
    answer: keeping.FromKeeper = keeping.from_keeper(line)
    if isinstance(answer, keeping.Denied):
        raise KeeperError(answer.why)
    return answer
