"""The controller's process, which `holdfast run` starts and restarts."""

import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from aiohttp import web

from holdfast.cli.launch.controller_console import (
    ConsoleTeller,
    SaidLog,
    leaf_exceptions,
    tell_interruption,
    tell_stopped_wait,
)
from holdfast.cli.launch.controller_log import ControllerLog, open_log
from holdfast.cli.launch.journal_and_notes import RunRecord, open_record
from holdfast.cli.launch.run_leases import ask_on_loop, hold_lease
from holdfast.cli.launch.slurm_launch import make_plan
from holdfast.cli.launch.stoppable_wait import StoppableWait, WaitStoppedError
from holdfast.cli.launch.wait_teller import WaitTeller
from holdfast.cli.run_dirs import run_dir_secrets, run_directory
from holdfast.cli.run_dirs.remembered_imports import ImportsMemory, recall_imports
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.block_list_file import BlockListFile, BlockListThreads
from holdfast.controller.access.caller_admission import PortAccess, Right, admit_by_socket, make_user_token
from holdfast.controller.access.connection_gate import ConnectionGate
from holdfast.controller.access.enrolment_token_api import TokenMinting
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.controller.access.user_ca_nodes import NEEDLESS, CertificateEnrolment
from holdfast.controller.access.user_tokens import UserTokens
from holdfast.controller.api import ApiEntrance, make_api, make_runner
from holdfast.controller.composition import BuiltController, build_controller
from holdfast.controller.control_loop import Controller
from holdfast.controller.decider_rebuild import RebuildError
from holdfast.controller.failure_opinions import FailureOpinions
from holdfast.controller.incident_traces import IncidentTraces
from holdfast.controller.job_clock import SteadyClock
from holdfast.controller.masked_fleet import MaskedFleet
from holdfast.controller.store_process import StoreProcess
from holdfast.controller.user_hooks import UserHooks, job_standing
from holdfast.controller_interfaces import ControllerPorts, Fleet, FleetRefusal
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.core.decide.job_view import JobView
from holdfast.fleet.local_process_fleet import LocalFleet
from holdfast.fleet.self_joining_fleet import JoinFleet
from holdfast.fleet.slurm_fleet import SlurmFleet
from holdfast.journal.journal_errors import (
    JournalAwayError,
    JournalError,
    JournalFullError,
    JournalHeldError,
    LeaseLostError,
)
from holdfast.linux import own_process_settings
from holdfast.linux.preimported_fork import KEPT
from holdfast.logs.secret_masking import Masker
from holdfast.model.decider_events import Order
from holdfast.model.journal_entry import Entry
from holdfast.wire import folder_use_lock, program_fork_server, run_and_node_specs, unix_sockets
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.run_and_node_specs import ControllerAddress, RunEnd, RunSpec

_BACKLOG = 4096
_TOKEN_S = 3600.0  # for a node that has been started to enrol
_HELD_LOOK_S = 1.0
_PREDECESSOR_S = 5.0  # for one that was killed to be gone


def main() -> int:
    """Run the controller's process and return its exit code. The arguments are RUN_DIR, the supervisor's pid and, if
    the journal is in Postgres, the lease holder's name. The first inherited file descriptor is the listening socket of
    the controller's port."""
    run_dir, front, holder = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:4])
    own_process_settings.die_with(front)
    fd = int(os.environ.pop(KEPT).split(",")[0])
    log, mask = open_log(run_dir)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    say = SaidLog(run_dir, mask)
    ended: RunEnd | None = None
    run = run_directory.read_spec(run_dir)
    mask.learn(run_dir_secrets.list_secrets(run_dir, run.settings))
    lock = run_directory.controller_lock(run, run_dir)
    if (alone := folder_use_lock.lock_file_alone(lock, _PREDECESSOR_S)) is None:
        say(f"another controller runs in {run_dir}, so this one ends")
        return 1
    try:
        ended = asyncio.run(_run_logged(log, _run_leased(run_dir, socket.socket(fileno=fd), say, holder, mask)))
    except* WaitStoppedError as group:
        ended = tell_stopped_wait(run, run_dir, next(leaf_exceptions(group)), say)
    except* (JournalFullError, JournalAwayError, LeaseLostError) as group:
        tell_interruption(run_dir, group, say)  # which is no end: the front knows what to do
    except* (JournalError, RebuildError, UsageError, FleetRefusal) as group:
        sentences = [str(e) for e in leaf_exceptions(group)]
        ended = RunEnd(code=2 if group.subgroup(FleetRefusal) else 1, reason="; ".join(sentences))
        say(f"{ended.reason}; ending the job")
    if ended is None:
        return 1
    run_and_node_specs.write_json(run_dir / "exit.json", ended)
    os.close(alone)
    return ended.code


