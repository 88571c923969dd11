"""Finds the address at which other nodes reach this node, and the keys by which keepers prove who they are."""

import socket
import urllib.parse
from pathlib import Path

from holdfast.agent.snapshots.keeper import KeeperIdentity
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.run_and_node_specs import NodeSpec


def make_keeper_identity(node: NodeSpec, socket_path: Path) -> KeeperIdentity:
    keys = KeyFiles.in_folder(Path(node.keys)) if node.keys else None
    return KeeperIdentity(
        node=node.node,
        run_id=node.run_id,
        socket_path=socket_path,
        keys=keys,
        host=_facing_host(node.url.partition(",")[0]) if keys else "",
        limits=node.settings.backup,
        disk=node.settings.disk,
        replica=node.settings.replica,
    )


def _facing_host(address: str) -> str:
    """Return the address from which this host reaches the controller. Other nodes can reach this host there too."""
    url = urllib.parse.urlsplit(address)
    with socket.socket(socket.AF_INET6 if ":" in (url.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 1))  # sends nothing
        return str(probe.getsockname()[0])
