"""`holdfast status`: what a job is doing now, once or live."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.run_dirs import run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_dirs.distant_controller import DistantController, add_address_flags, is_address, open_address
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_output import make_output
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import (
    NO_STEP,
    START_S,
    clock_text,
    counted_noun,
    duration_text,
    ettr_of,
    hour_ettr_of,
    incidents_text,
    phase_said,
    rate_text,
    step_said,
    storage_said,
)
from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.model.stored_checkpoint_report import StorageReport
from holdfast.wire.controller_request import ControllerNotRunning, NotAController

__all__ = ["duration_text", "main", "render_status"]

_ABOUT = (
    "Show what a job is doing now. RUN may also be the address of a controller (https://HOST:PORT), for which you need "
    "a token."
)
_STATUS = "/api/v1/status"
_COLOURS = {"training": "green", "stopping": "red", "launching": "yellow", "starting": "yellow", "waiting": "yellow"}
_COLOURS |= {"probing": "magenta", "pausing": "blue", "held": "bright_blue"}


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast status", description=_ABOUT)
    run_selection.add_run_argument(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="keep showing it until the job ends")
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    add_address_flags(parser)
    args = parser.parse_args(argv)
    try:
        ask, is_over = _find_job(args)
        if args.watch:
            return _watch_status(ask, is_over)
        status = ask()
    except (UsageError, OSError) as e:
        print(f"holdfast status: {e}", file=sys.stderr)
        return 2
    except ControllerNotRunning as e:
        more = "" if is_address(run_selection.named_run(args)) else "; see what it did with holdfast report"
        print(f"holdfast status: {str(e).rstrip('.')}{more}", file=sys.stderr)
        return 1
    print(json.dumps(status)) if args.json else make_output().print(render_status(status))
    return 0


def _find_job(args: argparse.Namespace) -> tuple[Callable[[], dict[str, Any]], Callable[[], bool]]:
    """Return functions that ask the named job for its status, and that tell whether it is known to be over."""
    if (name := run_selection.named_run(args)) and is_address(name):
        controller = open_address(name, args)
        return lambda: _ask_address(controller), lambda: False
    run_dir = run_selection.run_to_read(args)
    return lambda: _own_text(ask_controller(run_dir, _STATUS)), (run_dir / "exit.json").exists


def _ask_address(controller: DistantController) -> dict[str, Any]:
    status = controller.ask(_STATUS)
    if not isinstance(status, dict) or "generation" not in status:
        raise NotAController(f"the server at {controller.name} is not holdfast")
    return _own_text(status)


def _own_text(status: Any) -> dict[str, Any]:
    told: dict[str, Any] = strip_tree(status)
    return told


def _watch_status(ask: Callable[[], dict[str, Any]], is_over: Callable[[], bool]) -> int:
    with Live(render_status(ask()), console=Console(markup=False), refresh_per_second=4) as live:
        while True:
            time.sleep(0.5)
            if is_over():
                return 0
            try:
                live.update(render_status(ask()))
            except ControllerNotRunning as e:  # it may be back presently
                live.update(Text(str(e)))


def render_status(status: dict[str, Any]) -> Group:
    """Render one screen: the state and its reason, the nodes, the last incident."""
    phase = phase_said(status)
    head = Text.assemble(
        (f" {phase} ", f"bold reverse {_COLOURS.get(phase, 'white')}"),
        f"  generation {status['generation']}, {step_said(status['step'], status.get('since', ''))}, ",
        (ettr_of(status["wall_s"], status["ettr"], status.get("at_most", "")), "bold"),
        (hour_ettr_of(status.get("hour_ettr"), status.get("at_most", "")), "bold"),
        f", {incidents_text(status['incidents'], status.get('failures', 0))}",
        _planned_text(status),
        f", {counted_noun(redone, 'step')} redone" if (redone := status.get("redone", 0)) else "",
        f"   run {status['run_id']}",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    carries, works = (any(n.get(key) is not None for n in status["nodes"]) for key in ("in_bytes_s", "tensor_share"))
    more = (*(("traffic of its host",) if carries else ()), *(("tensor cores",) if works else ()))
    for column in ("node", "role", "ranks", "step", "loss", "phase", *more):
        table.add_column(column, justify="right" if column in ("step", "loss", "tensor cores") else "left")
    for node in status["nodes"]:
        step = str(node["step"]) if node["step"] >= 0 else ""
        told = (*((_traffic_text(node),) if carries else ()), *((_tensor_text(node),) if works else ()))
        phase = node["phase"] or node.get("reason", "")
        table.add_row(node["node"], node["role"], node["ranks"], step, _loss_text(node), phase, *told)
    lines: list[Text | Table] = [head, Text(f"now: {status['now']}", style="dim"), *_people_lines(status), table]
    if status.get("run_s", 0.0) >= START_S:  # `now` tells of younger ranks
        lines.append(Text(NO_STEP, style="dim"))
    if release := _release_text(status):
        lines.append(Text(release, style="dim"))
    lines += [Text(pace, style="dim") for pace in status.get("pace", ())]
    if status.get("mesh"):
        lines.append(Text(f"parallel groups: {status['mesh']}", style="dim"))
    lines += [Text(line, style="dim") for line in _copy_lines(status)]
    if status.get("disk", -1) >= 0:
        lines.append(Text(f"step {status['disk']} lies on the disks of all nodes", style="dim"))
    if status.get("storage"):
        storage = msgspec.convert(status["storage"], StorageReport)
        lines.append(Text(storage_said(storage), style="bold" if storage.missed else "dim"))
    if status.get("behind"):
        lines.append(Text(status["behind"], style="bold"))
    if status.get("slow"):
        lines.append(Text(f"slow: {status['slow']}"))
    if now := status.get("incident_now"):
        lines.append(Text(f"incident now: {now}", style="bold"))
    if status["last_incident"]:
        lines.append(Text(f"{'the one before' if now else 'last incident'}{_last_incident_text(status)}"))
    if status.get("last_change"):
        lines.append(Text(f"last planned restart: {status['last_change']}"))
    return Group(*lines)


def _copy_lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield what is known of the copies on peers."""
    if status.get("floor", -1) < 0:
        return
    peers = "two peers" if status.get("copies", 1) > 1 else "its peer"
    yield f"step {status['floor']} is held by every rank and by {peers}"
    if pacing := status.get("pacing"):
        age = counted_noun(status["copy_age"], "step")
        yield f"that is {age} behind the newest snapshot; {_pacing_text(pacing)}"