async def _run_logged(log: ControllerLog, work: Coroutine[None, None, RunEnd]) -> RunEnd:
    """Run the controller, and keep its log bounded meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(log.watch_size())
        ended = await work
        watching.cancel()
    return ended


async def _run_leased(run_dir: Path, listener: socket.socket, say: SaidLog, holder: str, mask: Masker) -> RunEnd:
    """Run the controller until the run ends. If other hosts may see its directory, hold its lease meanwhile."""
    own_process_settings.raise_file_limit()
    own_process_settings.write_no_core()
    wait = StoppableWait(run_dir)
    wait.heed_signals()
    run = run_directory.read_spec(run_dir)
    async with hold_lease(run, run_dir, say, wait) as check_lease:
        record = await _open_when_free(run, run_dir, holder, say, check_lease, wait=wait)
        return await _run_controller(run_dir, record, listener, say, mask=mask, came=wait.signals)


async def _open_when_free(
    run: RunSpec, run_dir: Path, holder: str, say: SaidLog, check_lease: Callable[[], None], *, wait: StoppableWait
) -> RunRecord:
    """Open the journal. Wait while a controller that does not act any more has it open still."""
    told = ""
    while True:
        try:
            return open_record(run, run_dir, holder, say, check_lease)
        except JournalHeldError as e:
            if str(e) != told:
                told = str(e)
                say(f"{told}; waiting until that one has ended")
        async with wait.waiting():
            await asyncio.sleep(_HELD_LOOK_S)


async def _run_controller(
    run_dir: Path, record: RunRecord, listener: socket.socket, say: SaidLog, *, mask: Masker, came: list[int]
) -> RunEnd:
    """Run the controller until the run ends; `came` are the signals that came before."""
    run = run_directory.read_spec(run_dir)
    env = run_directory.node_environment(run_dir)
    url = run_directory.web_address(run.host, listener.getsockname()[1], "http" if run.fleet == "local" else "https")
    store = StoreProcess(run_dir, run.host, run.settings.node.lost_s, env, program_fork_server.socket_path(run_dir))
    tokens = NodeTokens(run_dir_secrets.door_keys_folder(run_dir), record.put_keys)
    fleet = MaskedFleet(_make_fleet(run, run_dir, env, tokens, record), mask)
    listeners = EntryListeners(run, run_dir, record, say, mask)
    ports = _make_ports(run, run_dir, record, fleet=fleet, store=store, say=say, listeners=listeners)
    built = build_controller(run.settings, ports)
    controller = built.controller
    memory = ImportsMemory(run.entry, lambda: built.ingest.registry.imports)
    built.ingest.registry.record_imports(recall_imports(run.entry))
    audit = AuditLog(run_dir)
    port = NetworkPort(built, run, run_dir, audit, tokens)
    runners = [await _open_door(built, run_dir, audit, port), await port.open()]

    def begun() -> None:
        listeners.teller.set_phase(controller.view.phase)
        _on_signals(controller, in_allocation=bool(run.allocation), come=came)
        address = ControllerAddress(url=url, pid=os.getpid(), started_at=time.time())
        run_and_node_specs.write_json(run_dir / "controller.json", address)

    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(listeners.hooks.run())
        works = [store.connect_ahead(start=not run.resumed_at), store.watch_process(controller.on_store_lost)]
        works += [port.porch.run(listener), record.hand_over(), memory.run()]
        works += [
            WaitTeller(controller.view, controller.clock, say).run(),
            listeners.opinions.run(controller.announce_news),
        ]
        beside = [tasks.create_task(one) for one in works]
        code = await controller.run(run.job, run.release, begun, run.started_at, resumed_at=run.resumed_at)
        await store.quit()  # one that was started ahead, if an earlier controller had ended the job
        listeners.opinions.finish_up()
        for task in beside:
            task.cancel()
        await listeners.finish_up(telling, run.settings.hook.timeout_s)
    account = controller.ledger.make_account()
    memory.write_news()
    await _close_doors(run_dir, runners)
    record.forget_keys()
    listeners.teller.tell_end(account, code, goes_on=run_directory.outlives_nodes(run) and code == OUT_OF_TIME)
    return RunEnd(code=code, reason=account.ending)


async def _close_doors(run_dir: Path, runners: list[web.AppRunner]) -> None:
    for runner in runners:
        await runner.cleanup()
    run_directory.door_path(run_dir).unlink(missing_ok=True)
    (run_dir / "controller.json").unlink(missing_ok=True)


async def _open_door(built: BuiltController, run_dir: Path, audit: AuditLog, port: "NetworkPort") -> web.AppRunner:
    """Open the unix socket for callers on this host, whom the kernel identifies."""
    runner = make_runner(make_api(built, ApiEntrance(admit_by_socket, audit, minting=port.minting)))
    await runner.setup()
    await web.SockSite(runner, unix_sockets.listen(run_directory.door_path(run_dir), backlog=_BACKLOG)).start()
    return runner


class NetworkPort:
    """The controller's network port: people prove who they are by tokens, nodes of other hosts by certificates."""

    def __init__(
        self, built: BuiltController, run: RunSpec, run_dir: Path, audit: AuditLog, tokens: NodeTokens
    ) -> None:
        own = make_user_token("RUN_DIR/token", Right.ADMIN, run_dir_secrets.read_token(run_dir))
        badges = UserTokens(run_dir_secrets.people_path(), (own,))
        self.minting: TokenMinting | None = None
        if run.fleet == "local":
            self.porch = ConnectionGate(self._make_protocol, None)
            door = ApiEntrance(PortAccess(badges, run.host), audit, None, self.porch.note_proved)
        else:
            taking = self._make_enrolling(built, run.job.run_id, run_dir, audit, tokens)
            keys = mutual_tls.KeyFiles.in_folder(run_dir_secrets.door_keys_folder(run_dir))
            self.porch = ConnectionGate(self._make_protocol, mutual_tls.server_tls(keys, strangers=True))
            admit = PortAccess(badges, run.host, taking.certificate_refusal)
            door = ApiEntrance(admit, audit, taking, self.porch.note_proved, self.minting)
        self._runner = make_runner(make_api(built, door))

    def _make_enrolling(
        self, built: BuiltController, run_id: str, run_dir: Path, audit: AuditLog, tokens: NodeTokens
    ) -> NodeEnrolment | CertificateEnrolment:
        """Return the object that enrols hosts as nodes: by certificates from the user, or by secret and tokens."""
        folder = run_dir_secrets.door_keys_folder(run_dir)
        if run_dir_secrets.is_certified(run_dir):
            self.minting = TokenMinting(audit, None, NEEDLESS)
            return CertificateEnrolment(folder, run_id, audit, built.certificates, built.links)
        self.minting = TokenMinting(audit, tokens)
        return NodeEnrolment(
            run_dir_secrets.open_authority(run_dir),
            run_dir_secrets.read_door_secret(run_dir),
            run_id,
            audit=audit,
            tokens=tokens,
            certificates=built.certificates,
            admission=built.ingest.admission,
            announce=built.controller.process_event,
        )

    async def open(self) -> web.AppRunner:
        await self._runner.setup()
        return self._runner

    def _make_protocol(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return self._runner.server()


class EntryListeners:
    """Passes new journal entries to the console, to opinions, to traces and to hooks. Hooks also get old entries,
    because earlier controllers may have ended before they sent their notices."""

    def __init__(self, run: RunSpec, run_dir: Path, record: RunRecord, say: SaidLog, mask: Masker) -> None:
        self.teller = ConsoleTeller(run_dir, say)
        self.opinions = FailureOpinions(run.settings, run.log_dir, say, mask)
        own = run.settings.hook
        self.hooks = UserHooks(own, run.job.run_id, run_dir, run.entry.cwd, notes=record.notes, say=say, mask=mask)
        self._traces = IncidentTraces(run.job.run_id, os.environ)

    def on_entry(self, entry: Entry, view: JobView) -> None:
        self.teller.on_entry(entry, view)
        self.opinions.on_entry(entry, view)
        self._traces.on_entry(entry)
        self.on_replayed(entry, view)

    def on_replayed(self, entry: Entry, view: JobView) -> None:
        self.hooks.on_entry(entry, job_standing(view))

    async def finish_up(self, telling: asyncio.Task[None], hooks_s: float) -> None:
        """Send what is left to send; hooks, which the task `telling` calls, have `hooks_s` seconds for that."""
        self.hooks.finish_up()
        await asyncio.wait({telling}, timeout=hooks_s)
        telling.cancel()
        await asyncio.to_thread(self._traces.finish_up)


def _make_ports(
    run: RunSpec,
    run_dir: Path,
    record: RunRecord,
    *,
    fleet: Fleet,
    store: StoreProcess,
    say: SaidLog,
    listeners: EntryListeners,
) -> ControllerPorts:
    return ControllerPorts(
        journal=record.journal,
        fleet=fleet,
        store=store,
        notes=record.notes,
        checkpoints=record.checkpoints,
        archives=run_dir / "releases",
        blocked=_open_block_list(run),
        probe_history=record.notes,
        make_clock=SteadyClock,
        say=say,
        on_entry=listeners.on_entry,
        on_replayed=listeners.on_replayed,
    )


def _open_block_list(run: RunSpec) -> BlockListThreads:
    """Open the block list in the file that the settings name. Without such a file, open the list of the journal's
    database or, if the run has no database, the list of this user."""
    path = run.settings.block.path
    if path or not run.journal:
        return BlockListThreads(
            BlockListFile(run_directory.block_list_path(path)), f"--list {shlex.quote(path)}" if path else ""
        )
    from holdfast.controller.access.block_list_database import BlockListDatabase

    return BlockListThreads(BlockListDatabase(run.journal), f"--journal {shlex.quote(run.journal)}")


def _make_fleet(run: RunSpec, run_dir: Path, env: dict[str, str], tokens: NodeTokens, record: RunRecord) -> Fleet:
    """Return the fleet that the run names. Before it changes anything in a cluster, it asks the journal for the epoch,
    which raises if another controller acts by now."""
    epoch = ask_on_loop(lambda: record.journal.epoch)
    if run.fleet == "join":
        return JoinFleet()
    if run.fleet == "slurm":
        plan = make_plan(run, run_dir)
        return SlurmFleet(run_dir, plan, env, lambda name: str(tokens.mint_token(name, _TOKEN_S)), epoch)
    if run.fleet == "kubernetes":
        from holdfast.cli.launch.kubernetes_launch import make_fleet  # its client is an extra, and slow to import

        return make_fleet(run, run_dir, tokens, record.notes, epoch)
    return LocalFleet(
        run_dir, run_directory.make_node_spec(run, run_dir), env, program_fork_server.socket_path(run_dir)
    )


def _on_signals(controller: Controller, *, in_allocation: bool, come: list[int]) -> None:
    """Stop the job on the first signal, and at once on the second; `come` are those that came already. Slurm ends an
    allocation by SIGTERM, which gives the job an exit code of its own. It counts once: it may reach this process by
    itself as well as by the supervisor."""
    asked: list[int] = []
    terminated = OUT_OF_TIME if in_allocation else 128 + signal.SIGTERM

    def stop(number: int) -> None:
        if in_allocation and number == signal.SIGTERM and number in asked:
            return
        asked.append(number)
        if len(asked) == 1:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            controller.process_event(
                Order(verb="stop", who=name, code=terminated if number == signal.SIGTERM else 128 + number)
            )
        else:
            controller.end_at_once()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    for earlier in come:
        stop(earlier)


if __name__ == "__main__":
    sys.exit(main())
