"""A fault-ridden training run that heals itself on this machine: `make demo`.

A small GPT (gpt.py) trains on four nodes and a standby, each a process tree of its own. First undisturbed, then again
while one rank is killed and one whole node is lost. At the end stand the timeline, the ETTR, and whether the final
weights of the two runs are equal, bit for bit. Then the web page of the second run opens, with the story of each
incident, until Ctrl-C. If the output goes to a file or a pipe, the demo waits for nobody: it keeps that run, and names
the command that shows its page.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from holdfast.cli.commands import dash_command, report_command
from holdfast.cli.commands.status_command import render_status
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.wire.controller_request import ControllerNotRunning

GPT = Path(__file__).parent / "gpt.py"
SHOWN = 8  # newest lines of the job's own output
console = Console(highlight=False)


class Run:
    """One job under `holdfast run`, and what it prints."""

    def __init__(self, folder: Path, steps: int, options: list[str]) -> None:
        self.run_dir = folder / "run"
        code = folder / "code"  # of its own: the release of a run is all that lies around its script
        code.mkdir(parents=True)
        self.output = (folder / "output").open("w+b")
        script = [
            str(shutil.copy(GPT, code)),
            "--steps",
            str(steps),
            "--ckpt",
            str(folder / "ckpt"),
            "--ckpt-every",
            "10",
        ]
        command = [sys.executable, "-P", "-m", "holdfast.cli", "run", "--run-dir", str(self.run_dir), *options, *script]
        env = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # DDP warns at length that its layout is kept fixed
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=env)
        self.lines: deque[str] = deque(maxlen=SHOWN)
        self.weights = ""

    def read(self) -> None:
        self.output.seek(self._offset)
        for line in self.output.read().decode("utf-8", "replace").splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            self._offset += len(line.encode())
            self.lines.append(line.rstrip())
            if "weights sha256:" in line:
                self.weights = line.split()[-1]

    _offset = 0

    def status(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = ask_controller(self.run_dir, "/api/v1/status")
        except (ControllerNotRunning, OSError):
            return None
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()


def kill_rank(run: Run, status: dict[str, Any]) -> str:
    pid = int((run.run_dir / f"logs/gen-{status['generation']}/rank-2/pid").read_text())
    os.kill(pid, signal.SIGKILL)
    return f"step {status['step']}: rank 2 (pid {pid}) was killed with SIGKILL"


def lose_node(run: Run, status: dict[str, Any]) -> str:
    node = next(n["node"] for n in status["nodes"] if n["ranks"] == "1")
    pid = int((run.run_dir / f"nodes/{node}/holder.pid").read_text())
    os.kill(pid, signal.SIGKILL)  # everything below a holder dies with it
    return f"step {status['step']}: the whole node {node} was lost"


Strike = Callable[[Run, dict[str, Any]], str]


def watch(run: Run, title: str, faults: list[tuple[int, Strike]]) -> list[str]:
    """Show the job live and strike when it reaches the steps of the faults."""
    struck: list[str] = []
    screen: list[Any] = [Text("starting ...")]
    with Live(Panel(Group(*screen), title=title), console=console, refresh_per_second=4) as live:
        while run.process.poll() is None:
            time.sleep(0.2)
            run.read()
            status = run.status()
            if status is None:
                continue
            if faults and status["phase"] == "training" and status["step"] >= faults[0][0]:
                struck.append(faults.pop(0)[1](run, status))
            news = [Text(f"> {what}", style="bold red") for what in struck]
            live.update(
                Panel(Group(render_status(status), *news, Text("\n".join(run.lines), style="dim")), title=title)
            )
    if not console.is_terminal:
        console.print()  # there the last picture has no end of line
    run.read()
    return struck


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--no-page", action="store_true", help="end without the web page of the second run")
    args = parser.parse_args()
    folder, kept = Path(tempfile.mkdtemp(prefix="holdfast-demo-")), False
    try:
        code, run_dir = _demo(folder, args.steps)
        if console.is_terminal and not args.no_page:
            console.rule("what happened, in a browser")
            dash_command.main([str(run_dir)])
        elif not args.no_page:
            _name_page(folder, run_dir)
            kept = True
    finally:
        if not kept:
            console.print(f"removing {folder}", style="dim", soft_wrap=True)
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _name_page(folder: Path, run_dir: Path) -> None:
    """Say how the page of the second run is shown, and remove all of the demo but what the page reads."""
    for path in (folder / "undisturbed", run_dir.with_name("ckpt")):
        shutil.rmtree(path, ignore_errors=True)
    program = Path(sys.executable).with_name("holdfast")
    command = [str(program)] if program.exists() else [sys.executable, "-P", "-m", "holdfast.cli"]
    console.print(f"the page of what happened: {shlex.join([*command, 'dash', str(run_dir)])}", soft_wrap=True)
    console.print(f"it reads what lies in {folder}; remove that when you have seen it", soft_wrap=True)


def _demo(folder: Path, steps: int) -> tuple[int, Path]:
    nodes = ["--nnodes", "4", "--nproc-per-node", "1"]
    first = Run(folder / "undisturbed", steps, nodes)
    try:
        watch(first, "1. undisturbed: 4 nodes", [])
    finally:
        first.end()
    second = Run(folder / "disturbed", steps, [*nodes, "--standbys", "1"])
    try:
        faults: list[tuple[int, Strike]] = [(steps // 3, kill_rank), (2 * steps // 3, lose_node)]
        struck = watch(second, "2. the same with faults: 4 nodes and a standby", faults)
    finally:
        second.end()
    console.rule("what happened")
    for what in struck:
        console.print(f"> {what}", style="bold red")
    console.print(report_command.render_report(report_command.load_report(second.run_dir), min(console.width, 100)))
    equal = bool(first.weights) and first.weights == second.weights
    console.print(f"final weights undisturbed {first.weights[:16]}, with faults {second.weights[:16]}: ", end="")
    console.print("equal, bit for bit" if equal else "NOT EQUAL", style="bold green" if equal else "bold red")
    if not equal or len(struck) != 2:
        console.print("\n".join([*first.lines, "", *second.lines]), style="dim")
        return 1, second.run_dir
    return 0, second.run_dir


if __name__ == "__main__":
    sys.exit(main())
