"""Pieces of copies go into gaps: over real links, paced by the memory in which a rank tells of its steps."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.rank.progress_slots import ProgressSlots
from holdfast.agent.snapshots.copy_pacer import CancelablePacer, CopyPacer, GapPacer, queued_bytes
from holdfast.agent.snapshots.step_gap_watch import StepGapWatch, UnwatchedRanks
from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_transport import PeerKeeper, TransportError, push_state
from holdfast.core.snapshots.floor_pins_and_copies import CopyRun
from holdfast.core.snapshots.gap_pacing import PacingChoice
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.wire.rank_memory.flight_log_writer import flight_log_offset, slot_memory_bytes
from holdfast.wire.rank_memory.network_look_writer import NetworkLookLog
from holdfast.wire.rank_memory.slot_writer import SlotWriter, open_slot_memory
from tests.checkpoint import test_peer_transport
from tests.checkpoint.test_peer_transport import ASK, LARGE, Keeper
from tests.cli.driver import until

authority, large = test_peer_transport.authority, test_peer_transport.large  # fixtures
STEP_S, BUSY = 0.2, (0.5, 0.75)  # where in a step the rank's collectives are


class SteppingRank:
    """A rank that makes steps, and looks as often as is ordered, in memory that it shares with its agent."""

    def __init__(self, path: Path, busy: tuple[float, float] = BUSY) -> None:
        path.write_bytes(bytes(slot_memory_bytes(1)))
        self.begun_at: list[float] = []
        self._slot = SlotWriter.open(str(path), 0, generation=1, rank=0)
        self._log = NetworkLookLog(open_slot_memory(str(path)), flight_log_offset(1, 0))
        self._busy = busy
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        step = 0
        while not self._ends.is_set():
            step += 1
            at = time.monotonic()
            self._slot.step(step)
            self.begun_at.append(at)
            while time.monotonic() < at + STEP_S:
                if self._log.count < self._log.read_order()[0]:
                    now = time.monotonic()
                    self._log.append_look(step, at, now, busy=self.is_busy(now))
                self._ends.wait(0.005)

    def is_busy(self, at: float) -> bool:
        begun_at = max(one for one in self.begun_at if one <= at)
        return self._busy[0] <= (at - begun_at) / STEP_S < self._busy[1]

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[SteppingRank]:
    made = SteppingRank(tmp_path / "slots")
    yield made
    made.end()


def learned(path: Path) -> StepGapWatch:
    """What watches the rank, once it knows the gaps."""
    slots = ProgressSlots(1)
    slots.open_memory(str(path))
    watch = StepGapWatch(slots, SystemClock(), lambda: True)
    watch.begin_generation(1, 1)
    assert watch.read_gaps().why

    def knows() -> bool:
        watch._watch_ranks()
        return not watch.read_gaps().why

    until(knows, "the gaps of the steps")
    return watch


class TimedPacer(GapPacer):
    """A pacer that notes when pieces were sent."""

    def note_times(self) -> list[tuple[float, float]]:
        self.times: list[tuple[float, float]] = []
        return self.times

    @contextmanager
    def sending(self) -> Iterator[None]:
        began_at = time.monotonic()
        with super().sending():
            yield
        self.times.append((began_at, time.monotonic()))


@pytest.mark.slow
@pytest.mark.parametrize("relayed", [False, True])
def test_pieces_are_sent_in_gaps_alone(
    rank: SteppingRank,
    tmp_path: Path,
    large: tuple[Keeper, PeerKeeper],
    monkeypatch: pytest.MonkeyPatch,
    relayed: bool,
) -> None:
    """Over one TLS link, and by relays over several, as slow as a link that takes some steps for the copy."""
    monkeypatch.setattr(peer_transport, "_RELAYED_BYTES", 0)
    watch, (keeper, callee) = learned(tmp_path / "slots"), large
    pacer = TimedPacer(BytePacer(0), CopyRun(step=7, began_at=0.0), watch, len(LARGE) / STEP_S)
    times = pacer.note_times()
    assert push_state(callee._replace(relayed=relayed), ASK, [memoryview(LARGE)], pacer) == len(LARGE)
    until(lambda: keeper.ends == 1, "the copy is sealed")
    assert keeper.memory == LARGE and (keeper.links > 2) is relayed
    begins = [began_at for began_at, _ in times]
    in_collectives = [at for at in begins if rank.is_busy(at)]
    # The others are words that the receiver's links are asked for, and begins of steps that came late.
    assert len(begins) > 100 and len(in_collectives) <= 0.05 * len(begins)
    assert 0 < pacer.sent_s <= sum(ended_at - began_at for began_at, ended_at in times)


def test_without_gaps_pieces_are_sent_at_any_time(
    rank: SteppingRank, tmp_path: Path, large: tuple[Keeper, PeerKeeper]
) -> None:
    """What the test above finds is not so by itself."""
    begins: list[float] = []

    class NotingPacer(BytePacer):
        def admit_piece(self, link: socket.socket, left: int) -> int:
            time.sleep(0.004)
            begins.append(time.monotonic())
            return min(left, 256 << 10)

    until(lambda: rank.begun_at, "a step")
    push_state(large[1], ASK, [memoryview(LARGE)], NotingPacer(0))
    assert sum(map(rank.is_busy, begins)) > 0.1 * len(begins)


def test_a_copy_is_paced_by_gaps_once_gaps_and_speed_are_known(rank: SteppingRank, tmp_path: Path) -> None:
    watch = learned(tmp_path / "slots")
    pacer = CopyPacer(BackupLimits(duty=0.25), watch)
    assert pacer.describe() == "" and pacer.rest_s == -1.0
    first = pacer.begin_copy(CopyRun(step=1, began_at=0.0), 1000)
    assert not isinstance(first, GapPacer) and pacer.describe().startswith("duty: the speed")
    pacer.end_copy(first, 1000, 0.01)
    assert pacer.rest_s == -1.0, "as the time that it took says"
    second = pacer.begin_copy(CopyRun(step=2, began_at=0.0), 1000)
    assert isinstance(second, GapPacer) and pacer.describe() == "gaps"
    with second.sending(), second.sending():
        time.sleep(0.01)
    assert 0.01 <= second.sent_s < 1.0
    pacer.end_copy(second, 1000, 0.3)
    assert pacer.rest_s >= 0
    pacer.begin_copy(CopyRun(step=3, began_at=0.0), 10**9)
    assert "too small" in pacer.describe()
    by_duty = CopyPacer(BackupLimits(pacing=PacingChoice.DUTY), watch)
    by_duty.begin_copy(CopyRun(step=3, began_at=0.0), 1)
    assert by_duty.describe() == "duty: backup.pacing is duty"


def test_where_no_rank_can_be_watched_duty_paces() -> None:
    watch = StepGapWatch(UnwatchedRanks(), SystemClock(), lambda: True)
    watch.begin_generation(1, 2)
    watch._watch_ranks()
    pacer = CopyPacer(BackupLimits(pacing=PacingChoice.GAPS), watch)
    given = pacer.begin_copy(CopyRun(step=1, began_at=0.0), 1000)
    assert not isinstance(given, GapPacer) and "watched" in pacer.describe()


def test_a_copy_that_is_given_up_waits_for_no_gap(tmp_path: Path, large: tuple[Keeper, PeerKeeper]) -> None:
    rank = SteppingRank(tmp_path / "slots", busy=(0.2, 0.9))
    try:
        run = CopyRun(step=7, began_at=0.0)
        pacer = GapPacer(BytePacer(0), run, learned(tmp_path / "slots"), 1.0)  # a byte a second: nothing ever fits
        threading.Timer(0.5, lambda: setattr(run, "cancelled", True)).start()
        with pytest.raises(TransportError, match="given up"):
            push_state(large[1], ASK, [memoryview(LARGE)], pacer)
        with pytest.raises(TransportError, match="given up"):
            CancelablePacer(BytePacer(0), run).spend_bytes(1)
    finally:
        rank.end()


def test_what_a_link_has_not_delivered_is_known() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert queued_bytes(near) == 0
        near.sendall(bytes(100_000))
        assert queued_bytes(near) >= 100_000
        far.recv(100_000, socket.MSG_WAITALL)
        until(lambda: queued_bytes(near) == 0, "all is delivered")
