"""The lineage of states: which of two that tell the same step are the same, and which the job may go on with.

A state is named by a step and by a generation that held it on its way: one that made it, took it up, or went on from
it. Two generations may have made the same step, each in its own way, and no launch may mix these. Launches form a tree:
each resumes from one state of an older one. So a state is of a generation's line if the way back from that generation
and the way back from the one that names it find the same maker of the step. It is not enough to compare steps with
where later launches resumed: a launch may go on beside one of whose steps no controller has heard.
"""

from collections.abc import Collection

from holdfast.model.state_copy import Doubt, LaunchOrigin

Line = tuple[LaunchOrigin, ...]  # by generation, the oldest first
_LAUNCHES = 64


def find_maker(line: Line, generation: int, step: int) -> int:
    """Return the generation that made this step on the way to the given one; 0 if that was before the oldest launch
    that is known."""
    for origin in reversed(line):
        if origin.generation == generation:
            if step > origin.step:
                return generation
            generation = origin.maker
    return 0


def is_of_line(line: Line, head: int, generation: int, step: int) -> bool:
    """Return whether this generation's state of a step is the one that the line of `head` has. States from before the
    oldest launch that is known are not told apart."""
    return find_maker(line, generation, step) == find_maker(line, head, step)


def list_heads(line: Line, held: Collection[int]) -> list[int]:
    """Return the generations whose lines the job may go on with: the newest that has told of a step, and later ones of
    which states are held. These may have made steps while there was no controller, or read a state from storage."""
    newest = max((one.generation for one in line if one.stepped), default=0)
    return [newest, *(one.generation for one in line if one.generation > newest and one.generation in held)]


def add_launch(line: Line, origin: LaunchOrigin) -> Line:
    """Return the line with one more launch. If there are many, the oldest is forgotten."""
    return (*(one for one in line if one.generation < origin.generation), origin)[-_LAUNCHES:]


def bans_before(line: Line, left: tuple[Doubt, ...]) -> tuple[Doubt, ...]:
    """Return which states from before this line are of no use: all, once a launch was forgotten, or else those that
    were before."""
    return (Doubt(generation=line[0].generation - 1, not_after=-1),) if len(line) >= _LAUNCHES else left
