"""A host of a run whose journal is in Postgres: it carries the controller or follows another host, in turns."""

import contextlib
import socket

from holdfast.cli.launch.controller_lease import ControllerLease
from holdfast.cli.launch.host_join import HostJoin
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import Console, say
from holdfast.journal.journal_errors import JournalError

_BACKLOG = 4096


def run_in_turns(joining: HostJoin, console: Console, url: str) -> int:
    """Run this host's part in the job and return the exit code. The first host that claims the run carries its
    controller; when that is lost, another one of the hosts that --rdzv-endpoint names does."""
    try:
        lease = ControllerLease(url, joining.run_id)
        while True:
            listener = _listen_at_own(joining.args.endpoints) if joining.may_lead else None
            if listener is not None and lease.try_to_claim():
                with listener:
                    code = joining.lead_job(listener, console, lease)
            else:
                code = _follow(joining, console, lease, listener)
            if code is not None:
                return code
    except JournalError as e:
        raise UsageError(str(e)) from None


def _follow(joining: HostJoin, console: Console, lease: ControllerLease, listener: socket.socket | None) -> int | None:
    if listener is not None:
        listener.close()
    if not joining.has_node and lease.has_ended():
        raise UsageError(f"run {lease.run_id} in {lease.url} has ended; give another --rdzv-id")
    return joining.follow_job(console, lease.is_free if listener is not None else lambda: False)


def _listen_at_own(endpoints: tuple[tuple[str, int], ...]) -> socket.socket | None:
    """Listen at the first endpoint that is an address of this host; None if none is."""
    unknown = []
    for host, port in endpoints:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as e:
            unknown.append(f"cannot resolve {host}, a host of the endpoint: {e.strerror}")
            continue
        for family, _, _, _, address in found:  # a name may stand for several hosts
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                listener.bind(address)
                listener.listen(_BACKLOG)
                return listener
            listener.close()
    for why in unknown:
        say(why)
    return None
