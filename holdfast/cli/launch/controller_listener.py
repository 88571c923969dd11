"""Binds the controller's port in the supervisor."""

import errno
import socket
from typing import Any

from holdfast.cli.run_flags.flag_table import UsageError

_EVERYWHERE = "0.0.0.0"
_BACKLOG = 4096


def listen_at(host: str, port: int, mend: str) -> socket.socket:
    """Listen at this port in the supervisor, so that the port stays open when a controller dies. Raise UsageError if
    the port cannot be used. `mend` ends the error's sentence: it says what the user can do."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror}"
        raise UsageError(f"port {port} on {host} {why}; {mend}") from None
    return listener


def listen_for_pods(host: str, port: int, mend: str) -> socket.socket:
    """Listen at `host` if it is an address of this host. Otherwise it belongs to a Kubernetes service or a gateway, so
    listen on all addresses of this host. `mend` ends an error's sentence: it says what the user can do."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except socket.gaierror:
        return listen_at(_EVERYWHERE, port, mend)  # the name of a service that is not known yet
    except OSError as e:
        if e.errno != errno.EADDRNOTAVAIL:
            raise UsageError(f"cannot listen at {host}:{port}: {e.strerror}; {mend}") from None
        return listen_at(_EVERYWHERE, port, mend)
    return listen_at(str(address[0]), port, mend)


def listen_to_lead(host: str, port: int) -> socket.socket | None:
    """Listen at the endpoint of a job whose hosts all run the same command. Return None if the endpoint is another
    host's, or another process here listens at it. Raise UsageError if its name stands for this host and for others:
    each of them would run a controller."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as e:
        raise UsageError(f"cannot resolve {host}, the host of the endpoint: {e.strerror}") from None
    own = [(family, address) for family, _, _, _, address in found if _is_own(family, address)]
    if not own:
        return None
    family, address = own[0]  # another family's may be one that this host has given up
    others = [str(other[0]) for kind, _, _, _, other in found if kind == family and (kind, other) not in own]
    if others:
        raise UsageError(
            f"{host} stands for {' and '.join(others)} too, not only for this host at {address[0]}: each of them would "
            "run a controller of its own; name one host, or let --journal decide which one does"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            return None
        raise UsageError(f"cannot listen at {host}:{port}: {e.strerror}") from None
    return listener


def _is_own(family: socket.AddressFamily, address: Any) -> bool:
    """Return whether this host has the address. `address` is as `getaddrinfo` gives it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
