"""Every kind of fault: what it does, what it takes, what it needs, and which alarm should follow."""

import os
from collections.abc import Callable

import msgspec

from holdfast.chaos import cgroups, files, links, machines, ordered, processes, releases
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

_OWN_MACHINES = "machines of its own: a job that chaos makes with machines = true"
_HARD = ("lines",)

MACHINES = (
    Kind(
        name="kernel.xid",
        what="Xid 79 in the log of a node's kernel (text, count)",
        strike=machines.kernel_line,
        takes=("text", "count"),
        alarms=_HARD,
        needs=_OWN_MACHINES,
    ),
    Kind(
        name="kernel.aer",
        what="a fatal PCIe error in the log of a node's kernel",
        strike=machines.kernel_line,
        takes=("text", "count"),
        alarms=_HARD,
        needs=_OWN_MACHINES,
    ),
    Kind(
        name="kernel.mce",
        what="a machine check in the log of a node's kernel",
        strike=machines.kernel_line,
        takes=("text", "count"),
        alarms=_HARD,
        needs=_OWN_MACHINES,
    ),
    Kind(
        name="gpu",
        what="readings of a GPU (reading: lost, ecc, hot, narrow, nvlink)",
        strike=machines.gpu_reading,
        takes=("reading",),
        alarms=("health",),
        needs=_OWN_MACHINES,
    ),
)

_OWN_DISK = "a small disk of its own: a job that chaos makes with disk_mib"
_WAITS = "storage that fails costs a sentence and a checkpoint, never a step"
_LATENT = "nobody reads it before a restore, which then leaves it out"

FILES = (
    Kind(
        name="disk.full",
        what="a disk of the job is full (path)",
        strike=files.disk_full,
        takes=("path",),
        alarms=("health",),
        needs=_OWN_DISK,
        lacks=_root("to mount a small disk"),
    ),
    Kind(
        name="disk.readonly",
        what="a disk of the job turns read-only (path)",
        strike=files.disk_readonly,
        takes=("path",),
        alarms=("health",),
        needs=_OWN_DISK,
        lacks=_root("to mount a small disk"),
    ),
    Kind(
        name="disk.slow",
        what="the disk of a node takes so many bytes a second (bytes_s, path)",
        strike=files.disk_slow,
        takes=("bytes_s", "path"),
        blind=_WAITS,
        needs="root, a cgroup controller for disks, and checkpoints",
        lacks=lambda: cgroups.missing("io"),
    ),
    Kind(
        name="shm.full",
        what="/dev/shm of the job is full",
        strike=files.disk_full,
        alarms=("health",),
        needs="a /dev/shm of its own: a job that chaos makes with shm_mib",
        lacks=_root("to mount a /dev/shm of its own"),
    ),
    Kind(
        name="checkpoint.flip",
        what="a bit of the newest checkpoint is flipped (path)",
        strike=files.checkpoint_flip,
        takes=("path",),
        blind=_LATENT,
        needs="checkpoints in a folder of this host",
    ),
    Kind(
        name="snapshot.flip",
        what="a bit of a rank's newest snapshot is flipped",
        strike=files.snapshot_flip,
        blind=_LATENT,
        needs="a Checkpointer",
    ),
    Kind(
        name="storage",
        what="storage fails (text: eio, enospc, slow, hang)",
        strike=files.storage_fails,
        takes=("text",),
        blind=_WAITS,
        needs="storage of ours: {storage} in a job that chaos makes",
    ),
)

_OWN_HOSTS = "hosts with networks of their own: a job that chaos makes with hosts"

LINKS = (
    Kind(
        name="link.cut",
        what="a host's link is cut",
        strike=links.link,
        alarms=("silence",),
        needs=_OWN_HOSTS,
        lacks=links.missing,
    ),
    Kind(
        name="link.slow",
        what="every frame of a host takes longer (delay_s)",
        strike=links.link,
        takes=("delay_s",),
        blind="all ranks wait for each other alike, so nobody stands out; after slow.pace_s the job is told to be slow",
        needs=_OWN_HOSTS,
        lacks=links.missing,
    ),
    Kind(
        name="link.lossy",
        what="a host's link loses frames (share)",
        strike=links.link,
        takes=("share",),
        blind="TCP sends again what was lost; the job is slower, and nobody stands out",
        needs=_OWN_HOSTS,
        lacks=links.missing,
    ),
    Kind(
        name="partition",
        what="a host and the controller's do not reach each other",
        strike=links.link,
        alarms=("silence",),
        needs=_OWN_HOSTS,
        lacks=links.missing,
    ),
)


def _no_clock(scene: Scene, fault: Fault) -> Struck:
    raise Cannot(_NO_CLOCK)


_NO_CLOCK = "Linux has no namespace for the wall clock, and the host's is never touched"

CLOCKS = (
    Kind(
        name="clock.jump",
        what="the wall clock jumps",
        strike=_no_clock,
        alarms=("health",),
        needs="a wall clock of its own",
        lacks=lambda: _NO_CLOCK,
    ),
)

RELEASES = (
    Kind(
        name="release.bad",
        what="a release of the job's own code, spoilt (text: syntax, import, raise, late)",
        strike=releases.bad_release,
        takes=("text",),
        alarms=("crash",),
        needs="a script in a folder of its own",
    ),
)

_ALL = (*PROCESSES, *ORDERED, *MACHINES, *FILES, *LINKS, *RELEASES, *CLOCKS)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kind_of(fault: Fault) -> Kind:
    try:
        return KINDS[fault.kind]
    except KeyError:
        raise Cannot(f"there is no fault '{fault.kind}'; holdfast chaos list shows all") from None
