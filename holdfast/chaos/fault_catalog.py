"""The catalog of fault kinds: what each does, which fields it has, what it needs, and which alarm should follow."""

import os
from collections.abc import Callable

import msgspec

from holdfast.chaos import (
    cgroups,
    disk_faults,
    hardware_faults,
    link_faults,
    process_faults,
    rank_faults,
    release_faults,
)
from holdfast.chaos.injection_records import CannotInject, InjectedFault
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene

Injector = Callable[[InjectionScene, InjectedFault], InjectionReport]


class FaultKind(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    what: str
    strike: Injector
    takes: tuple[str, ...] = ()  # fields of its own
    alarms: tuple[str, ...] = ()  # one of these should follow
    blind: str = ""  # why none does
    needs: str = ""  # of the job or the machine, in words
    lacks: Callable[[], str] = lambda: ""  # why it cannot be done on this machine; empty: it can


def _lacks_root(what: str) -> Callable[[], str]:
    return lambda: "" if os.geteuid() == 0 else f"{what} takes root"


_GOES_ON = "training goes on, and another one is started"

PROCESSES = (
    FaultKind(name="rank.kill", what="SIGKILL to a rank", strike=process_faults.signal_rank, alarms=("crash",)),
    FaultKind(name="rank.segv", what="SIGSEGV to a rank", strike=process_faults.signal_rank, alarms=("crash",)),
    FaultKind(name="rank.stop", what="SIGSTOP to a rank", strike=process_faults.signal_rank, alarms=("hang",)),
    FaultKind(
        name="rank.slow",
        what="a rank gets a part of a core (share)",
        strike=process_faults.slow_rank,
        takes=("share",),
        alarms=("slow",),
    ),
    FaultKind(
        name="rank.oom",
        what="a rank may have no more memory, and the kernel kills it",
        strike=process_faults.starve_rank,
        alarms=("lines", "crash"),
        needs="root and a cgroup controller for memory",
        lacks=lambda: cgroups.missing_reason("memory"),
    ),
    FaultKind(name="agent.kill", what="SIGKILL to an agent", strike=process_faults.signal_agent, blind=_GOES_ON),
    FaultKind(
        name="agent.stop",
        what="SIGSTOP to an agent: its node is cut off, its ranks go on",
        strike=process_faults.signal_agent,
        alarms=("silence",),
    ),
    FaultKind(
        name="controller.kill", what="SIGKILL to the controller", strike=process_faults.kill_controller, blind=_GOES_ON
    ),
    FaultKind(name="store.kill", what="SIGKILL to the store", strike=process_faults.kill_store, blind=_GOES_ON),
    FaultKind(
        name="node.kill",
        what="a node is lost with all its processes",
        strike=process_faults.kill_nodes,
        alarms=("silence",),
    ),
    FaultKind(name="standby.kill", what="a standby is lost", strike=process_faults.kill_nodes, alarms=("silence",)),
    FaultKind(
        name="blast",
        what="several nodes are lost at once, as behind one switch (count)",
        strike=process_faults.kill_nodes,
        takes=("count",),
        alarms=("silence",),
    ),
)

_OBEDIENT = "ranks that take orders: --preload holdfast.chaos.inrank"

ORDERED = (
    FaultKind(
        name="rank.raise",
        what="an exception in a rank's step (error)",
        strike=rank_faults.order_rank,
        takes=("error",),
        alarms=("crash",),
        needs=_OBEDIENT,
    ),
    FaultKind(
        name="rank.exit",
        what="a rank ends itself (code)",
        strike=rank_faults.order_rank,
        takes=("code",),
        alarms=("crash",),
        needs=_OBEDIENT,
    ),
    FaultKind(
        name="rank.hang",
        what="a rank sleeps in its step",
        strike=rank_faults.order_rank,
        alarms=("hang",),
        needs=_OBEDIENT,
    ),
    FaultKind(
        name="loss.nan", what="NaN in a forward pass", strike=rank_faults.order_rank, alarms=("loss",), needs=_OBEDIENT
    ),
    FaultKind(
        name="bits",
        what="bits are flipped (place, bits, count, chance)",
        strike=rank_faults.order_rank,
        takes=("place", "bits", "count", "chance"),
        alarms=("replica", "loss"),
        needs=_OBEDIENT,
    ),
)

_OWN_MACHINES = "machines of its own: a job that chaos makes with machines = true"
_HARD = ("lines",)

MACHINES = (
    FaultKind(
        name="kernel.xid",
        what="Xid 79 in the log of a node's kernel (text, count)",
        strike=hardware_faults.write_kernel_line,
        takes=("text", "count"),
        alarms=_HARD,
        needs=_OWN_MACHINES,
    ),
    FaultKind(
        name="kernel.aer",
        what="a fatal PCIe error in the log of a node's kernel",
        strike=hardware_faults.write_kernel_line,
        takes=("text", "count"),
        alarms=_HARD,
        needs=_OWN_MACHINES,
    ),
    FaultKind(
        name="kernel.mce",
        what="a machine check in the log of a node's kernel",
        strike=hardware_faults.write_kernel_line,
        takes=("text", "count"),
        alarms=_HARD,
        needs=_OWN_MACHINES,
    ),
    FaultKind(
        name="gpu",
        what="readings of a GPU (reading: lost, ecc, hot, narrow, nvlink, hung)",
        strike=hardware_faults.set_gpu_reading,
        takes=("reading",),
        alarms=("health",),
        needs=_OWN_MACHINES,
    ),
)

_OWN_DISK = "a small disk of its own: a job that chaos makes with disk_mib"
_WAITS = "storage that fails costs a sentence and a checkpoint, never a step"
_LATENT = "nobody reads it before a restore, which then leaves it out"

FILES = (
    FaultKind(
        name="disk.full",
        what="a disk of the job is full (path)",
        strike=disk_faults.fill_disk,
        takes=("path",),
        alarms=("health",),
        needs=_OWN_DISK,
        lacks=_lacks_root("to mount a small disk"),
    ),
    FaultKind(
        name="disk.readonly",
        what="a disk of the job turns read-only (path)",
        strike=disk_faults.make_disk_readonly,
        takes=("path",),
        alarms=("health",),
        needs=_OWN_DISK,
        lacks=_lacks_root("to mount a small disk"),
    ),
    FaultKind(
        name="disk.slow",
        what="the disk of a node takes so many bytes a second (bytes_s, path)",
        strike=disk_faults.slow_disk,
        takes=("bytes_s", "path"),
        blind=_WAITS,
        needs="root, a cgroup controller for disks, and checkpoints",
        lacks=lambda: cgroups.missing_reason("io"),
    ),
    FaultKind(
        name="shm.full",
        what="/dev/shm of the job is full",
        strike=disk_faults.fill_disk,
        alarms=("health",),
        needs="a /dev/shm of its own: a job that chaos makes with shm_mib",
        lacks=_lacks_root("to mount a /dev/shm of its own"),
    ),
    FaultKind(
        name="checkpoint.flip",
        what="a bit of the newest checkpoint is flipped (path)",
        strike=disk_faults.flip_checkpoint,
        takes=("path",),
        blind=_LATENT,
        needs="checkpoints in a folder of this host",
    ),
    FaultKind(
        name="snapshot.flip",
        what="a bit of a rank's newest snapshot is flipped",
        strike=disk_faults.flip_snapshot,
        blind=_LATENT,
        needs="a Checkpointer",
    ),
    FaultKind(
        name="storage",
        what="storage fails (text: eio, enospc, slow, hang)",
        strike=disk_faults.fail_storage,
        takes=("text",),
        blind=_WAITS,
        needs="storage of ours: {storage} in a job that chaos makes",
    ),
)

_OWN_HOSTS = "hosts with networks of their own: a job that chaos makes with hosts"

LINKS = (
    FaultKind(
        name="link.cut",
        what="a host's link is cut",
        strike=link_faults.strike_link,
        alarms=("silence",),
        needs=_OWN_HOSTS,
        lacks=link_faults.missing_reason,
    ),
    FaultKind(
        name="link.slow",
        what="every frame of a host takes longer (delay_s)",
        strike=link_faults.strike_link,
        takes=("delay_s",),
        blind="all ranks wait for each other alike, so nobody stands out; after slow.pace_s the job is told to be slow",
        needs=_OWN_HOSTS,
        lacks=link_faults.missing_reason,
    ),
    FaultKind(
        name="link.lossy",
        what="a host's link loses frames (share)",
        strike=link_faults.strike_link,
        takes=("share",),
        blind="TCP sends again what was lost; the job is slower, and nobody stands out",
        needs=_OWN_HOSTS,
        lacks=link_faults.missing_reason,
    ),
    FaultKind(
        name="partition",
        what="a host and the controller's do not reach each other",
        strike=link_faults.strike_link,
        alarms=("silence",),
        needs=_OWN_HOSTS,
        lacks=link_faults.missing_reason,
    ),
)


def _refuse_clock(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    raise CannotInject(_NO_CLOCK)


_NO_CLOCK = "Linux has no namespace for the wall clock, and the host's is never touched"

CLOCKS = (
    FaultKind(
        name="clock.jump",
        what="the wall clock jumps",
        strike=_refuse_clock,
        alarms=("health",),
        needs="a wall clock of its own",
        lacks=lambda: _NO_CLOCK,
    ),
)

RELEASES = (
    FaultKind(
        name="release.bad",
        what="a release of the job's own code, spoilt (text: syntax, import, raise, late)",
        strike=release_faults.bring_bad_release,
        takes=("text",),
        alarms=("crash",),
        needs="a script in a folder of its own",
    ),
)

_ALL = (*PROCESSES, *ORDERED, *MACHINES, *FILES, *LINKS, *RELEASES, *CLOCKS)
KINDS: dict[str, FaultKind] = {kind.name: kind for kind in _ALL}


def find_kind(fault: InjectedFault) -> FaultKind:
    try:
        return KINDS[fault.kind]
    except KeyError:
        raise CannotInject(f"there is no fault '{fault.kind}'; holdfast chaos list shows all") from None
