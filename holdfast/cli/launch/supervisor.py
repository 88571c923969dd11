"""The supervisor, behind `holdfast run`: shows the ranks' output, keeps the controller alive, passes signals on."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

if TYPE_CHECKING:
    from holdfast.cli.launch.controller_lease import ControllerLease
from holdfast.cli.launch import stoppable_wait
from holdfast.cli.launch.fork_server_start import start_fork_server
from holdfast.cli.run_dirs import run_dir_secrets, run_directory
from holdfast.cli.terminal.live_footer import show_footer
from holdfast.cli.terminal.rank_console import Console, ConsolePump, say
from holdfast.core.incident.incident_text import describe_exit
from holdfast.fleet import slurm_fleet
from holdfast.fleet.local_process_fleet import end_node
from holdfast.journal import high_water_mark
from holdfast.journal.journal_errors import JournalAwayError, JournalError
from holdfast.linux import own_process_settings
from holdfast.linux.local_time import clock_text
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.linux.regular_files import open_log
from holdfast.model.job_phase import Phase
from holdfast.wire import program_fork_server, run_and_node_specs, unix_sockets
from holdfast.wire.program_fork_server import ForkServer, ProgramProcess
from holdfast.wire.releases import release_tree_sync
from holdfast.wire.run_and_node_specs import FullDiskNote

_LOOK_S = 0.05
_TRIES = 5  # controllers in a row that did not live _LIVED_S
_LIVED_S = 10.0
_BEGIN_S = 2.0  # for a fork server to begin with a controller, or we execute it ourselves
_QUIT, _LEAVE = b'{"quit": true}\n', b'{"leave": true}\n'  # to the store: at once; with the last rank
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def leave_terminal(run_dir: Path) -> None:
    """Continue in a background process with its own session; the foreground process says how to attach, and exits."""
    say(f"it runs in the background: holdfast attach {run_dir} shows it, holdfast stop {run_dir} ends it")
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # what ranks print is in their logs, and our own words are in said.log
        os.dup2(nowhere, fd)
    os.close(nowhere)


@contextmanager
def stopping_wait(said: str, stops: tuple[int, ...] = STOP_SIGNALS) -> Iterator[None]:
    """Make stop signals end the wait in this block: say that it is over and raise SystemExit. By default they would end
    the process without cleanup; after an earlier supervisor they would do nothing."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = [(number, signal.signal(number, leave)) for number in stops]
    try:
        yield
    except SystemExit as e:
        say(f"stopped while it waited: {said}; ending with code {e.code}")
        raise
    finally:
        for number, obeyed in before:
            signal.signal(number, obeyed)


class StopSignals:
    """Collects stop signals: the first stops the job with a grace period, the second at once, the third by force."""

    def __init__(self, stops: tuple[int, ...] = STOP_SIGNALS, once: tuple[int, ...] = ()) -> None:
        """Count every signal of `stops` that arrives, but a signal that is also in `once` only the first time."""
        self.numbers: list[int] = []
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # The terminal is gone, not the wish to train. It is not ignored, as programs would inherit that.
            signal.signal(signal.SIGHUP, lambda number, _: None)
        for number in stops:
            signal.signal(number, lambda number, _: self._note_signal(number, once))

    def _note_signal(self, number: int, once: tuple[int, ...]) -> None:
        if number not in once or number not in self.numbers:
            self.numbers.append(number)

    def more_than(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.numbers) > count

    @property
    def code(self) -> int:
        return 128 + self.numbers[0]


