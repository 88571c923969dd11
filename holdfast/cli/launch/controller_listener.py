"""Binds the controller's port in the supervisor."""

import errno
import socket

from holdfast.cli.run_flags.flag_table import UsageError


def listen_at(host: str, port: int, mend: str) -> socket.socket:
    """Bind the port in the supervisor, so that it outlives controllers; UsageError if that fails."""
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
