"""`holdfast sim dst`: tests the real controller and agents against simulated failures, seed by seed."""

import argparse
import re
import time
from pathlib import Path

from holdfast.agent.agent_interfaces import AgentEvents, AgentIdentity, AgentParts
from holdfast.agent.agent_shell import Agent
from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter
from holdfast.agent.snapshots.keeper import Keeper, KeeperParts
from holdfast.agent.snapshots.keeper_identity import KeeperIdentity
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts
from holdfast.agent.snapshots.step_gap_watch import UnwatchedRanks
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.config import Settings
from holdfast.controller import composition, order_admission
from holdfast.controller.access.link_opener import LinkOpener
from holdfast.controller_interfaces import ControllerPorts, Socket
from holdfast.logs import catalog_files
from holdfast.logs.secret_masking import Masker
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Order
from holdfast.model.job_and_seats import HostIdentity, Job
from holdfast.sim.dst.agent_process import AgentProcess
from holdfast.sim.dst.dst_world import RealParts
from holdfast.sim.dst.real_program_protocols import DstAgent, DstController
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.seed_run import SeedResult, play_seed
from holdfast.sim.dst.simulated_agent_notes import SimKeeperNotes, SimNotes
from holdfast.sim.dst.simulated_errands import SimDiagnosis, SimStaging, SimTracer
from holdfast.sim.dst.simulated_keeper_links import run_at_once
from holdfast.sim.dst.simulated_local_checkpoints import SimStateDisk
from holdfast.sim.dst.simulated_rank_holder import SimHolder

BROKEN = 1
_MASK = Masker(hosts=False)  # patterns are compiled once for all seeds
_LOOK_S = 0.5  # of keepers, at the headers of snapshots: a real one looks more often, which would cost most of a seed
_SEED = re.compile("[0-9]{1,12}")


class RealController:
    """The real controller, with the interface that the simulated world expects."""

    def __init__(self, settings: Settings, ports: ControllerPorts) -> None:
        built = composition.build_controller(settings, ports)
        self._controller, self._ingest = built.controller, built.ingest
        self.view, self.ledger = self._controller.view, self._controller.ledger

    async def run(self, job: Job) -> int:
        return await self._controller.run(job, Release(number=1))

    def give_order(self, order: Order) -> str:
        refused = order_admission.order_refusal(self.view, order)
        if refused:
            return refused.text
        self._controller.process_event(order)
        return ""

    async def serve_agent(self, socket: Socket) -> None:
        await self._ingest.attend_link(socket, LinkOpener())


def build_controller(settings: Settings, ports: ControllerPorts) -> DstController:
    return RealController(settings, ports)


def build_agent(process: AgentProcess) -> DstAgent:
    """Make the real agent of a simulated machine."""
    setup, machine = process.scene.setup, process.machine
    identity = AgentIdentity(
        node=machine.name,
        host=machine.name,
        order=machine.order,
        nproc=setup.nproc,
        settings=setup.settings,
        on_host=HostIdentity(id=machine.name),
    )
    return Agent(identity, lambda events: _play_parts(process, events))


def _play_parts(process: AgentProcess, events: AgentEvents) -> AgentParts:
    machine, scene = process.machine, process.scene
    controller_clock = ControllerClock(machine.clock)
    holder = process.open_holder(events.on_rank_exit)
    keeper = _build_keeper(process, holder, events)
    return AgentParts(
        clock=machine.clock,
        controller_clock=controller_clock,
        dialer=process,
        notes=SimNotes(process),
        ranks=holder,
        tracer=SimTracer(machine),
        keeper=keeper,
        staging=SimStaging(process.chances),
        diagnosis=SimDiagnosis(scene),
        health=process.open_health(events.on_alarm, lambda: machine.clock.monotonic() + controller_clock.offset_s),
        judge=process.judge_exit,
        mask=_MASK,
        reach=process.links.try_peers,
        background=(keeper.serve, keeper.watch_snapshots),
    )


def _build_keeper(process: AgentProcess, holder: SimHolder, events: AgentEvents) -> Keeper:
    machine, settings = process.machine, process.scene.setup.settings
    arenas, writer = ArenaTable(), CheckpointWriter(events.say, machine.clock, events.on_checkpoints)
    process.persisting = writer
    place = KeeperIdentity(
        node=machine.name,
        run_id=process.scene.setup.job.run_id,
        socket_path=Path(machine.name),
        limits=settings.backup,
        disk=settings.disk,
        replica=settings.replica,
        look_s=_LOOK_S,
    )
    parts = KeeperParts(
        arenas=arenas,
        wait_for_loop=run_at_once,
        notes=SimKeeperNotes(process),
        links=process.links,
        disk=SimStateDisk(process, settings.disk, lambda rank: own.arena if (own := arenas.find_arena(rank)) else None),
        persisting=writer,
    )
    ports = KeeperPorts(
        holder.make_arena, machine.clock, events.say, events.on_copies, events.on_checkpoints, events.on_marks,
        UnwatchedRanks(),
    )  # fmt: skip
    return Keeper(place, ports, parts)


REAL_PARTS = RealParts(build_controller=build_controller, build_agent=build_agent)


def add_command(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    what = "break the control plane of small jobs at random, by seed, and check that they recover"
    dst = commands.add_parser("dst", help="break the control plane, seed by seed", description=what)
    dst.add_argument("--seed", type=int, help="one seed; the same seed is always the same")
    dst.add_argument("--seeds", metavar="A:B", help="all seeds from A up to, not including, B")
    dst.add_argument("--verbose", action="store_true", help="print everything that happens")


def run(args: argparse.Namespace) -> int:
    began_at, known, broken = time.monotonic(), catalog_files.load_failures(), 0
    seeds = _parse_seeds(args)
    for seed in seeds:
        result = play_seed(draw_setup(seed), REAL_PARTS, known, print if args.verbose else None)
        if result.failure:
            broken += 1
            print(f"seed {seed} is broken {result.failure}\nto see it: {repeat_command(seed)}", flush=True)
        elif len(seeds) == 1:
            print(result_text(result))
    took_s = time.monotonic() - began_at
    print(f"{len(seeds)} seeds, {broken} broken, {took_s:.1f} s")
    return BROKEN if broken else 0


def repeat_command(seed: int) -> str:
    return f"holdfast sim dst --seed {seed} --verbose"


def result_text(result: SeedResult) -> str:
    struck = ", ".join(f"{count} {kind}" for kind, count in result.struck.items()) or "none"
    return (
        f"seed {result.seed}: {result.entries} entries, {result.steps} steps, {result.generations} generations, "
        f"{result.lives} lives of the controller in {result.virtual_s:.0f} s; faults: {struck}; "
        f"it ended: {result.ended or 'on request'}"
    )


def _parse_seeds(args: argparse.Namespace) -> range:
    if (args.seed is None) == (args.seeds is None):
        raise UsageError("give either --seed N or --seeds A:B")
    if args.seed is not None:
        return range(args.seed, args.seed + 1)
    first, _, last = args.seeds.partition(":")
    if not (_SEED.fullmatch(first) and _SEED.fullmatch(last) and int(first) < int(last)):
        raise UsageError(f"--seeds {args.seeds}: write it as A:B, like 0:1000")
    return range(int(first), int(last))
