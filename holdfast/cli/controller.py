"""The controller of one run, as the process that `holdfast run` starts and restarts."""

import asyncio
import logging
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import web

from holdfast.cli import rundir

from holdfast.controller.api import make_app
from holdfast.controller.hands import Hands
from holdfast.controller.loop import Controller, ReplayError
from holdfast.controller.store import Store
from holdfast.fleet.join import JoinFleet
from holdfast.fleet.local import LocalFleet
from holdfast.journal.sqlite import JournalError, SqliteJournal
from holdfast.model.action import Finish
from holdfast.model.alarm import Alarm
from holdfast.model.event import Entry, Order, Phase
from holdfast.ports import Fleet
from holdfast.wire import spec
from holdfast.wire.spec import Listening, NodeSpec, RunSpec


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """RUN_DIR/exit.json: the job is over; without it a controller that is gone has crashed."""

    code: int
    reason: str


def say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    run_dir, fd = Path(argv[0]), int(argv[1])
    logging.basicConfig(filename=run_dir / "controller.log", level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        ended = asyncio.run(_run(run_dir, socket.socket(fileno=fd)))
    except (JournalError, ReplayError) as e:
        ended = Ended(code=1, reason=str(e))
        say(str(e))
    spec.write(run_dir / "exit.json", ended)
    return ended.code


async def _run(run_dir: Path, listener: socket.socket) -> Ended:
    run = rundir.read_spec(run_dir)
    env = rundir.read_env(run_dir)
    journal = SqliteJournal(run_dir / "journal.db")
    store = Store(run_dir, run.host, run.settings.node.lost_s)
    url = f"http://{run.host}:{listener.getsockname()[1]}"
    fleet = _fleet(run, run_dir, url, env)
    controller = Controller(journal, run.settings, lambda c: _hands(c, fleet, store))
    console = Console(run_dir)
    controller.on_entry = console.show
    _on_signals(controller, fleet)
    store.start(env)
    runner = web.AppRunner(make_app(controller, rundir.token(run_dir)), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener, shutdown_timeout=1.0).start()
    pid = int(Path("/proc/self/stat").read_text().split()[0])
    spec.write(run_dir / "controller.json", Listening(url=url, pid=pid, started_at=time.time()))
    code = await controller.run(run.job)
    account = controller.ledger.account()
    await runner.cleanup()
    (run_dir / "controller.json").unlink(missing_ok=True)
    console.end(account.ettr, len(account.incidents), code, account.ending)
    return Ended(code=code, reason=account.ending)


def _hands(controller: Controller, fleet: Fleet, store: Store) -> Hands:
    hands = Hands(fleet, store, controller.hear)
    hands.say = say
    return hands


def _fleet(run: RunSpec, run_dir: Path, url: str, env: dict[str, str]) -> Fleet:
    if run.fleet == "join":
        return JoinFleet()
    return LocalFleet(run_dir, node_spec(run, run_dir, url), env)


def node_spec(run: RunSpec, run_dir: Path, url: str) -> NodeSpec:
    return NodeSpec(
        node="",
        order=0,
        nproc=run.nproc,
        url=url,
        token_file=str(run_dir / "token"),
        log_dir=run.log_dir,
        entry=run.entry,
        settings=run.settings,
        run_id=run.job.run_id,
    )


def _on_signals(controller: Controller, fleet: Fleet) -> None:
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


class Console:
    """What the person at the terminal is told of the job's life, besides the sentence that ends an incident."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._phase = Phase.NEW
        self._begun_at = 0.0
        self._trained = False

    def show(self, entry: Entry) -> None:
        phase, self._phase = self._phase, entry.decision.phase
        if phase is Phase.NEW:
            self._begun_at = entry.at
        if self._phase is phase:
            return
        match self._phase:
            case Phase.TRAINING if not self._trained:
                self._trained = True
                say(f"training: the first step was made after {entry.at - self._begun_at:.1f} s")
            case Phase.STOPPING if isinstance(entry.event, Alarm):
                say(f"{entry.decision.reason}; stopping all ranks")
            case Phase.ENDING:
                for action in entry.decision.actions:
                    if isinstance(action, Finish) and action.code:
                        say(f"ending: {action.reason}")

    def end(self, ettr: float, incidents: int, code: int, reason: str) -> None:
        what = "done" if code == 0 else f"ended with code {code}"
        plural = "" if incidents == 1 else "s"
        say(f"{what}: {incidents} incident{plural}, ETTR {100 * ettr:.1f} %; more: holdfast report {self._run_dir}")
