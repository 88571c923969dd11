"""The lineage of states: whether two states of the same step are the same, and which of them the job may go on with.

A state is named by its step and a generation that had it: one that made it, restored it, or went on from it. Two
generations may have made the same step with different results, and no launch may mix these results. Launches form a
tree: each resumes from one state of an older generation. A state belongs to the lineage of a generation if the same
ancestor made its step for this generation and for the generation in the state's name. Comparing only the steps from
which launches resumed is not enough, because some steps were never reported to a controller.
"""

from collections.abc import Collection

from holdfast.model.restore_sources import LaunchOrigin
from holdfast.model.state_doubt import Doubt

Line = tuple[LaunchOrigin, ...]  # by generation, the oldest first
_LAUNCHES = 64


def find_maker(line: Line, generation: int, step: int) -> int:
    """Return the generation that made this step: `generation` or one of its ancestors. Return 0 if it was older than
    the oldest known launch."""
    for origin in reversed(line):
        if origin.generation == generation:
            if step > origin.step:
                return generation
            generation = origin.maker
    return 0


def is_of_line(line: Line, head: int, generation: int, step: int) -> bool:
    """Return whether two generations, `generation` and `head`, have the same state of this step, because the same
    ancestor made it. All states from before the oldest known launch count as the same."""
    return find_maker(line, generation, step) == find_maker(line, head, step)


def list_heads(line: Line, held: Collection[int]) -> list[int]:
    """Return the generations whose states the job may go on with. They are the newest generation that has reported a
    step, and each later generation of which states are held. A later generation may have made steps without a
    controller, or restored a checkpoint from storage."""
    newest = max((one.generation for one in line if one.stepped), default=0)
    return [newest, *(one.generation for one in line if one.generation > newest and one.generation in held)]


def add_launch(line: Line, origin: LaunchOrigin) -> Line:
    """Return the known launches with one more. If there are too many, the oldest launch is forgotten."""
    return (*(one for one in line if one.generation < origin.generation), origin)[-_LAUNCHES:]


def bans_before(line: Line, left: tuple[Doubt, ...]) -> tuple[Doubt, ...]:
    """Return the doubts about states made before the launches in `line`. If `line` is so long that older launches were
    forgotten, all states from before it are in doubt. Otherwise return `left`, the doubts known already."""
    return (Doubt(generation=line[0].generation - 1, not_after=-1),) if len(line) >= _LAUNCHES else left
