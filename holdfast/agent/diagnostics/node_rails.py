"""The rails of this node: network interfaces that pair tests use one at a time, and how to keep NCCL on one of them."""

import fcntl
import socket
import struct
from pathlib import Path

from holdfast.agent.sources import read_number
from holdfast.model.probe_findings import Finding

PROBE = "rails"
_SIOCGIFADDR = 0x8915


def find_rails(wanted: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the interfaces or addresses in the comma-separated list `wanted`. If it is empty, return the physical
    interfaces that are up and have an IPv4 address; members of a bonded interface have none."""
    if wanted:
        return tuple(name for word in wanted.split(",") if (name := word.strip()))
    nets = sorted((root / "sys/class/net").glob("*"))
    up = [path.name for path in nets if (path / "device").exists() and read_number(path / "carrier") == 1]
    return tuple(name for name in up if _has_address(name))


def rails_finding(wanted: str) -> Finding:
    rails = find_rails(wanted)
    return Finding(probe=PROBE, level=1, ok=True, names=rails, detail=", ".join(rails) or "none has an IPv4 address")


def rail_environment(rail: str, root: Path = Path("/")) -> dict[str, str]:
    """Return the variables that keep NCCL on this rail; they turn RDMA off if the interface has no RDMA device."""
    if not rail:
        return {}
    devices = sorted(path.name for path in (root / "sys/class/net" / rail / "device/infiniband").glob("*"))
    rdma = {"NCCL_IB_HCA": f"={devices[0]}"} if devices else {"NCCL_IB_DISABLE": "1"}
    return {"NCCL_SOCKET_IFNAME": f"={rail}", **rdma}


def _has_address(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            fcntl.ioctl(one.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return False
    return True
