"""Where this node is reached by others, and how they prove each other."""

import socket
import urllib.parse
from pathlib import Path

from holdfast.agent.keeper import Place
from holdfast.wire.identity import Keys
from holdfast.wire.spec import NodeSpec


def place_of(node: NodeSpec, socket_path: Path) -> Place:
    keys = Keys.in_folder(Path(node.keys)) if node.keys else None
    return Place(
        node=node.node,
        run_id=node.run_id,
        socket_path=socket_path,
        keys=keys,
        host=_facing(node.url) if keys else "",
        limits=node.settings.backup,
        replica=node.settings.replica,
    )


def _facing(address: str) -> str:
    """Where nodes reach the controller over a network they reach each other, by the address that faces it."""
    url = urllib.parse.urlsplit(address)
    with socket.socket(socket.AF_INET6 if ":" in (url.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 1))  # sends nothing
        return str(probe.getsockname()[0])
