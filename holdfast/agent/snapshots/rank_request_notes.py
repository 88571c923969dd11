"""Notes of what ranks have asked a keeper for, which the next agent of the node reads."""

import contextlib
from collections.abc import Iterator

import msgspec

from holdfast.agent.snapshots.keeper_interfaces import KeeperNotes, KeeperPorts
from holdfast.decoding import from_json
from holdfast.wire.rank_keeper_messages import ArenaRequest

_WANT = "want-"
_ROOM_S = 5.0  # between tries to write what the disk had no room for


class RequestNotes:
    """Writes down ranks' arena requests for the next agent. If the disk is full, requests are written later."""

    def __init__(self, notes: KeeperNotes, ports: KeeperPorts) -> None:
        self._notes = notes
        self._ports = ports
        self._unwritten: dict[int, ArenaRequest] = {}  # by rank
        self._again_at = 0.0

    def read_requests(self) -> Iterator[ArenaRequest]:
        for name in self._notes.list_notes(_WANT):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                yield from_json(self._notes.read_note(name), ArenaRequest)

    def begin_launch(self) -> None:
        """Drop requests of the previous generation's ranks that could not be written."""
        self._unwritten.clear()

    def note_request(self, want: ArenaRequest) -> None:
        try:
            self._notes.write_note(f"{_WANT}{want.rank}.json", msgspec.json.encode(want))
        except OSError as e:
            if want.rank not in self._unwritten:
                why = f"cannot note what rank {want.rank} saves: {e.strerror}; it trains on"
                self._ports.say(f"{why}, but until this can be noted, a restart of the agent would end its copies")
            self._unwritten[want.rank] = want
            self._again_at = self._ports.clock.monotonic() + _ROOM_S
        else:
            self._unwritten.pop(want.rank, None)

    def try_again(self) -> None:
        """Write requests that could not be written before, once it is time to retry."""
        if self._unwritten and self._ports.clock.monotonic() >= self._again_at:
            for want in list(self._unwritten.values()):
                self.note_request(want)
