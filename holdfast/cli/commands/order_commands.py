"""`holdfast hold | resume | approve | evict NODE | drain NODE`: a person's orders to a running job."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.cli.run_dirs import run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import phase_said, step_said
from holdfast.wire.controller_request import ControllerNotRunning, RequestRefused

GONE_S = 15.0  # a controller that crashed is back by then
STEPLESS_S = 20.0  # ranks of a job that never made a step count as going on when they have run for so long
_LOOK_S = 0.1
_ABOUT = {
    "hold": "End all ranks and keep nodes and state, until holdfast resume.",
    "resume": "Resume a held job from its newest state.",
    "approve": "Let a job that waits for approval try again, with its failures forgotten.",
    "evict": "Evict a node now; a standby takes its place, or the job waits for another node.",
    "drain": "Evict a node as soon as a standby can take its place.",
}
_WITH_NODE = ("evict", "drain")
_HERE = ("active", "admitting", "draining", "ready", "probing", "acquiring", "examined")

StatusTree = dict[str, Any]


class OrderUnanswered(Exception):
    """The controller accepted the order, but then the job ended or the controller stopped answering."""


def main(argv: list[str]) -> int:
    verb = argv[0]
    args = _make_parser(verb).parse_args(argv[1:])
    return exit_code_of(verb, lambda: _order_job(verb, args))


def exit_code_of(verb: str, order: Callable[[], int]) -> int:
    """Call `order` and return the command's exit code; if the order fails, say why on standard error."""
    try:
        return order()
    except RequestRefused as e:
        print(f"holdfast {verb}: {e.why}", file=sys.stderr)
        return 2
    except (UsageError, ControllerNotRunning) as e:
        print(f"holdfast {verb}: {e}", file=sys.stderr)
        return 2
    except OrderUnanswered as e:
        print(f"holdfast {verb}: {e}", file=sys.stderr)
        return 1


def _order_job(verb: str, args: argparse.Namespace) -> int:
    body = {"verb": verb}
    body |= {"node": args.node} if verb in _WITH_NODE else {}
    run_dir = run_selection.run_to_change(args)
    print(f"holdfast {verb}: {give_order(run_dir, body)}", flush=True)
    if not args.no_wait:
        print(f"holdfast {verb}: {_await_order(run_dir, body)}")
    return 0


def _make_parser(verb: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"holdfast {verb}", description=_ABOUT[verb])
    if verb in _WITH_NODE:
        parser.add_argument("node", metavar="NODE", help="as holdfast status names it")
    run_selection.add_run_argument(parser, order=True)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    return parser


def give_order(run_dir: Path, body: dict[str, Any]) -> str:
    """Give an order exactly once, even if the controller restarts meanwhile; return a sentence on what happens next."""
    seq = ask_patiently(run_dir, lambda: ask_controller(run_dir, "/api/v1/status"))["seq"]
    while True:
        try:
            taken: dict[str, Any] = ask_controller(run_dir, "/api/v1/orders", body)
            return str(taken["next"])
        except RequestRefused:
            raise
        except ControllerNotRunning:
            # It may have been taken and not answered: the journal of the successor knows.
            if ask_patiently(run_dir, lambda: _is_taken(run_dir, seq, body)):
                return "accepted; the controller restarted meanwhile"


def ask_patiently(run_dir: Path, question: Callable[[], Any]) -> Any:
    """Call `question` until the controller answers; give up if the run has ended or no controller comes back."""
    until = time.monotonic() + GONE_S
    while True:
        try:
            return question()
        except RequestRefused:
            raise
        except ControllerNotRunning:
            if (run_dir / "exit.json").exists() or time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def _is_taken(run_dir: Path, seq: int, body: dict[str, Any]) -> bool:
    while entries := ask_controller(run_dir, f"/api/v1/entries?after={seq}"):
        events = [entry["event"] for entry in entries]
        if any(e["type"] == "order" and all(e.get(key) == value for key, value in body.items()) for e in events):
            return True
        seq = entries[-1]["seq"]
    return False


def _await_order(run_dir: Path, body: dict[str, Any]) -> str:
    """Wait until the order has taken effect and return the sentence that says so; meanwhile print what the job does."""
    said, gait = "", Gait()
    while True:
        try:
            status = ask_patiently(run_dir, lambda: ask_controller(run_dir, "/api/v1/status"))
        except ControllerNotRunning:
            raise OrderUnanswered(f"the run in {run_dir} {run_liveness.ending_text(run_dir)}") from None
        if done := _done_text(status, body, gait.goes_on(status)):
            return done
        if status["summary"] != said:
            said = status["summary"]
            print(f"  {said}", flush=True)
        time.sleep(_LOOK_S)


class Gait:
    """Tells from the job's status whether it trains again after an order.
    A job that has never reported a step counts as training once its ranks have run for STEPLESS_S."""

    def __init__(self) -> None:
        self._since: float | None = None

    def goes_on(self, status: StatusTree) -> bool:
        if status["phase"] != "starting" or status["ettr"] is not None:
            self._since = None
            return bool(status["phase"] == "training")
        self._since = self._since or time.monotonic()
        return time.monotonic() >= self._since + STEPLESS_S


def _done_text(status: StatusTree, body: dict[str, Any], goes_on: bool) -> str:
    """Return a sentence that says that the order has taken effect; "" while it has not."""
    step = step_said(status["step"], status.get("since", ""))
    match body["verb"]:
        case "hold" if status["phase"] == "held":
            place = f" {'after' if status.get('since') else 'at'} {step}" if status["step"] >= 0 else ""
            return f"held{place}; holdfast resume continues it"
        case "resume" | "approve" if goes_on and not (status["held"] or status["asking"]):
            return f"{phase_said(status)}, {step}"
        case "evict" | "drain":
            return _gone_text(status, body["node"], goes_on, drains=body["verb"] == "drain")
    return ""


def _gone_text(status: StatusTree, node: str, goes_on: bool, *, drains: bool) -> str:
    here = any(view["node"] == node and view["role"] in _HERE for view in status["nodes"])
    if here:
        standby = ", once a standby can take its seat" if drains else ""
        return f"{node} leaves when the job resumes{standby}" if status["phase"] == "held" else ""
    return (
        f"{node} has left; {phase_said(status)}, {step_said(status['step'], status.get('since', ''))}"
        if goes_on
        else ""
    )
