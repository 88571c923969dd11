"""What a keeper is given from outside: memory, a clock, and callbacks for its news."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from holdfast.agent.agent_clock import AgentClock
from holdfast.model.signal import Mark

MakeArena = Callable[[str, int], Awaitable[str]]


class KeeperPorts(NamedTuple):
    make_arena: MakeArena  # by name and size, in memory of the holder; returns its path; size 0 gives the memory back
    clock: AgentClock
    say: Callable[[str], None]  # shows a sentence on the console of the job
    report_progress: Callable[[], None]  # tells the controller now how far the copies are
    report_marks: Callable[[tuple[Mark, ...]], None]  # tells the controller hashes of state that replicas share
