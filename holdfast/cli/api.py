"""Asking a run's controller, from the command line."""

import json
from pathlib import Path
from typing import Any

from holdfast.cli import rundir
from holdfast.wire import controller_call
from holdfast.wire.controller_call import NotRunning, Stranger


def ask(run_dir: Path, path: str, body: dict[str, Any] | None = None, wait_s: float = controller_call.WAIT_S) -> Any:
    """The answer as a tree."""
    if rundir.listening(run_dir) is None:
        raise NotRunning(f"the run in {run_dir} {rundir.ending(run_dir)}")
    content = controller_call.fetch(run_dir, path, body, wait_s)
    try:
        return json.loads(content)
    except ValueError:
        raise Stranger(f"what answers in {run_dir} is not holdfast") from None
