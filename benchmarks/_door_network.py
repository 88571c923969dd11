"""Network devices of two namespaces, made by the kernel's own interfaces: machines without iproute2 have them too."""

import fcntl
import os
import socket
import struct

_NETMASK = "255.255.255.0"
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK = 0x8914, 0x8916, 0x891C  # SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK
_IS_UP = 0x1
_NEW_LINK, _REQUEST_TO_MAKE = 16, 0x1 | 0x4 | 0x200 | 0x400  # RTM_NEWLINK; of a request: acknowledged, new, made
_NAME, _ABOUT, _NAMESPACE = 3, 18, 19  # IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_PID
_KIND, _MORE, _PEER = 1, 2, 1  # IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER
_HEAD_BYTES = 16


def bring_link_up(name: str, address: str = "") -> None:
    """Bring a device of this namespace up, with an address if one is given; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for what, value in ((_SET_ADDRESS, address), (_SET_NETMASK, _NETMASK)) if address else ():
            place = struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(any_socket, what, struct.pack("16s24s", name.encode(), place))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", name.encode(), _IS_UP))


def add_veth_pair(near: str, far: str, pid: int) -> None:
    """Make two devices that are joined, the far one in the namespace of a process; raises OSError."""
    other = bytes(_HEAD_BYTES) + _attribute(_NAME, _text(far)) + _attribute(_NAMESPACE, struct.pack("I", pid))
    about = _attribute(_KIND, b"veth") + _attribute(_MORE, _attribute(_PEER, other))
    body = bytes(_HEAD_BYTES) + _attribute(_NAME, _text(near)) + _attribute(_ABOUT, about)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(struct.pack("IHHII", _HEAD_BYTES + len(body), _NEW_LINK, _REQUEST_TO_MAKE, 1, 0) + body)
        (error,) = struct.unpack_from("i", kernel.recv(1 << 16), _HEAD_BYTES)
    if error:
        raise OSError(-error, os.strerror(-error))


def _text(name: str) -> bytes:
    return name.encode() + b"\0"


def _attribute(kind: int, content: bytes) -> bytes:
    length = 4 + len(content)
    return struct.pack("HH", length, kind) + content + bytes(-length % 4)
