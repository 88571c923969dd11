"""An agent's notes on disk for the agent that replaces it: finished errands, the stopped generation, the epoch, the
departure, and since when the node has had no controller. An agent that cannot write a note acts all the same. Above
all, it ends ranks even if it cannot note that they were stopped."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core.agent_state_machine import HeedEpoch, RememberDone, RememberLeaving
from holdfast.decoding import from_json
from holdfast.model.node_errands import Done, Leave
from holdfast.model.observation import Beat, Departure
from holdfast.wire import run_and_node_specs

_log = logging.getLogger("holdfast.agent")


class AgentStateFiles:
    """The files in a node's folder in which its agent writes down what the next agent must know."""

    def __init__(self, node_dir: Path) -> None:
        self._done = node_dir / "done.jsonl"
        self._stopped = node_dir / "stopped"
        self._epoch = node_dir / "epoch"
        self._leaving = node_dir / "leaving.json"
        self._left = node_dir / "left"
        self._departure = node_dir / "departure.json"
        self._alone = node_dir / "alone"

    def write_deed(self, deed: HeedEpoch | RememberDone | RememberLeaving) -> None:
        match deed:
            case HeedEpoch(epoch):
                _write_file(self._epoch, f"{epoch}\n".encode())
            case RememberDone(done):
                self._append_done(done)
            case RememberLeaving(errand):
                _write_file(self._leaving, msgspec.json.encode(errand))

    def _append_done(self, done: Done) -> None:
        """Append a finished errand. On a disk error only log it: the next agent may safely repeat the errand."""
        try:
            with self._done.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(done))  # the line before may be torn
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            _log.warning("errand %d is done but cannot be noted, so the next agent may repeat it: %s", done.id, e)

    def read_done(self) -> tuple[Done, ...]:
        """Return the errands that earlier agents finished. Skip a line torn by a crash: it was never acknowledged."""
        if not self._done.exists():
            return ()
        done = []
        for line in self._done.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                done.append(from_json(line, Done))
        return tuple(done)

    def write_stopped(self, generation: int) -> None:
        _write_file(self._stopped, f"{generation}\n".encode())

    def read_stopped(self) -> int:
        """Return the newest generation that this node was ordered to stop; 0 if the note is missing or damaged."""
        with contextlib.suppress(ValueError):  # a damaged note costs a launch that is told twice, not the agent
            return int(self._stopped.read_bytes()) if self._stopped.exists() else 0
        return 0

    def read_epoch(self) -> int:
        """Return the epoch of the newest controller that this node has heard from, or 0."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._epoch.read_bytes())
        return 0

    def read_leave_intent(self) -> Leave | None:
        """Return the Leave errand that an earlier agent began and did not finish, or None."""
        try:
            return run_and_node_specs.read_json(self._leaving, Leave)
        except (OSError, msgspec.DecodeError):
            return None

    def write_leave_reason(self, errand: Leave) -> None:
        """Write down why this node left, for people who look into its folder."""
        _write_file(self._left, f"{errand.reason}\n".encode())

    def write_departure(self, departure: Departure) -> None:
        """Before the node leaves without a controller, note its ranks' last steps on disk for the next controller. A
        note of an earlier agent is kept, because the earlier agent saw the ranks before they ended."""
        if not self._departure.exists():
            _write_file(self._departure, msgspec.json.encode(departure))

    def complete_departure(self, complete: Callable[[Beat], Beat]) -> None:
        """If this node has noted its departure with a beat, replace the beat in the note by what `complete` returns."""
        with contextlib.suppress(OSError, ValueError):
            told = from_json(self._departure.read_bytes(), Departure)
            if told.beat:
                told = msgspec.structs.replace(told, beat=complete(told.beat))
                _write_file(self._departure, msgspec.json.encode(told))

    def mark_alone(self, now: float) -> float:
        """Note that the controller is gone. Return the time of the first such note, by this agent or an earlier one."""
        with contextlib.suppress(OSError, ValueError):
            if self._alone.exists() and (told := self._alone.read_text()):
                return min(now, float(told))
            self._put_alone(f"{now}\n")
        return now

    def clear_alone(self) -> None:
        """Delete the note that the controller is gone."""
        with contextlib.suppress(OSError):
            self._put_alone("")

    def _put_alone(self, content: str) -> None:
        if self._alone.is_symlink():
            if "memfd:" in os.readlink(os.readlink(self._alone)):  # else the holder is gone, and another has its number
                self._alone.write_text(content)
        elif content:
            run_and_node_specs.publish_file(self._alone, content.encode())
        else:
            self._alone.unlink(missing_ok=True)

    def reset_notes(self, memory: str) -> None:
        """Delete two notes of an earlier holder's agents: an unfinished Leave errand, and since when the node is alone.
        Then make the second note a link to `memory`, a file in the holder's memory, which outlives the agent and needs
        no disk. It must not get lost: a controller may launch elsewhere once a node has been alone for long."""
        for note in (self._alone, self._leaving):
            with contextlib.suppress(OSError):
                note.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # then it lies on the disk
            self._alone.symlink_to(memory)


def _write_file(path: Path, content: bytes) -> None:
    try:
        run_and_node_specs.publish_file(path, content)
    except OSError as e:
        _log.warning("cannot write %s: %s", path, e)
