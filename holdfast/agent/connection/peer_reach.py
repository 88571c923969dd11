"""Tests whether this node can reach other nodes and its gateway by TCP, which unlike ICMP needs no privileges.

A host that refuses a connection counts as reached, because it has answered. A gateway often drops such connections
silently; then the kernel's neighbour table says whether the gateway still answers.
"""

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

from holdfast.model.observation import Reach
from holdfast.model.state_copy import Address

_WAIT_S = 3.0
_DISCARD = 9  # a port that stands for nothing
_UP_GATEWAY = 0x3  # flags of a route: it is up, and leads through a gateway
_COMPLETE = 0x2  # flag of a neighbour whose address is known


async def try_peers(node: str, peers: dict[str, Address], root: Path = Path("/")) -> Reach:
    """Connect to these nodes and to the gateway, all at once; return which of them answered."""
    gateway = find_gateway(root)
    async with asyncio.TaskGroup() as tasks:
        tried = {peer: tasks.create_task(_is_answered(address)) for peer, address in peers.items()}
        passed = tasks.create_task(_is_answered((gateway, _DISCARD))) if gateway else None
    reached = {peer: task.result() is True for peer, task in tried.items()}
    answer = passed.result() if passed else None
    return Reach(
        node=node,
        reached=tuple(peer for peer, here in reached.items() if here),
        missed=tuple(peer for peer, here in reached.items() if not here),
        gateway=is_neighbour_known(gateway, root) if gateway and answer is None else answer,
    )


async def _is_answered(address: Address) -> bool | None:
    """Return True if the address accepts or refuses a connection, None on a timeout, False on any other error."""
    try:
        async with asyncio.timeout(_WAIT_S):
            _, writer = await asyncio.open_connection(*address)
    except TimeoutError:
        return None
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        return False  # the kernel knows no way, or what another node told is no address
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def find_gateway(root: Path = Path("/")) -> str:
    """Return the IPv4 address of the default route's gateway; empty if there is none."""
    for fields in _read_table(root / "proc/net/route"):
        with contextlib.suppress(ValueError, IndexError, struct.error):
            if fields[1] == "00000000" and int(fields[3], 16) & _UP_GATEWAY == _UP_GATEWAY:
                return socket.inet_ntoa(struct.pack("<I", int(fields[2], 16)))
    return ""


def is_neighbour_known(address: str, root: Path = Path("/")) -> bool | None:
    """Return whether the kernel's ARP table has a complete entry for this address; None if it has no entry."""
    for fields in _read_table(root / "proc/net/arp"):
        with contextlib.suppress(ValueError, IndexError):
            if fields[0] == address:
                return bool(int(fields[2], 16) & _COMPLETE)
    return None


def _read_table(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:
        return []
