"""The process of an agent: puts the agent together with the sockets, files and processes of its node, and runs it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.agent_interfaces import AgentEvents, AgentIdentity, AgentParts
from holdfast.agent.agent_shell import Agent
from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.agent.connection import peer_reach
from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.agent.connection.controller_dialer import ControllerDialer
from holdfast.agent.diagnostics.probe_and_replay_errands import NodeDiagnosis
from holdfast.agent.health_monitor import HealthMonitor, MonitorPorts
from holdfast.agent.rank import last_words, last_words_judge
from holdfast.agent.rank.compile_folder_claim import claim_compile_folder
from holdfast.agent.rank.last_words_judge_client import JudgeClient
from holdfast.agent.rank.log_rotation import LogRotation
from holdfast.agent.rank.lost_agent_notice import tell_lost_agent
from holdfast.agent.rank.nccl_ras import ras_address
from holdfast.agent.rank.rank_processes import RankProcesses
from holdfast.agent.rank.stack_tracer import NodeTracer, StackTracer
from holdfast.agent.releases.compile_cache_distribution import TorchCompileCache
from holdfast.agent.releases.release_stager import ReleaseStager
from holdfast.agent.snapshots.keeper_assembly import build_keeper
from holdfast.agent.snapshots.keeper_identity import make_keeper_identity
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts
from holdfast.agent.system import snapshot_memory
from holdfast.linux import preimported_fork
from holdfast.linux.own_process_settings import END_WARNING, write_no_core
from holdfast.logs.secret_masking import Masker, keep_masked_log, make_secret_masker
from holdfast.model.detector_alarm import Alarm
from holdfast.model.observation import Exit
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import NodeSpec

JudgeLastWords = Callable[[Exit, Path], Awaitable[Alarm]]  # told the folder in which the rank has left them


def build_agent(node_dir: Path, sock: socket.socket, judge: JudgeLastWords, mask: Masker) -> Agent:
    """Put together the agent of a node; `sock` is connected to the node's holder, and `mask` hides secrets."""
    spec = run_and_node_specs.read_json(node_dir / "spec.json", NodeSpec)
    identity = AgentIdentity(
        node=spec.node,
        host=socket.gethostname(),
        order=spec.order,
        nproc=spec.nproc,
        settings=spec.settings,
        on_host=spec.on_host,
    )
    return Agent(identity, lambda events: _assemble_parts(spec, node_dir, sock, judge, events, mask=mask))


def _assemble_parts(
    spec: NodeSpec, node_dir: Path, sock: socket.socket, judge: JudgeLastWords, events: AgentEvents, *, mask: Masker
) -> AgentParts:
    clock = SystemClock()
    dialer = ControllerDialer(spec)
    controller_clock = ControllerClock(clock, same_machine=dialer.same_machine)
    staging = ReleaseStager(spec, node_dir, dialer, clock, events.say)
    ranks = RankProcesses(
        spec, node_dir, sock, clock,
        on_rank_exit=events.on_rank_exit, say=events.say, staged=staging.staged_location,
    )  # fmt: skip
    budget = snapshot_memory.SnapshotBudget(lambda: snapshot_memory.measure_room(node_dir, spec))
    reports = (events.say, events.on_copies, events.on_checkpoints, events.on_marks)
    keeper_ports = KeeperPorts(ranks.make_arena, clock, *reports, ranks.slots)
    keeper = build_keeper(make_keeper_identity(spec, ranks.keeper_path), keeper_ports, budget)
    ties = MonitorPorts(
        events.on_alarm, events.on_traffic, events.on_logged,
        lambda: [*ranks.held.values()], controller_clock.wall_s, clock,
    )  # fmt: skip
    health = HealthMonitor(node_dir, spec, ties)
    tracer = StackTracer(spec.node, spec.nproc, clock, ras=ras_address(os.environ), mask=mask)
    return AgentParts(
        clock=clock,
        controller_clock=controller_clock,
        dialer=dialer,
        notes=AgentStateFiles(node_dir),
        ranks=ranks,
        tracer=NodeTracer(tracer, ranks.slots),
        keeper=keeper,
        staging=staging,
        diagnosis=NodeDiagnosis(spec, node_dir, ranks.environment_for, ranks.entry_for, staging.release_fault),
        health=health,
        judge=lambda exit: judge(exit, last_words.rank_folder(spec.log_dir, exit.generation, exit.rank)),
        mask=mask,
        reach=partial(peer_reach.try_peers, spec.node),
        background=(
            keeper.serve,
            ranks.survivors.serve,
            keeper.watch_snapshots,
            keeper.check_snapshots,
            keeper.hashing.run,
            keeper.gaps.run,
            health.run,
            staging.watch,
            TorchCompileCache(spec, dialer, lambda: bool(ranks.held), events.say).run,
            partial(LogRotation(spec).run, ranks.running_ranks),
            partial(_heed_signals, events),
            partial(tell_lost_agent, ranks, clock, controller_clock, events.on_alarm),
        ),
    )


async def _heed_signals(events: AgentEvents) -> None:
    """From now on, let SIGINT make the node leave, and pass a warning on to the controller. An agent that is not ready
    yet is ended by SIGINT, and does not hear a warning."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, events.on_leave_request)
    loop.add_signal_handler(END_WARNING, events.on_end_warning)


def main() -> None:
    mask = make_secret_masker()
    keep_masked_log(logging.StreamHandler(sys.stderr), mask)
    write_no_core()
    claim_compile_folder(os.environ)  # ranks get this environment
    node_dir = Path(sys.argv[1])
    line = last_words_judge.start(node_dir)  # while we have no threads, and nothing open that it should not have
    holder = socket.socket(fileno=int(sys.argv[2]))
    asyncio.run(build_agent(node_dir, holder, JudgeClient(line, mask).judge_exit, mask).run())


if __name__ == "__main__":
    preimported_fork.run(main)
