"""Asks NCCL's RAS service about the job, at the address that ranks are given. Any rank answers for all ranks."""

import socket
from collections.abc import Mapping

from holdfast.agent.agent_clock import AgentClock

_ADDRESS = "localhost:28028"  # NCCL's own
_MOST_BYTES = 1 << 20
_LEAST_S = 1.0  # RAS takes whole seconds for its own limit


def ras_address(env: Mapping[str, str]) -> str:
    """Return the address at which the RAS of ranks with this environment listens; "" if it is off."""
    return "" if env.get("NCCL_RAS_ENABLE") == "0" else env.get("NCCL_RAS_ADDR", _ADDRESS)


def ask_ras(address: str, limit_s: float, clock: AgentClock) -> str:
    """Return RAS's verbose status; "" if nothing listens there or the answer does not come in time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or limit_s < _LEAST_S:
        return ""
    until = clock.monotonic() + limit_s
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s) as link:
            link.sendall(f"CLIENT PROTOCOL 2\nTIMEOUT {int(limit_s)}\nVERBOSE STATUS\n".encode())
            return _read_all(link, until, clock)
    except (OSError, OverflowError):
        return ""


def _read_all(link: socket.socket, until: float, clock: AgentClock) -> str:
    """Return all that is sent until the link is closed; empty if that is too much, or takes too long."""
    found = bytearray()
    while len(found) < _MOST_BYTES and (left_s := until - clock.monotonic()) > 0:
        link.settimeout(left_s)
        if not (piece := link.recv(1 << 16)):
            return found.decode(errors="replace")
        found += piece
    return ""
