"""Binds the controller's port in the supervisor."""

import errno
import socket

from holdfast.cli.run_flags.flag_table import UsageError

_EVERYWHERE = "0.0.0.0"


def listen_at(host: str, port: int, mend: str) -> socket.socket:
    """Listen at this port in the supervisor, so that the port stays open when a controller dies. Raise UsageError if
    the port cannot be used. `mend` ends the error's sentence: it says what the user can do."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)
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