class Supervisor:
    def __init__(
        self,
        run_dir: Path,
        listener: socket.socket,
        console: Console,
        server: ForkServer | None = None,
        lease: "ControllerLease | None" = None,
    ) -> None:
        """`server` is a fork server that was started early. `lease` is for a run whose journal is in Postgres."""
        self._run_dir = run_dir
        self._listener = listener
        self._console = console
        self._lock = run_directory.lock_run_dir(run_dir)
        # Slurm's SIGTERM may reach this process twice: by itself, and through the batch script.
        allocation = run_directory.read_spec(run_dir).allocation
        self._asked = StopSignals(once=(signal.SIGTERM,) if allocation else ())
        self._passed = 0  # to the present controller
        self._stopped_waiting = False  # the controller has ended before it had the run, so nothing of it is ours
        self._died_at = 0.0  # the controller before this one, which has not taken over yet
        self._server = server
        self._lease = lease

    def run(self) -> int | None:
        """Keep a controller running until the job ends; return the job's exit code, or None if another host runs it by
        now."""
        (self._run_dir / "exit.json").unlink(missing_ok=True)
        own_process_settings.leave_input_note(self._run_dir / run_directory.STDIN)
        pump = ConsolePump(self._console)
        self._server = self._server or self._start_fork_server()
        with show_footer(self._run_dir):
            code = self._keep_controller()
        if code is None or self._stopped_waiting:
            _tell_store(self._run_dir, _LEAVE)
            self._end_fork_server()
            pump.await_shown(self._asked.more_than(2))
            return code
        self._end_nodes()
        _gather_outputs(self._run_dir / "releases")
        _tell_store(self._run_dir, _QUIT)
        self._end_fork_server()
        if (self._run_dir / "exit.json").exists() and not run_directory.goes_on(self._run_dir):
            run_dir_secrets.forget_secrets(self._run_dir)
        pump.await_shown(self._asked.more_than(2))
        return code

    def _start_fork_server(self) -> ForkServer | None:
        run = run_directory.read_spec(self._run_dir)
        if run.fleet != "local":
            return None
        return start_fork_server(self._run_dir, run.entry.zygote, run.job.max_nodes + run.job.standbys)

    def _look_at_fork_server(self) -> None:
        if self._server is not None and (code := self._server.exit_code()) is not None:
            self._end_fork_server()
            log = self._run_dir / "fork.log"
            say(
                f"the fork server {describe_exit(code)}; {self._meanwhile_text()}, "
                f"new nodes start more slowly (see {log})"
            )

    def _end_fork_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _keep_controller(self) -> int | None:
        tries, room_until = 0, 0.0
        server = program_fork_server.socket_path(self._run_dir) if self._server is None else None
        while True:
            try:
                if self._lease and not self._claim_lease(self._lease):
                    has_node = run_directory.read_spec(self._run_dir).fleet == "join"
                    part = "this host goes on as a node" if has_node else "nothing is left to do here"
                    say(f"{self._lease.carrier_text()} carries the controller now; {part}")
                    return None
            except JournalError as e:
                say(f"{e}; ending this host's part in the job")
                return self._asked.code if self._asked.numbers else 1
            started_at = time.monotonic()
            stoppable_wait.forget_note(self._run_dir)  # of an earlier controller, which may have had the same pid
            code = self._watch_controller(self._start_controller(server))
            server = program_fork_server.socket_path(self._run_dir)  # which has imported all by now
            if code is not None and self._waits_for_nodes():
                continue
            if code is not None:
                return code
            lived = time.monotonic() - started_at >= _LIVED_S
            if run_directory.is_disk_full(self._run_dir):
                tries, room_until = 0, self._wait_for_room(0.0 if lived else room_until)
                if not room_until:
                    return self._asked.code if self._asked.numbers else 1
                continue
            tries = 1 if lived else tries + 1
            log = self._run_dir / "controller.log"
            if tries >= _TRIES:
                say(f"the controller keeps dying; see {log}")
                return 1
            say(f"the controller died; {self._meanwhile_text()} while it restarts (see {log})")
            self._died_at = self._died_at or time.monotonic()

    def _waits_for_nodes(self) -> bool:
        """Return whether the run goes on here after Slurm took all its nodes away; if so, prepare the next start."""
        run = run_directory.read_spec(self._run_dir)
        waits = run_directory.outlives_nodes(run) and not self._asked.numbers
        if not waits or not run_directory.goes_on(self._run_dir):
            return False
        say("the job's state is on storage; it goes on when Slurm has other nodes for it")
        (self._run_dir / "exit.json").unlink()
        resumed = msgspec.structs.replace(run, resumed_at=time.time())
        run_and_node_specs.write_json(self._run_dir / "run.json", resumed)
        return True

    def _claim_lease(self, lease: "ControllerLease") -> bool:
        """Claim the lease for the next controller. Wait for an absent database. Return False if another host has it."""
        until, lost_s = 0.0, run_directory.read_spec(self._run_dir).settings.node.lost_s
        while True:
            try:
                return lease.try_to_claim()
            except JournalAwayError as e:
                if self._asked.numbers or (until and time.monotonic() > until):
                    raise
                if not until:
                    until = time.monotonic() + lost_s
                    by = clock_text(time.time() + lost_s)
                    say(f"{e}; nodes and ranks go on, and the controller starts again if it answers by {by}")
            time.sleep(_LOOK_S)

    def _meanwhile_text(self) -> str:
        """Say what continues without the controller: training, if that was the job's phase when the controller died."""
        if self._lease:
            return "training goes on" if self._lease.is_training() else "nodes and ranks are kept"
        try:
            mark = high_water_mark.read_mark(self._run_dir / "journal.mark").mark
        except JournalError:
            mark = None
        return "training goes on" if mark and mark.phase is Phase.TRAINING else "nodes and ranks are kept"

    def _wait_for_room(self, until: float) -> float:
        """Wait until a full disk has room again, and return until when it may take at most. Return 0 if it takes longer
        or a stop signal comes. An `until` above 0 is that of an earlier wait, about which everything has been said."""
        settings = run_directory.read_spec(self._run_dir).settings
        wait_s, lost_s = settings.recovery.wait_s, settings.node.lost_s
        full = f"the disk that holds {self._run_dir} is full"
        if not until:
            say(f"{full}, so the controller ended; {_describe_room_wait(time.time(), wait_s, lost_s)}")
            until = time.monotonic() + wait_s
        while run_directory.is_disk_full(self._run_dir):
            if self._asked.numbers:
                return 0.0
            if time.monotonic() > until:
                say(f"{full}; ending the job: free space, then continue with holdfast run --resume {self._run_dir}")
                return 0.0
            time.sleep(_LOOK_S)
        note = FullDiskNote(path=str(self._run_dir), until=time.time())
        with suppress(OSError):  # it may be full again
            run_and_node_specs.write_json(self._run_dir / run_and_node_specs.FULL_DISK, note)
        return until

    def _start_controller(self, server: Path | None) -> ProgramProcess | None:
        """Start the controller in its own session, so that Ctrl-C reaches it only through this process."""
        self._passed = 0
        where, holder = str(self._run_dir), (self._lease.holder,) if self._lease else ()
        args = (where, str(os.getpid()), *holder)
        program = Program(
            module=run_directory.CONTROLLER, args=args, env=run_directory.node_environment(self._run_dir), cwd=where
        )
        with open(open_log(str(self._run_dir / "controller.log")), "ab") as log:
            keep = (self._listener.fileno(), *self._lock)
            files = OpenFiles(stdout=log.fileno(), stderr=log.fileno(), keep=keep)
            try:
                return program_fork_server.start_program(program, files, server, _BEGIN_S)
            except OSError as e:
                log.write(f"the controller cannot be started: {e}\n".encode())
                return None

    def _watch_controller(self, process: ProgramProcess | None) -> int | None:
        """Wait for the controller to end; return the job's exit code, or None after a crash. A crash after three stop
        signals ends the job, with the first signal's exit code."""
        while process is not None and not process.is_over():
            self._pass_signals_on(process)
            self._look_at_fork_server()
            if self._died_at and self._is_listening(process):
                say(f"the controller is back, {time.monotonic() - self._died_at:.1f} s after the last one died")
                self._died_at = 0.0
            time.sleep(_LOOK_S)
        if process is not None:
            process.close()
            if (note := stoppable_wait.read_note(self._run_dir, process.pid)) and note.stopped:
                self._stopped_waiting = True
                return note.stopped
        try:
            return run_and_node_specs.read_json(self._run_dir / "exit.json", run_and_node_specs.RunEnd).code
        except (OSError, msgspec.DecodeError):
            return self._asked.code if len(self._asked.numbers) > 2 else None

    def _pass_signals_on(self, process: ProgramProcess) -> None:
        """Pass the next stop signal on, once the controller can handle it, be it that it waits for another one to end;
        after the third, kill the controller. A restarted controller gets all signals again."""
        asked = self._asked.numbers
        if len(asked) > 2:
            process.kill()
        elif self._passed < len(asked) and self._is_listening(process):
            if self._passed == 0:
                say("stopping; a second Ctrl-C or SIGTERM stops without grace")
                self._end_fork_server()  # it may be importing still, and whoever asks it would wait
            process.send_signal(asked[self._passed])
            self._passed += 1
        elif self._passed < len(asked) and stoppable_wait.read_note(self._run_dir, process.pid):
            process.send_signal(asked[self._passed])
            self._passed += 1

    def _is_listening(self, process: ProgramProcess) -> bool:
        found = run_directory.find_controller(self._run_dir)
        return found is not None and found.pid == process.pid

    def _end_nodes(self) -> None:
        """End all nodes of this run on this host and on Slurm, as a last resort: none may outlive the run."""
        nodes = self._run_dir / "nodes"
        for folder in nodes.iterdir() if nodes.is_dir() else ():
            if (folder / "holder.pid").exists():
                _end_one_node(folder)
        if run_directory.read_spec(self._run_dir).fleet == "slurm":
            try:
                slurm_fleet.end_all(self._run_dir, run_directory.node_environment(self._run_dir))
            except OSError as e:
                say(f"jobs of this run may be left in Slurm: {e}; see {self._run_dir}/{slurm_fleet.FOLDER}/nodes.json")


