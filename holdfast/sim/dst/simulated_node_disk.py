"""The notes on a simulated machine's disk, which outlive an agent."""

from holdfast.model.errand import Done, LaunchHere, Leave


class NodeDisk:
    """The notes on a node's disk, which outlive the agent; after a power loss only synced notes remain."""

    def __init__(self) -> None:
        self.done: list[Done] = []  # synced
        self.stopped = 0
        self.launch: LaunchHere | None = None
        self.alone: float | None = None  # since when there is no controller, by the steady clock
        self.leaving: Leave | None = None  # begun, and not come to its end
        self.epoch = 0  # newest controller that was heard
        self.full = False  # nothing can be written

    def write_launch(self, errand: LaunchHere) -> str:
        """Note a launch; return why it cannot be noted, empty if it was."""
        self.launch = self.launch if self.full else errand
        return "what is launched cannot be written" if self.full else ""

    def lose_power(self) -> None:
        self.stopped, self.launch, self.alone, self.leaving, self.epoch = 0, None, None, None, 0
