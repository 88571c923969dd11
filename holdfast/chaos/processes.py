"""Faults of processes: killed, stopped, starved of processor time or memory."""

import functools
import signal

import msgspec

from holdfast.chaos import cgroups
from holdfast.chaos.fault import Cannot, Continue, Duty, Fault
from holdfast.chaos.hold import sure
from holdfast.chaos.scene import Scene, Struck

_SHARE = 0.05  # of a core
_STARVED_BYTES = 64 << 10


def rank_signal(scene: Scene, fault: Fault) -> Struck:
    """SIGKILL, SIGSEGV or SIGSTOP, by the fault's name."""
    status = scene.status()
    rank = scene.rank(fault, status)
    number = {"rank.kill": signal.SIGKILL, "rank.segv": signal.SIGSEGV, "rank.stop": signal.SIGSTOP}[fault.kind]
    with sure(lambda: scene.sight.pid(status, rank)) as held:
        if number is signal.SIGSTOP:
            scene.keep(Continue(held.pid, held.started))
        held.signal(number)
    node = status.node_of(rank)
    what = f"{number.name} to rank {rank} on {node} (pid {held.pid})"
    return Struck(what=what, fault=_with(fault, rank, node), ranks=(rank,), nodes=(node,), pids=(held.pid,))


def rank_slow(scene: Scene, fault: Fault) -> Struck:
    """A CPU quota where that can be had, otherwise stops in every period."""
    status = scene.status()
    rank = scene.rank(fault, status)
    node, share = status.node_of(rank), fault.share or _SHARE
    with sure(lambda: scene.sight.pid(status, rank)) as held:
        try:
            group = cgroups.make("cpu", held.pid)
            scene.keep(group.leave())
            cgroups.slow(group, share)
            group.join(held.pid, held.started)
            how = "by a quota"
        except Cannot:
            scene.keep(Duty(held.pid, held.started, share))
            how = "by stopping it in between"
    what = f"rank {rank} on {node} (pid {held.pid}) gets {share:.0%} of a core, {how}"
    filled = msgspec.structs.replace(_with(fault, rank, node), share=share)
    return Struck(what=what, fault=filled, ranks=(rank,), nodes=(node,), pids=(held.pid,))


def rank_oom(scene: Scene, fault: Fault) -> Struck:
    """The kernel kills it as soon as it asks for memory."""
    status = scene.status()
    rank = scene.rank(fault, status)
    node = status.node_of(rank)
    with sure(lambda: scene.sight.pid(status, rank)) as held:
        group = cgroups.make("memory", held.pid)
        scene.keep(group.leave())
        group.join(held.pid, held.started)
        cgroups.starve(group, _STARVED_BYTES)
    what = f"rank {rank} on {node} (pid {held.pid}) may have no more memory"
    return Struck(what=what, fault=_with(fault, rank, node), ranks=(rank,), nodes=(node,), pids=(held.pid,))


def agent_signal(scene: Scene, fault: Fault) -> Struck:
    """SIGKILL; or SIGSTOP, which cuts its node off from the controller while ranks go on."""
    status = scene.status()
    node = scene.node(fault, status)
    with sure(lambda: scene.sight.agent(node.node)) as held:
        if fault.kind == "agent.stop":
            scene.keep(Continue(held.pid, held.started))
        held.signal(signal.SIGSTOP if fault.kind == "agent.stop" else signal.SIGKILL)
    what = f"the agent of {node.node} (pid {held.pid}) was {'stopped' if fault.kind == 'agent.stop' else 'killed'}"
    return Struck(what=what, fault=_with(fault, None, node.node), nodes=(node.node,), pids=(held.pid,))


def controller_kill(scene: Scene, fault: Fault) -> Struck:
    with sure(scene.sight.controller) as held:
        held.signal(signal.SIGKILL)
    return Struck(what=f"the controller (pid {held.pid}) was killed", fault=fault, pids=(held.pid,))


def store_kill(scene: Scene, fault: Fault) -> Struck:
    with sure(scene.sight.store) as held:
        held.signal(signal.SIGKILL)
    return Struck(what=f"the store (pid {held.pid}) was killed", fault=fault, pids=(held.pid,))


def node_kill(scene: Scene, fault: Fault) -> Struck:
    """The holder, and with it everything below: an active node, a standby, or several nodes at once."""
    status = scene.status()
    if fault.kind == "standby.kill":
        nodes = [scene.node(fault, status, standby=True).node]
    elif fault.kind == "blast":
        nodes = sorted(scene.dice.sample([node.node for node in status.active], k=_blast(fault, len(status.active))))
    else:
        nodes = [scene.node(fault, status).node]
    pids = []
    for node in nodes:
        with sure(functools.partial(scene.sight.holder, node)) as held:
            held.signal(signal.SIGKILL)
            pids.append(held.pid)
    what = f"{', '.join(nodes)} {'was' if len(nodes) == 1 else 'were'} lost"
    filled = msgspec.structs.replace(fault, node=nodes[0] if len(nodes) == 1 else "", count=fault.count and len(nodes))
    return Struck(what=what, fault=filled, nodes=tuple(nodes), pids=tuple(pids))


def _blast(fault: Fault, active: int) -> int:
    count = fault.count or max(2, active // 2)
    if count >= active:
        raise Cannot(f"a blast of {count} would take all {active} nodes of the job, and with them all state")
    return count


def _with(fault: Fault, rank: int | None, node: str) -> Fault:
    return msgspec.structs.replace(fault, rank=rank, node=node)
