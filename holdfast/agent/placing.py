"""Where this node is reached by others, and by which word they know each other."""

import socket
import urllib.parse
from pathlib import Path

from holdfast.agent.keeper import Place
from holdfast.wire.spec import NodeSpec


def place_of(node: NodeSpec, socket_path: Path) -> Place:
    """Where nodes reach the controller over a network they reach each other, by the address that faces it."""
    url = urllib.parse.urlsplit(node.url)
    with socket.socket(socket.AF_INET6 if ":" in (url.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 1))  # sends nothing
        host = probe.getsockname()[0]
    return Place(
        node=node.node,
        run_id=node.run_id,
        socket_path=socket_path,
        token=token_of(node.token_file),
        host=host,
        limits=node.settings.backup,
        replica=node.settings.replica,
    )


def token_of(path: str) -> str:
    return Path(path).read_text(encoding="utf-8").strip() if path else ""
