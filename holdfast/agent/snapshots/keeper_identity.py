"""The identity of a keeper: its node and run, the address where other nodes reach it, its keys and its limits."""

import socket
import urllib.parse
from pathlib import Path

import msgspec

from holdfast.core.detect.replica import ReplicaLimits
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.run_and_node_specs import NodeSpec


class KeeperIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The node and the run of a keeper, its addresses for ranks and for other keepers, and its limits."""

    node: str
    run_id: str
    socket_path: Path  # by ranks; what a next agent must know lies beside it
    keys: KeyFiles | None = None  # what proves us to other keepers, and them to us; None: all are on this host
    host: str = ""  # keepers of other hosts reach it there
    limits: BackupLimits = BackupLimits()
    disk: DiskLimits = DiskLimits()
    replica: ReplicaLimits = ReplicaLimits()
    look_s: float = 0.02  # how often it looks at the headers of snapshots


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
