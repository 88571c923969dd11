"""A keeper as far as a rank can tell: memory that outlives the rank, and where to resume from."""

import os
import socket
import threading
from pathlib import Path
from typing import BinaryIO, cast

from holdfast.agent.snapshots.checkpoint_writer import read_metadata
from holdfast.checkpoint.arena import Arena
from holdfast.wire import rank_keeper_messages, unix_sockets


class FakeKeeper:
    """Holds one arena for each rank, as the holder would; answers from the newest snapshot unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keeper"
        self.wants: dict[int, rank_keeper_messages.ArenaRequest] = {}
        self.answer: rank_keeper_messages.FromKeeper | None = None
        self.hang_up = 0  # so many times before answering
        self._held: dict[int, int] = {}
        self._listener = unix_sockets.listen(self.path)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def arena(self, rank: int = 0) -> Arena:
        return Arena.open(self._path(rank))

    def make(self, want: rank_keeper_messages.ArenaRequest) -> str:
        fd = self._held.get(want.rank)
        if fd is None or self.arena(want.rank).layout.hex() != want.layout:
            if fd is not None:
                os.close(fd)
            fd = self._held[want.rank] = os.memfd_create("arena")
            size, slots = want.image_bytes, want.slots
            name = {"rank": want.rank, "world": want.world}
            Arena.make(fd, layout=bytes.fromhex(want.layout), image_bytes=size, slots=slots, **name)
        return self._path(want.rank)

    def state(self, rank: int) -> rank_keeper_messages.StateGrant:
        """The newest step that every rank has."""
        if rank not in self._held:
            return rank_keeper_messages.StateGrant(source="none")
        steps = [{sealed.step for sealed in self.arena(other).list_sealed()} for other in self._held]
        common = set.intersection(*steps)
        if not common:
            return rank_keeper_messages.StateGrant(source="none")
        slot = next(sealed.slot for sealed in self.arena(rank).list_sealed() if sealed.step == max(common))
        return rank_keeper_messages.StateGrant(source="memory", step=max(common), arena=self._path(rank), slot=slot)

    def write_checkpoint(self, step: int, folder: Path) -> None:
        """Write a snapshot of rank 0 to storage, as the real keeper's own code does."""
        want = self.wants[0]
        slot = next(sealed.slot for sealed in self.arena().list_sealed() if sealed.step == step)
        image = self.arena().slot_image(slot)
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"".join(image[start:end] for start, end in want.share))
        (folder / ".metadata").write_bytes(read_metadata(Path(want.metadata_path), step))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for fd in self._held.values():
            os.close(fd)

    def _path(self, rank: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._held[rank]}"

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer, peer.makefile("rwb") as line:
                self._reply(rank_keeper_messages.to_keeper(line.readline()), cast(BinaryIO, line))

    def _reply(self, message: rank_keeper_messages.ToKeeper, line: BinaryIO) -> None:
        if self.hang_up:
            self.hang_up -= 1
            return
        answer: rank_keeper_messages.FromKeeper
        if isinstance(message, rank_keeper_messages.ArenaRequest):
            self.wants[message.rank] = message
            answer = rank_keeper_messages.ArenaGrant(path=self.make(message))
            if isinstance(self.answer, rank_keeper_messages.KeeperRefusal):
                answer = self.answer
        else:
            answer = self.answer or self.state(message.rank)
        line.write(rank_keeper_messages.encode(answer) + b"\n")
        line.flush()
