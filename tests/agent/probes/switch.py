"""A switch in user space between network namespaces of its own, with links that lose frames or change bits in them.

    python -m tests.agent.probes.switch PORTS

Namespaces have no name and end with this process, which ends with its standard input. It prints the file descriptors of
the namespaces, then follows lines of "PORT LOSS CHANGED": the parts of all frames of that port that are lost, or leave
with one bit of their content changed and a checksum that fits, as a card does whose memory is bad.
"""

import ctypes
import fcntl
import json
import os
import random
import selectors
import struct
import subprocess
import sys

_NEWNET = 0x40000000
_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_ETHERNET, _TCP, _IP = 14, 6, b"\x08\x00"
_CONTENT = 1000  # bytes; shorter frames carry words of protocols, whose loss or change tears connections down
_libc = ctypes.CDLL(None, use_errno=True)


def made(port: int) -> tuple[int, int]:
    """A namespace and the cable into it."""
    if _libc.unshare(_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    space = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    cable = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(cable, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_HEADER))
    for line in (
        f"addr add 10.79.0.{port + 1}/24 dev eth0",
        "link set lo up",
        "link set eth0 mtu 9000 up",
    ):
        subprocess.run(["ip", *line.split()], check=True, stdin=subprocess.DEVNULL)
    return space, cable


def changed(frame: bytes, chance: random.Random) -> bytes:
    """One bit in the content of a TCP segment, with the checksum made to fit."""
    if frame[12:14] != _IP or frame[_ETHERNET + 9] != _TCP or len(frame) < _CONTENT:
        return frame
    start = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    content = start + 4 * (frame[start + 12] >> 4)
    at = chance.randrange(content + 512, len(frame) - 8)
    at -= (at - start) % 2
    (word,) = struct.unpack_from("!H", frame, at)
    other = word ^ 1 << chance.randrange(16)
    (check,) = struct.unpack_from("!H", frame, start + 16)
    total = (~check & 0xFFFF) + (~word & 0xFFFF) + other
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    spoiled = bytearray(frame)
    struct.pack_into("!H", spoiled, at, other)
    struct.pack_into("!H", spoiled, start + 16, ~total & 0xFFFF)
    return bytes(spoiled)


class Switch:
    def __init__(self, ports: int) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.links = [made(port) for port in range(ports)]
        _libc.setns(home, _NEWNET)
        self.faults = [(0.0, 0.0)] * ports
        self._where: dict[bytes, int] = {}
        self._chance = random.Random(1)

    def pass_on(self, port: int, frame: bytes) -> None:
        self._where[frame[6:12]] = port
        to = self._where.get(frame[:6])
        for other in [to] if to is not None else [p for p in range(len(self.links)) if p != port]:
            loss = max(self.faults[port][0], self.faults[other][0])
            if loss and len(frame) > _CONTENT and self._chance.random() < loss:
                continue
            wrong = max(self.faults[port][1], self.faults[other][1])
            told = changed(frame, self._chance) if wrong and self._chance.random() < wrong else frame
            try:
                os.write(self.links[other][1], told)
            except OSError:
                continue  # its queue is full, as of any switch

    def follow(self, line: str) -> None:
        port, loss, wrong = line.split()
        self.faults[int(port)] = (float(loss), float(wrong))

    def run(self) -> None:
        ready = selectors.DefaultSelector()
        for port, (_, cable) in enumerate(self.links):
            ready.register(cable, selectors.EVENT_READ, port)
        ready.register(0, selectors.EVENT_READ, -1)
        while True:
            for key, _ in ready.select():
                if key.data >= 0:
                    self._drain(key.data)
                elif line := sys.stdin.readline():
                    self.follow(line)
                else:
                    return

    def _drain(self, port: int) -> None:
        for _ in range(64):
            try:
                self.pass_on(port, os.read(self.links[port][1], 1 << 16))
            except BlockingIOError:
                return


if __name__ == "__main__":
    switch = Switch(int(sys.argv[1]))
    print(json.dumps([space for space, _ in switch.links]), flush=True)
    switch.run()
