"""How many entries torch's flight recorder gets in each rank: more in a pipeline, by the messages of a step.

A process may run ahead of its GPU by as many messages as fit into the GPU's queue, which were those of five steps on an
H200. If the recorder then drops the message in which the GPU is, nobody can tell for whom that rank waits. Torch reads
the size when the first process group is made, so what a rank has posted counts for the next generation. Until then a
pipeline gets as many as there may be.
"""

from collections.abc import Mapping

from holdfast.agent.rank.progress_slots import ProgressSlots
from holdfast.model.job_and_seats import Dims
from holdfast.wire.rank_environment_defaults import RECORDER_ENTRIES, recorder_size

_MOST = 1024  # entries: reading them takes the processor for some ten milliseconds; a GPU's queue holds about as many
_FOR_MESSAGE = 32  # of 16 steps, where so many are in the queue; each message has an entry, and so has its batch
_STAGES = ("pp", "pipe")  # how the names of a mesh's dimension begin along which a model's stages lie


class RecorderSizes:
    """Remembers how many messages a step of each rank of this node has taken over NCCL."""

    def __init__(self) -> None:
        self._messages: dict[int, int] = {}

    def learn_and_clear(self, local: int, slots: ProgressSlots) -> None:
        """Empty the slot and the flight log of a rank before it starts, and remember what they told."""
        self._learn(local, slots)
        slots.clear_rank(local)

    def _learn(self, local: int, slots: ProgressSlots) -> None:
        """Count the messages that the rank of an earlier generation has posted. Nothing is learned of a rank that has
        made no step, or whose messages go over another backend."""
        slot, report = dict(slots.read_slots()).get(local), slots.read_flight(local)
        channels = report.flight.channels if report and slot and report.generation == slot.generation else None
        if not (slot and report and channels) or slot.step < slot.first_step or slot.step < 0:
            return
        if report.gpu or any(channel.begun is not None for channel in channels):
            steps = slot.step - slot.first_step + 1
            self._messages[local] = -(-sum(channel.posted for channel in channels) // steps)

    def variables(self, local: int, given: Mapping[str, str], mesh: Dims) -> dict[str, str]:
        """Return the variable that sets the size, or nothing if the rank gets the default or the user's size."""
        stages = max((size for name, size in mesh if name.lower().startswith(_STAGES)), default=1)
        messages = self._messages.get(local)
        needed = (_MOST if stages > 1 else RECORDER_ENTRIES) if messages is None else _FOR_MESSAGE * messages
        entries = RECORDER_ENTRIES
        while entries < min(needed, _MOST):
            entries *= 2
        return recorder_size(given, entries)
