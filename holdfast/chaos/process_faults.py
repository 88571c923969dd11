"""Faults of processes, which are killed, stopped, or starved of processor time or memory."""

import functools
import signal

import msgspec

from holdfast.chaos import cgroups
from holdfast.chaos.injection_records import CannotInject, ContinueProcess, DutyCycle, InjectedFault
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.process_handles import open_confirmed

_SHARE = 0.05  # of a core
_STARVED_BYTES = 64 << 10


def signal_rank(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Send SIGKILL, SIGSEGV or SIGSTOP to a rank, as the fault's kind says."""
    status = scene.read_status()
    rank = scene.choose_rank(fault, status)
    number = {"rank.kill": signal.SIGKILL, "rank.segv": signal.SIGSEGV, "rank.stop": signal.SIGSTOP}[fault.kind]
    with open_confirmed(lambda: scene.sight.rank_pid(status, rank)) as held:
        if number is signal.SIGSTOP:
            scene.keep_undo(ContinueProcess(held.pid, held.started))
        held.send_signal(number)
    node = status.node_of(rank)
    what = f"{number.name} to rank {rank} on {node} (pid {held.pid})"
    return InjectionReport(
        what=what, fault=_fault_on(fault, rank, node), ranks=(rank,), nodes=(node,), pids=(held.pid,)
    )


def slow_rank(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Slow a rank by a CPU quota or, where no quota can be set, by stopping its process in a part of every period."""
    status = scene.read_status()
    rank = scene.choose_rank(fault, status)
    node, share = status.node_of(rank), fault.share or _SHARE
    with open_confirmed(lambda: scene.sight.rank_pid(status, rank)) as held:
        try:
            group = cgroups.make_cgroup("cpu", held.pid)
            scene.keep_undo(group.leave_undo())
            cgroups.limit_cpu(group, share)
            group.add_process(held.pid, held.started)
            how = "by a quota"
        except CannotInject:
            scene.keep_undo(DutyCycle(held.pid, held.started, share))
            how = "by stopping it in between"
    what = f"rank {rank} on {node} (pid {held.pid}) gets {share:.0%} of a core, {how}"
    filled = msgspec.structs.replace(_fault_on(fault, rank, node), share=share)
    return InjectionReport(what=what, fault=filled, ranks=(rank,), nodes=(node,), pids=(held.pid,))


def starve_rank(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Limit a rank's memory, so that the kernel kills it as soon as it asks for more."""
    status = scene.read_status()
    rank = scene.choose_rank(fault, status)
    node = status.node_of(rank)
    with open_confirmed(lambda: scene.sight.rank_pid(status, rank)) as held:
        group = cgroups.make_cgroup("memory", held.pid)
        scene.keep_undo(group.leave_undo())
        group.add_process(held.pid, held.started)
        cgroups.limit_memory(group, _STARVED_BYTES)
    what = f"rank {rank} on {node} (pid {held.pid}) may have no more memory"
    return InjectionReport(
        what=what, fault=_fault_on(fault, rank, node), ranks=(rank,), nodes=(node,), pids=(held.pid,)
    )


def signal_agent(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Kill or stop an agent. Its node is then without an agent for some time, while the ranks go on."""
    status = scene.read_status()
    node = scene.choose_node(fault, status)
    with open_confirmed(lambda: scene.sight.agent_pid(node.node)) as held:
        if fault.kind == "agent.stop":
            scene.keep_undo(ContinueProcess(held.pid, held.started))
        held.send_signal(signal.SIGSTOP if fault.kind == "agent.stop" else signal.SIGKILL)
    what = f"the agent of {node.node} (pid {held.pid}) was {'stopped' if fault.kind == 'agent.stop' else 'killed'}"
    return InjectionReport(what=what, fault=_fault_on(fault, None, node.node), nodes=(node.node,), pids=(held.pid,))


def kill_controller(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    with open_confirmed(scene.sight.controller_pid) as held:
        held.send_signal(signal.SIGKILL)
    return InjectionReport(what=f"the controller (pid {held.pid}) was killed", fault=fault, pids=(held.pid,))


def kill_store(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    with open_confirmed(scene.sight.store_pid) as held:
        held.send_signal(signal.SIGKILL)
    return InjectionReport(what=f"the store (pid {held.pid}) was killed", fault=fault, pids=(held.pid,))


def kill_nodes(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Kill the holder of an active node, of a standby, or of several nodes; all processes of the node die with it."""
    status = scene.read_status()
    if fault.kind == "standby.kill":
        nodes = [scene.choose_node(fault, status, standby=True).node]
    elif fault.kind == "blast":
        nodes = sorted(
            scene.dice.sample([node.node for node in status.active], k=_blast_size(fault, len(status.active)))
        )
    else:
        nodes = [scene.choose_node(fault, status).node]
    pids = []
    for node in nodes:
        with open_confirmed(functools.partial(scene.sight.holder_pid, node)) as held:
            held.send_signal(signal.SIGKILL)
            pids.append(held.pid)
    what = f"{', '.join(nodes)} {'was' if len(nodes) == 1 else 'were'} lost"
    filled = msgspec.structs.replace(fault, node=nodes[0] if len(nodes) == 1 else "", count=fault.count and len(nodes))
    return InjectionReport(what=what, fault=filled, nodes=tuple(nodes), pids=tuple(pids))


def _blast_size(fault: InjectedFault, active: int) -> int:
    count = fault.count or max(2, active // 2)
    if count >= active:
        raise CannotInject(f"a blast of {count} would take all {active} nodes of the job, and with them all state")
    return count


def _fault_on(fault: InjectedFault, rank: int | None, node: str) -> InjectedFault:
    return msgspec.structs.replace(fault, rank=rank, node=node)
