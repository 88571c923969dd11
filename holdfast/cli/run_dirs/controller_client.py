"""Requests from the command line to a run's controller."""

import json
import time
from pathlib import Path
from typing import Any

from holdfast.cli.run_dirs import run_directory, run_liveness
from holdfast.wire import controller_request
from holdfast.wire.controller_request import ControllerClosing, ControllerNotRunning, NotAController

_START_S = 5.0  # a controller is there a second or two after its front
_LOOK_S = 0.1


def ask_controller(
    run_dir: Path, path: str, body: dict[str, Any] | None = None, wait_s: float = controller_request.WAIT_S
) -> Any:
    """Send a request and return the decoded JSON answer. Raise ControllerNotRunning if there is no controller. If the
    run is just starting, wait a moment for its controller."""
    until = time.monotonic() + _START_S
    while run_liveness.is_starting(run_dir) and time.monotonic() < until:
        time.sleep(_LOOK_S)
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
    """Describe a run whose controller has just closed the connection: how it ended, or that it may be ending."""
    if (run_dir / "exit.json").exists() or run_directory.find_controller(run_dir) is None:
        return run_liveness.ending_text(run_dir)
    return "is just ending, or its controller has just died"
