"""Every kind of fault: what it does, what it takes, what it needs, and which alarm should follow."""

import os
from collections.abc import Callable

import msgspec

from holdfast.chaos import cgroups, ordered, processes
from holdfast.chaos.fault import Cannot, Fault
from holdfast.chaos.scene import Scene, Struck

Strike = Callable[[Scene, Fault], Struck]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    what: str
    strike: Strike
    takes: tuple[str, ...] = ()  # fields of its own
    alarms: tuple[str, ...] = ()  # one of these should follow
    blind: str = ""  # why none does
    needs: str = ""  # of the job or the machine, in words
    lacks: Callable[[], str] = lambda: ""  # why it cannot be done on this machine; empty: it can


def _root(what: str) -> Callable[[], str]:
    return lambda: "" if os.geteuid() == 0 else f"{what} takes root"


_GOES_ON = "training goes on, and another one is started"

PROCESSES = (
    Kind(name="rank.kill", what="SIGKILL to a rank", strike=processes.rank_signal, alarms=("crash",)),
    Kind(name="rank.segv", what="SIGSEGV to a rank", strike=processes.rank_signal, alarms=("crash",)),
    Kind(name="rank.stop", what="SIGSTOP to a rank", strike=processes.rank_signal, alarms=("hang",)),
    Kind(
        name="rank.slow",
        what="a rank gets a part of a core (share)",
        strike=processes.rank_slow,
        takes=("share",),
        alarms=("slow",),
    ),
    Kind(
        name="rank.oom",
        what="a rank may have no more memory, and the kernel kills it",
        strike=processes.rank_oom,
        alarms=("lines", "crash"),
        needs="root and a cgroup controller for memory",
        lacks=lambda: cgroups.missing("memory"),
    ),
    Kind(name="agent.kill", what="SIGKILL to an agent", strike=processes.agent_signal, blind=_GOES_ON),
    Kind(
        name="agent.stop",
        what="SIGSTOP to an agent: its node is cut off, its ranks go on",
        strike=processes.agent_signal,
        alarms=("silence",),
    ),
    Kind(name="controller.kill", what="SIGKILL to the controller", strike=processes.controller_kill, blind=_GOES_ON),
    Kind(name="store.kill", what="SIGKILL to the store", strike=processes.store_kill, blind=_GOES_ON),
    Kind(
        name="node.kill", what="a node is lost with all its processes", strike=processes.node_kill, alarms=("silence",)
    ),
    Kind(name="standby.kill", what="a standby is lost", strike=processes.node_kill, alarms=("silence",)),
    Kind(
        name="blast",
        what="several nodes are lost at once, as behind one switch (count)",
        strike=processes.node_kill,
        takes=("count",),
        alarms=("silence",),
    ),
)

_OBEDIENT = "ranks that take orders: --preload holdfast.chaos.inrank"

ORDERED = (
    Kind(
        name="rank.raise",
        what="an exception in a rank's step (error)",
        strike=ordered.order,
        takes=("error",),
        alarms=("crash",),
        needs=_OBEDIENT,
    ),
    Kind(
        name="rank.exit",
        what="a rank ends itself (code)",
        strike=ordered.order,
        takes=("code",),
        alarms=("crash",),
        needs=_OBEDIENT,
    ),
    Kind(name="rank.hang", what="a rank sleeps in its step", strike=ordered.order, alarms=("hang",), needs=_OBEDIENT),
    Kind(name="loss.nan", what="NaN in a forward pass", strike=ordered.order, alarms=("loss",), needs=_OBEDIENT),
    Kind(
        name="bits",
        what="bits are flipped (place, bits, count, chance)",
        strike=ordered.order,
        takes=("place", "bits", "count", "chance"),
        alarms=("replica", "loss"),
        needs=_OBEDIENT,
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*PROCESSES, *ORDERED)}


def kind_of(fault: Fault) -> Kind:
    try:
        return KINDS[fault.kind]
    except KeyError:
        raise Cannot(f"there is no fault '{fault.kind}'; holdfast chaos list shows all") from None
