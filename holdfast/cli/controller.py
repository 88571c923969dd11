"""The controller of one run, as the process that `holdfast run` starts and restarts."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

from aiohttp import web

from holdfast.cli import rundir
from holdfast.cli.flagtable import UsageError
from holdfast.cli.wording import NO_STEP, ettr_said, incidents
from holdfast.controller.api import Door, make_app, make_runner
from holdfast.controller.audit import Audit
from holdfast.controller.badges import Badges
from holdfast.controller.brief import Brief
from holdfast.controller.certified import NEEDLESS, Certified
from holdfast.controller.door import AtPort, Right, badge_of, by_socket
from holdfast.controller.enrolling import Enrolling
from holdfast.controller.hands import Hands
from holdfast.controller.hooks import Hooks, standing_of
from holdfast.controller.loop import Controller
from holdfast.controller.minting import Minting
from holdfast.controller.node_tokens import NodeTokens
from holdfast.controller.porch import Porch
from holdfast.controller.replay import ReplayError
from holdfast.controller.store import Store
from holdfast.core.account import Account, Use
from holdfast.core.plain import sentence_of_ours
from holdfast.core.story import failed
from holdfast.fleet.join import JoinFleet
from holdfast.fleet.local import LocalFleet
from holdfast.journal.sqlite import JournalError, JournalFullError, SqliteJournal
from holdfast.linux import process_control
from holdfast.linux.python_fork import KEPT
from holdfast.model.action import Finish, Say
from holdfast.model.alarm import Alarm
from holdfast.model.event import Begin, Entry, Order, Phase
from holdfast.ports import Fleet
from holdfast.wire import fork_server, identity, lock, spec, unixpath
from holdfast.wire.spec import Ended, Listening, RunSpec

_BACKLOG = 4096
_LOG_BYTES = 32 << 20
_PREDECESSOR_S = 5.0  # for one that was killed to be gone


class Said:
    """RUN_DIR/said.log: our sentences for the console, which the front shows; a console that stands still, or is
    closed, must not stop us."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "said.log").open("a", encoding="utf-8", errors="replace")

    def __call__(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nor must a full disk
            self._file.write(f"holdfast: {sentence_of_ours(text)}\n")
            self._file.flush()


class Folder:
    """Notes as files of the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir

    def put(self, name: str, content: bytes) -> None:
        spec.put(self._dir / name, content)

    def get(self, name: str) -> bytes:
        path = self._dir / name
        return path.read_bytes() if path.exists() else b""


def main() -> int:
    """python -m holdfast.cli.controller RUN_DIR FRONT; the first file that is passed on is the listening socket."""
    run_dir, front = Path(sys.argv[1]), int(sys.argv[2])
    process_control.die_with(front)
    fd = int(os.environ.pop(KEPT).split(",")[0])
    logging.basicConfig(handlers=[log_of(run_dir)], level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    say = Said(run_dir)
    ended: Ended | None = None
    if (alone := lock.sole(run_dir / "controller.lock", _PREDECESSOR_S)) is None:
        say(f"another controller works in {run_dir}, so this one does not")
        return 1
    try:
        ended = asyncio.run(_run(run_dir, socket.socket(fileno=fd), say))
    except* JournalFullError as group:
        say("; ".join(str(e) for e in leaves(group)))  # which is no end: the front knows what to do
    except* (JournalError, ReplayError, UsageError) as group:
        sentences = [str(e) for e in leaves(group)]
        ended = Ended(code=1, reason="; ".join(sentences))
        say(f"{ended.reason}; the job is ended")
    if ended is None:
        return 1
    spec.write(run_dir / "exit.json", ended)
    os.close(alone)
    return ended.code


def log_of(run_dir: Path) -> logging.Handler:
    """What whoever looks after us reads, and strangers cannot fill."""
    log = RotatingFileHandler(run_dir / "controller.log", maxBytes=_LOG_BYTES, backupCount=1)
    log.addFilter(Brief())
    return log


def leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for e in group.exceptions:
        if isinstance(e, BaseExceptionGroup):
            yield from leaves(e)
        else:
            yield e


async def _run(run_dir: Path, listener: socket.socket, say: Said) -> Ended:
    run = rundir.read_spec(run_dir)
    env = rundir.node_environment(run_dir)
    url = rundir.web_address(run.host, listener.getsockname()[1], "https" if run.fleet == "join" else "http")
    fleet = _fleet(run, run_dir, env)
    store = Store(run_dir, run.host, run.settings.node.lost_s, env)
    store.server = fork_server.path_of(run_dir)
    journal = SqliteJournal(run_dir / "journal.db", mark_path=run_dir / "journal.mark")
    controller = Controller(journal, run.settings, lambda c: _hands(c, fleet, store, say))
    controller.hands.notes = Folder(run_dir)
    controller.hands.try_with(run.settings.probe, run.settings.replay, run_dir / "probed.json")
    controller.hands.replaying.mesh, controller.hands.replaying.say = lambda: controller.ingest.mesh, say
    controller.archives, controller.release = run_dir / "releases", run.release
    teller, hooks = Teller(run_dir, say), Hooks(run.settings.hook, run.job.run_id, run_dir, run.entry.cwd, say)
    _listen(controller, teller, hooks)
    process_control.allow_files()
    audit = Audit(run_dir)
    port = Port(controller, run, run_dir, audit)
    runners = [await _open_door(controller, run_dir, Door(by_socket, audit, minting=port.minting)), await port.open()]

    def begun() -> None:
        teller.begun(controller.decider.phase)
        _on_signals(controller)
        spec.write(run_dir / "controller.json", Listening(url=url, pid=os.getpid(), started_at=time.time()))

    async with asyncio.TaskGroup() as tasks:
        attending, telling = tasks.create_task(store.attend()), tasks.create_task(hooks.run())
        watching = tasks.create_task(store.watch(controller.storeless))
        receiving = tasks.create_task(port.porch.run(listener))
        code = await controller.run(run.job, begun)
        attending.cancel()
        watching.cancel()
        receiving.cancel()
        hooks.over()
        await asyncio.wait({telling}, timeout=run.settings.hook.timeout_s)
        telling.cancel()
    account = controller.ledger.account()
    for runner in runners:
        await runner.cleanup()
    rundir.door(run_dir).unlink(missing_ok=True)
    (run_dir / "controller.json").unlink(missing_ok=True)
    teller.end(account, code)
    return Ended(code=code, reason=account.ending)


async def _open_door(controller: Controller, run_dir: Path, door: Door) -> web.AppRunner:
    """For everybody on this host: the kernel says who they are."""
    runner = make_runner(make_app(controller, door))
    await runner.setup()
    await web.SockSite(runner, unixpath.listen(rundir.door(run_dir), backlog=_BACKLOG)).start()
    return runner


class Port:
    """For people, by their tokens, and for nodes of other hosts, by their certificates."""

    def __init__(self, controller: Controller, run: RunSpec, run_dir: Path, audit: Audit) -> None:
        own = badge_of("RUN_DIR/token", Right.ADMIN, rundir.token(run_dir))
        badges = Badges(rundir.people(), (own,))
        self.minting: Minting | None = None
        if run.fleet != "join":
            self.porch = Porch(self._protocol, None)
            door = Door(AtPort(badges, run.host), audit, None, self.porch.proved)
        else:
            taking = self._taking(run.job.run_id, run_dir, audit)
            controller.ingest.serials, taking.counts = taking.serials, controller.ingest.counts
            if isinstance(taking, Certified):
                taking.is_here = controller.ingest.is_linked
            keys = identity.Keys.in_folder(rundir.keys_of_door(run_dir))
            self.porch = Porch(self._protocol, identity.accepting(keys, strangers=True))
            admit = AtPort(badges, run.host, taking.refusal)
            door = Door(admit, audit, taking, self.porch.proved, self.minting)
        self._runner = make_runner(make_app(controller, door))

    def _taking(self, run_id: str, run_dir: Path, audit: Audit) -> Enrolling | Certified:
        """Who says which hosts are nodes of this job."""
        folder = rundir.keys_of_door(run_dir)
        if rundir.is_certified(run_dir):
            self.minting = Minting(audit, None, NEEDLESS)
            return Certified(folder, run_id, audit)
        tokens = NodeTokens(folder)
        self.minting = Minting(audit, tokens)
        return Enrolling(rundir.authority(run_dir), rundir.secret(run_dir), run_id, audit, tokens)

    async def open(self) -> web.AppRunner:
        await self._runner.setup()
        return self._runner

    def _protocol(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return self._runner.server()


def _listen(controller: Controller, teller: "Teller", hooks: Hooks) -> None:
    """Who hears of every entry; hooks hear of old ones too, of which the last may not have been told."""

    def replayed(entry: Entry) -> None:
        hooks.hear(entry, standing_of(controller.decider))

    def heard(entry: Entry) -> None:
        teller.show(entry)
        replayed(entry)

    controller.on_entry, controller.on_replayed = heard, replayed


def _hands(controller: Controller, fleet: Fleet, store: Store, say: Said) -> Hands:
    hands = Hands(fleet, store, controller.report)
    hands.say = say
    return hands


def _fleet(run: RunSpec, run_dir: Path, env: dict[str, str]) -> Fleet:
    if run.fleet == "join":
        return JoinFleet()
    return LocalFleet(run_dir, rundir.node_spec(run, run_dir), env, fork_server.path_of(run_dir))


def _on_signals(controller: Controller) -> None:
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            controller.hear(Order(verb="stop", who=name, code=128 + number))
        else:
            controller.hurry()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)


class Teller:
    """What the person at the terminal is told of the job's life, besides the sentence that ends an incident."""

    def __init__(self, run_dir: Path, say: Said) -> None:
        self._run_dir = run_dir
        self._say = say
        self._phase = Phase.NEW
        self._begun_at = 0.0
        self._trained = False

    def begun(self, phase: Phase) -> None:
        self._phase = phase

    def show(self, entry: Entry) -> None:
        phase, self._phase = self._phase, entry.decision.phase
        if isinstance(entry.event, Begin):
            self._begun_at = entry.at
        if self._phase is phase:
            return
        match self._phase:
            case Phase.TRAINING if self._begun_at and not self._trained:
                self._trained = True
                self._say(f"training: the first step was made after {entry.at - self._begun_at:.1f} s")
            case Phase.STOPPING if isinstance(entry.event, Alarm):
                self._say(f"{entry.decision.reason}; stopping all ranks")
            case Phase.PAUSING:
                self._say(f"{entry.decision.reason.rpartition('; ')[2]}; ending all ranks")
            case Phase.HELD if not any(isinstance(action, Say) for action in entry.decision.actions):
                self._say(f"{entry.decision.reason}; nodes and state are kept until holdfast resume")
            case Phase.ENDING:
                for action in entry.decision.actions:
                    if isinstance(action, Finish) and action.code:
                        self._say(f"ending: {action.reason}")

    def end(self, account: Account, code: int) -> None:
        what = "done" if code == 0 else f"ended with code {code}"
        count = incidents(len(account.incidents), failed(account.incidents))
        ettr = ettr_said(account.ettr, account.at_most)
        ettr += f", as {NO_STEP}" if account.spent_s(Use.RUN) else ""
        self._say(f"{what}: {count}, {ettr}; more: holdfast report {self._run_dir}")


if __name__ == "__main__":
    sys.exit(main())
