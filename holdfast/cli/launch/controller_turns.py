"""Lets each host of a run with its journal in Postgres either run the controller or follow the host that does."""

import contextlib
import socket
from typing import Any

from holdfast.cli.launch.controller_lease import ControllerLease
from holdfast.cli.launch.host_join import HostJoin
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.cli.terminal.rank_console import Console, make_console
from holdfast.config import Settings
from holdfast.journal.journal_errors import JournalError
from holdfast.wire.run_and_node_specs import EntryPoint

_BACKLOG = 4096


def join_in_turns(args: RunArgs, settings: Settings, entry: EntryPoint) -> int:
    """Run this host's part in the job and return the exit code. The first host that claims the run starts the
    controller; if that host is lost, another host of --rdzv-endpoint takes over."""
    joining = HostJoin(args, settings, entry)
    console = make_console(args, joining.run, joining.run_dir)
    try:
        lease = ControllerLease(args.journal or "", joining.run_id)
        while True:
            listener = _listen_at_own(joining.args.endpoints) if joining.may_lead else None
            with listener or contextlib.nullcontext():
                leads = listener is not None and lease.try_to_claim()
                code = joining.lead_job(listener, console, lease) if listener and leads else None
            if not leads:
                code = _follow(joining, console, lease)
            if code is not None:
                return code
    except JournalError as e:
        raise UsageError(str(e)) from None


def _follow(joining: HostJoin, console: Console, lease: ControllerLease) -> int | None:
    if not joining.has_node and lease.has_ended():
        raise UsageError(f"run {lease.run_id} in {lease.url} has ended; give another --rdzv-id")

    def may_take_over() -> bool:
        if not (joining.may_lead and lease.is_free()):
            return False
        with _listen_at_own(joining.args.endpoints) or contextlib.nullcontext() as listener:
            return listener is not None  # a port that is in use now may be free the next time

    return joining.follow_job(console, may_take_over)


def _listen_at_own(endpoints: tuple[tuple[str, int], ...]) -> socket.socket | None:
    """Listen at the first endpoint that is an address of this host. Return None if there is no such endpoint."""
    for host, port in endpoints:
        with contextlib.suppress(socket.gaierror):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            listeners = (_try_to_listen(family, address) for family, _, _, _, address in found)
            if listener := next(filter(None, listeners), None):  # a name may stand for several hosts
                return listener
    return None


def _try_to_listen(family: int, address: Any) -> socket.socket | None:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    listener.close()
    return None