def _tell_store(run_dir: Path, line: bytes) -> None:
    """Tell the store process, if it still runs, to quit or to leave. It would wait for another controller."""
    try:
        with unix_sockets.connect(run_dir / "store.sock") as store:
            store.sendall(line)
    except OSError:
        return  # it is gone already, or there was none


def _gather_outputs(releases: Path) -> None:
    """Move files that ranks made in copies of a release to the user's tree, if their nodes died before doing so."""
    try:
        for index, gathered in release_tree_sync.gather_all(releases):
            say(release_tree_sync.describe_gathered(index, gathered))
    except OSError as e:
        say(f"files that ranks made beside the script stay in {releases}: {e}")


def _end_one_node(folder: Path) -> None:
    try:
        end_node(folder)
    except OSError as e:
        say(str(e))


def watch_node(
    folder: Path, pid: int, console: Console, is_free: Callable[[], bool], stops: tuple[int, ...]
) -> int | None:
    """Show the ranks' output and pass stop signals on to this node until its process ends; return the exit code. Return
    None as soon as `is_free` says that this host may run the controller."""
    asked = StopSignals(stops)
    pump = ConsolePump(console)
    passed = 0
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if passed < len(asked.numbers):
            if passed == 0:
                say("leaving the job; a second Ctrl-C or SIGTERM leaves without grace")
            else:
                say("leaving at once, without grace")
            os.kill(pid, signal.SIGINT if passed == 0 else signal.SIGTERM)
            passed += 1
        elif not passed and is_free():
            pump.await_shown(asked.more_than(0))
            return None
        time.sleep(_LOOK_S)
    _end_one_node(folder)  # should the holder have been killed, what it held may still be there
    _gather_outputs(folder.parents[1] / "releases")
    _tell_store(folder.parents[1], _QUIT)  # of a controller that this host carried before another did
    pump.await_shown(asked.more_than(2))
    code = os.waitstatus_to_exitcode(ended[1])
    say(_farewell_text(folder, code))
    if asked.numbers:
        return asked.code
    return code if code >= 0 else 128 - code


def _farewell_text(folder: Path, code: int) -> str:
    try:
        reason = (folder / "left").read_text(encoding="utf-8").strip()
    except OSError:
        return f"this node is lost: its holder ended with code {code}; see {folder}/holder.log"
    return f"done: {reason}" if code == 0 else f"this node left the job with code {code}: {reason}"


def _describe_room_wait(now: float, wait_s: float, lost_s: float) -> str:
    """Say by when nodes end their ranks, and until when the restart waits for free disk space."""
    until = clock_text(now + wait_s)
    if lost_s >= wait_s:
        return f"it restarts if you free space by {until}"
    lost = f"free space by {clock_text(now + lost_s)}, or nodes end their ranks, and what is in memory alone is lost"
    return f"{lost}; it still restarts if you do so by {until}"
