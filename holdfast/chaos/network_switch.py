"""A network switch in user space between namespaces that it makes; links can be cut, slow or lossy.

    python -m holdfast.chaos.network_switch PORTS LINKS.json

The process prints the file descriptors of the namespaces and then applies the faults in LINKS.json, which may change at
any time. It ends when its standard input is closed. The namespaces have no names, so they end with the process.
"""

import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.chaos import linux_namespaces
from holdfast.decoding import from_json

NET = "10.79.0"
PORTS = 64  # at most
_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_LOOK_S = 0.05
_QUEUE = 4096  # frames under way; more are lost, as in any switch


class PortFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with one port."""

    loss: float = 0.0
    delay_s: float = 0.0


class LinkFaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """The links that one fault damages. LINKS.json holds one such object per fault, keyed by the fault's number."""

    ports: dict[str, PortFault] = {}
    apart: tuple[tuple[int, int], ...] = ()  # ports that do not reach each other


def merge_faults(faults: Iterable[LinkFaults]) -> LinkFaults:
    """Combine all faults: each port gets its greatest loss and the sum of its delays."""
    ports: dict[str, PortFault] = {}
    apart: tuple[tuple[int, int], ...] = ()
    for fault in faults:
        apart += fault.apart
        for port, link in fault.ports.items():
            other = ports.get(port, PortFault())
            ports[port] = PortFault(loss=max(link.loss, other.loss), delay_s=link.delay_s + other.delay_s)
    return LinkFaults(ports=ports, apart=apart)


def port_address(port: int) -> str:
    return f"{NET}.{port + 1}"


def make_port(port: int) -> tuple[int, int]:
    """Enter a new network namespace with a tap device; return the file descriptors of the namespace and the device."""
    linux_namespaces.unshare(linux_namespaces.NEWNET)
    space = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    cable = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(cable, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_HEADER))
    for line in (f"addr add {port_address(port)}/24 dev eth0", "link set lo up", "link set eth0 mtu 9000 up"):
        subprocess.run(["ip", *line.split()], check=True, stdin=subprocess.DEVNULL)
    return space, cable


class NetworkSwitch:
    def __init__(self, ports: int, control: Path) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.ends = [make_port(port) for port in range(ports)]
        linux_namespaces.enter_namespace(home, linux_namespaces.NEWNET)
        self._control, self._changed = control, (0, 0)
        self._links = LinkFaults()
        self._where: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._number = itertools.count()
        self._dice = random.Random(1)

    def run(self) -> None:
        ready = selectors.DefaultSelector()
        for port, (_, cable) in enumerate(self.ends):
            ready.register(cable, selectors.EVENT_READ, port)
        ready.register(0, selectors.EVENT_READ, -1)
        looked = 0.0
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else _LOOK_S
            for key, _ in ready.select(min(wait_s, _LOOK_S)):
                if key.data < 0:
                    return
                self._drain_port(key.data)
            self._deliver_frames()
            if time.monotonic() > looked + _LOOK_S:
                looked = time.monotonic()
                self._read_faults()

    def _read_faults(self) -> None:
        try:
            now = self._control.stat()
            changed = (now.st_mtime_ns, now.st_ino)  # clocks of files are coarse
            if changed != self._changed:
                faults = from_json(self._control.read_bytes(), dict[str, LinkFaults])
                self._links = merge_faults(faults.values())
                self._changed = changed
        except (OSError, msgspec.DecodeError):
            return  # it is being written

    def _drain_port(self, port: int) -> None:
        for _ in range(64):
            try:
                self._forward_frame(port, os.read(self.ends[port][1], 1 << 16))
            except BlockingIOError:
                return

    def _forward_frame(self, port: int, frame: bytes) -> None:
        self._where[frame[6:12]] = port
        to = self._where.get(frame[:6])
        for other in [to] if to is not None else [p for p in range(len(self.ends)) if p != port]:
            faults = [self._links.ports.get(str(end), PortFault()) for end in (port, other)]
            loss, delay_s = max(f.loss for f in faults), sum(f.delay_s for f in faults)
            apart = {(port, other), (other, port)} & set(self._links.apart)
            if apart or (loss and self._dice.random() < loss) or len(self._late) > _QUEUE:
                continue
            heapq.heappush(self._late, (time.monotonic() + delay_s, next(self._number), other, frame))

    def _deliver_frames(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._late)
            try:
                os.write(self.ends[port][1], frame)
            except OSError:
                continue  # its queue is full


def main() -> None:
    switch = NetworkSwitch(int(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps([space for space, _ in switch.ends]), flush=True)
    switch.run()


if __name__ == "__main__":
    main()
