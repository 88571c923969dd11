"""The notes on a simulated machine's disk, which outlive an agent."""

import errno

from holdfast.model.node_errands import Done, Leave


class NodeDisk:
    """The notes on a node's disk, which outlive the agent; after a power loss only synced notes remain."""

    def __init__(self) -> None:
        self.done: list[Done] = []  # synced
        self.stopped = 0
        self.alone: float | None = None  # since when there is no controller, by the steady clock
        self.leaving: Leave | None = None  # begun, and not come to its end
        self.epoch = 0  # newest controller that was heard
        self.full = False  # nothing can be written
        self.notes: dict[str, bytes] = {}  # of keepers and ranks, by name

    def write_note(self, name: str, content: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device", name)
        self.notes[name] = content

    def lose_power(self) -> None:
        self.stopped, self.alone, self.leaving, self.epoch = 0, None, None, 0
        self.notes.clear()