def _pacing_text(pacing: str) -> str:
    """Return in words how copies to peers are paced: "gaps", or "duty: why"."""
    why = pacing.partition(": ")[2]
    return f"copies are paced by backup.duty: {why}" if why else "copies go into gaps between collectives"


def _last_incident_text(status: dict[str, Any]) -> str:
    """Return when the last incident was, and what it was."""
    at = f", {clock_text(status['last_incident_at'])}" if status.get("last_incident_at") else ""
    return f"{at}: {status['last_incident']}"


def _loss_text(node: dict[str, Any]) -> str:
    """Return the newest loss, and its step if that is not the one beside it."""
    if node["loss"] is None:
        return ""
    step = node.get("loss_step", -1)
    return f"{node['loss']:.4f}" + (f" (step {step})" if step not in (-1, node["step"]) else "")


def _traffic_text(node: dict[str, Any]) -> str:
    if node.get("in_bytes_s") is None:
        return ""
    return f"{rate_text(node['in_bytes_s'])} in, {rate_text(node['out_bytes_s'])} out"


def _tensor_text(node: dict[str, Any]) -> str:
    share = node.get("tensor_share")
    return "" if share is None else f"{100 * share:.0f} %"


def _planned_text(status: dict[str, Any]) -> str:
    count = status.get("changes", 0)
    return f", {counted_noun(count, 'planned restart')}" if count else ""


def _people_lines(status: dict[str, Any]) -> list[Text | Table]:
    """Return a line if a person holds the job, and a line if the job asks a question that a person must answer."""
    lines: list[Text | Table] = []
    if status.get("held"):
        lines.append(Text(f"held by {status['held']}: holdfast resume continues it", style="bold"))
    if status.get("asking"):
        left = f" another {_time_left(status['asks_until'])}" if status.get("asks_until") else ""
        question = f"waiting{left} for holdfast approve or holdfast stop: {status['asking']}"
        lines.append(Text(question, style="bold red"))
    return lines


def _release_text(status: dict[str, Any]) -> str:
    if not status.get("release"):
        return ""
    source = f" ({status['source']})" if status.get("source") else ""
    verb = "runs" if status.get("generation", 1) else "has not been launched yet"
    text = f"release {status['release']}{source} {verb}"
    if not status.get("waiting"):
        return text
    stands = status.get("asking") or status.get("held")  # then only a person ends the wait
    timed = status.get("waiting_until") and not stands
    until = f", at the latest in {_time_left(status['waiting_until'])}" if timed else ""
    return f"{text}; release {status['waiting']} waits for a restart{until}"


def _time_left(until: float) -> str:
    return duration_text(max(0.0, until - time.time()))
