"""Requests from the command line to a run's controller."""

import json
from pathlib import Path
from typing import Any

from holdfast.cli.run_dirs import run_directory, run_liveness
from holdfast.wire import controller_request
from holdfast.wire.controller_request import ControllerClosing, ControllerNotRunning, NotAController


def ask_controller(
    run_dir: Path, path: str, body: dict[str, Any] | None = None, wait_s: float = controller_request.WAIT_S
) -> Any:
    """Send a request and return the decoded JSON answer; ControllerNotRunning if there is no controller."""
    if run_directory.find_controller(run_dir) is None:
        raise ControllerNotRunning(f"the run in {run_dir} {run_liveness.ending_text(run_dir)}")
    try:
        content = controller_request.fetch(run_dir, path, body, wait_s)
    except ControllerClosing:
        raise ControllerClosing(f"the run in {run_dir} {_closing_text(run_dir)}") from None
    try:
        return json.loads(content)
    except ValueError:
        raise NotAController(f"the server in {run_dir} is not holdfast") from None


def _closing_text(run_dir: Path) -> str:
    """Describe a run whose controller has just hung up: how it has ended by now, or what this may mean."""
    if (run_dir / "exit.json").exists() or run_directory.find_controller(run_dir) is None:
        return run_liveness.ending_text(run_dir)
    return "is just ending, or its controller has just died"
