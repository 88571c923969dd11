"""The process a person sees: shows the ranks' output, keeps the controller alive, passes signals on."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from holdfast.agent import kernel
from holdfast.cli import controller, rundir
from holdfast.cli.console import Console
from holdfast.fleet.local import end_node
from holdfast.wire import spec

_PUMP_S = 0.05
_TRIES = 5  # controllers in a row that did not live _LIVED_S
_LIVED_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Front:
    def __init__(self, run_dir: Path, listener: socket.socket, console: Console) -> None:
        self._run_dir = run_dir
        self._listener = listener
        self._console = console
        self._asked: list[int] = []
        self._passed = 0

    def run(self) -> int:
        (self._run_dir / "exit.json").unlink(missing_ok=True)
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: self._asked.append(number))
        tries = 0
        while True:
            started_at = time.monotonic()
            code = self._watch(self._start())
            if code is not None:
                return code
            tries = tries + 1 if time.monotonic() - started_at < _LIVED_S else 1
            if tries >= _TRIES:
                print(f"holdfast: the controller does not stay up; see {self._run_dir}/controller.log", file=sys.stderr)
                self._kill_nodes()
                return 1
            print("holdfast: the controller went away; training goes on while it is restarted", file=sys.stderr)

    def _start(self) -> subprocess.Popen[bytes]:
        fd = self._listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "controller", str(self._run_dir), str(fd)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches it through us, once
            pass_fds=(fd,),
            preexec_fn=kernel.die_with_parent,
        )

    def _watch(self, process: subprocess.Popen[bytes]) -> int | None:
        """The job's exit code, or None if the controller crashed."""
        while process.poll() is None:
            self._pass_on(process)
            self._console.pump()
            time.sleep(_PUMP_S)
        self._console.drain()
        try:
            return spec.read(self._run_dir / "exit.json", controller.Ended).code
        except OSError:
            if len(self._asked) > 2:
                return 128 + self._asked[0]
            if process.returncode == 2:
                return 2
            return None

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        while self._passed < len(self._asked):
            number = self._asked[self._passed]
            self._passed += 1
            if self._passed == 1:
                print("holdfast: stopping; once more to stop without grace", file=sys.stderr)
            if self._passed <= 2:
                process.send_signal(number)
            else:
                process.kill()
                self._kill_nodes()

    def _kill_nodes(self) -> None:
        """The last resort: end every node of this run ourselves."""
        run_id = rundir.read_spec(self._run_dir).job.run_id
        nodes = self._run_dir / "nodes"
        for folder in nodes.iterdir() if nodes.is_dir() else ():
            end_node(folder, f"{run_id}/{folder.name}", grace_s=1.0)


def watch_node(pid: int, console: Console) -> int:
    """Follow a node that joined another host's job until its holder ends; the job's exit code."""
    asked: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: asked.append(number))
    passed = 0
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            console.drain()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if len(asked) > passed:
            passed = len(asked)
            os.kill(pid, signal.SIGTERM)
        console.pump()
        time.sleep(_PUMP_S)
