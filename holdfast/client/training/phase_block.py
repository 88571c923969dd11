"""The `with` block of a phase that a script names."""

from holdfast.wire.rank_memory.slot_writer import SlotWriter


class PhaseBlock:
    """The context manager that `phase` returns. Its exit puts the rank back into the previous phase."""

    def __init__(self, slot: SlotWriter | None, before: str) -> None:
        self._slot = slot
        self._before = before

    def __enter__(self) -> None:
        return

    def __exit__(self, *exc: object) -> None:
        if self._slot is not None:
            self._slot.enter_phase(self._before)
