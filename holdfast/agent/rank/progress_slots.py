"""The progress slots of a node's ranks: records in the holder's memory that ranks write and the agent reads."""

import mmap
import os

from holdfast.model.observation import Mark, StepValues
from holdfast.wire.rank_memory import flight_log_reader, flight_log_writer, slot_reader
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
