"""The progress slots of a node's ranks: records in the holder's memory that ranks write and the agent reads."""

import mmap
import os

from holdfast.core.snapshots.step_network_profile import NetworkSample
from holdfast.model.observation import Mark, StepValues
from holdfast.wire.rank_memory import flight_log_reader, flight_log_writer, network_look_reader, slot_reader
from holdfast.wire.rank_memory.flight_log_reader import FlightReport
from holdfast.wire.rank_memory.slot_reader import SlotReading


class ProgressSlots:
    """Reads the ranks' progress slots in the holder's memory. Nothing is read before `open_memory`."""

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self.arena: mmap.mmap | None = None
        self.path = ""  # by which ranks open the same memory

    def open_memory(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        self.arena, self.path = mmap.mmap(fd, 0), path
        os.close(fd)

    def clear_rank(self, local: int) -> None:
        """Empty the slot and the flight log of a rank before it starts."""
        assert self.arena is not None
        slot_reader.clear_slot(self.arena, local)
        flight_log_reader.clear_flight(self.arena, flight_log_writer.flight_log_offset(self._nproc, local))

    def read_slots(self) -> list[tuple[int, SlotReading]]:
        """Return the newest content of each rank's progress slot, with the slot's index."""
        if self.arena is None:
            return []
        found = ((index, slot_reader.read_slot(self.arena, index)) for index in range(self._nproc))
        return [(index, reading) for index, reading in found if reading is not None]

    def read_flight(self, local: int) -> FlightReport | None:
        """Return what a rank last wrote about its collectives and messages; None if it has written nothing."""
        at = flight_log_writer.flight_log_offset(self._nproc, local)
        return flight_log_reader.read_flight(self.arena, at, "") if self.arena is not None else None

    def read_entries(self, index: int, reading: SlotReading, after: int) -> tuple[int, list[StepValues | Mark]]:
        """Return the newest entry's number, and the losses and hashes after entry number `after`, oldest first."""
        return slot_reader.read_entries(self.arena, index, reading, after) if self.arena else (after, [])

    def order_looks(self, local: int, wanted: int, spacing_s: float) -> None:
        """Have a rank look at its network until it has looked so often since its launch."""
        if self.arena is not None:
            at = flight_log_writer.flight_log_offset(self._nproc, local)
            network_look_reader.order_looks(self.arena, at, wanted, spacing_s)

    def read_looks(self, local: int, after: int) -> tuple[int, list[NetworkSample]]:
        """Return the newest look's number, and the looks of a rank after look number `after`, oldest first."""
        at = flight_log_writer.flight_log_offset(self._nproc, local)
        return network_look_reader.read_looks(self.arena, at, after) if self.arena is not None else (after, [])
