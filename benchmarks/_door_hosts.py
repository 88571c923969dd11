"""Two keepers as on two hosts: processes in network namespaces of their own, or on loopback where none can be made."""

import contextlib
import mmap
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import psutil

from benchmarks._door_network import add_veth_pair, bring_link_up
from holdfast.chaos import linux_namespaces
from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_server import PeerServer, PushTarget
from holdfast.checkpoint.peer_transport import PeerKeeper, PeerRequest
from holdfast.linux import own_process_settings
from holdfast.model.state_copy import Address
from holdfast.wire import unix_sockets
from holdfast.wire.credentials.mutual_tls import KeyFiles

Verb = Literal["push", "pull"]

_NEAR, _FAR = "10.255.77.1", "10.255.77.2"
_LOOPBACK = "127.0.0.1"
_SHORT_SUITES = """
openssl_conf = start
[start]
ssl_conf = ssl
[ssl]
system_default = suites
[suites]
Ciphersuites = TLS_AES_128_GCM_SHA256
"""


class Doors(NamedTuple):
    """Where a keeper listens, the same memory behind all of them."""

    plain: Address
    tls: Address
    unix: Address


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Where a keeper runs: with us, in a new network, or in that of another process."""

    address: str = _LOOPBACK
    apart: bool = False
    beside: int = 0


class Keeper:
    """The keeper of another node, in a process of its own."""

    def __init__(self, pipe: Connection, pid: int, doors: Doors) -> None:
        self._pipe, self.pid, self.doors = pipe, pid, doors

    def cpu_s(self) -> float:
        """That it and relays of its links have spent until now."""
        self._pipe.send(None)
        spent: float = self._pipe.recv()
        return spent


def touched(size: int) -> memoryview:
    memory = mmap.mmap(-1, size)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = at % 251
    return memoryview(memory)


def own_network() -> str:
    """Put this process into a network of its own; why not, if it cannot be had."""
    if os.geteuid() != 0:
        return "network namespaces take root; both keepers are on loopback"
    try:
        linux_namespaces.unshare(linux_namespaces.NEWNET)
        bring_link_up("lo")
    except OSError as e:
        return f"no network namespace can be made here ({e}); both keepers are on loopback"
    return ""


@contextlib.contextmanager
def keeper(folder: Path, size: int, keys: KeyFiles, host: Host, short: bool = False) -> Iterator[Keeper]:
    """A keeper that holds one state; `short`: it takes AES-128 alone, which only a file for OpenSSL can ask for."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    with contextlib.ExitStack() as stack:
        if short:
            (folder / "suites.cnf").write_text(_SHORT_SUITES)
            stack.enter_context(_environment("OPENSSL_CONF", str(folder / "suites.cnf")))
        other = spawn.Process(target=_keep, args=(theirs, folder, size, keys, host), daemon=True)
        other.start()
        theirs.close()
    try:
        assert other.pid
        if host.apart:
            mine.recv()
            add_veth_pair("near", "far", other.pid)
            bring_link_up("near", _NEAR)
            mine.send(None)
        yield Keeper(mine, other.pid, mine.recv())
    finally:
        other.kill()
        other.join()


def everybody(node: str, serial: str) -> bool:
    """Every certificate counts; it has a name, so that a guard can be sent to another process."""
    return True


def far_host(apart: bool) -> Host:
    return Host(address=_FAR, apart=True) if apart else Host()


def _keep(parent: Connection, folder: Path, size: int, keys: KeyFiles, host: Host) -> None:
    own_process_settings.die_with(os.getppid())
    if host.beside:
        linux_namespaces.enter_namespace(os.open(f"/proc/{host.beside}/ns/net", os.O_RDONLY), linux_namespaces.NEWNET)
    if host.apart:
        linux_namespaces.unshare(linux_namespaces.NEWNET)
        parent.send(None)
        parent.recv()
        bring_link_up("far", host.address)
    memory = touched(size)

    def take(ask: PeerRequest, node: str) -> PushTarget:
        return PushTarget(views=_of(memory, ask), done=0, finish=lambda: None)

    def give(ask: PeerRequest) -> tuple[Sequence[memoryview], Callable[[], None]]:
        return _of(memory, ask), lambda: None

    path = folder / f"keeper-{os.getpid()}"
    plain, tls = (socket.create_server((host.address, 0)) for _ in range(2))
    for listener, proof in ((plain, None), (tls, keys), (unix_sockets.listen(path), None)):
        PeerServer(listener, proof and PeerAdmission(proof, everybody), take, give).start()
    parent.send(Doors(plain.getsockname(), tls.getsockname(), (str(path), 0)))
    while True:
        parent.recv()
        while psutil.Process().children():  # relays whose links are closed
            time.sleep(0.001)
        parent.send(own_cpu_s())


def own_cpu_s() -> float:
    """Processor time of this process and of relays that have ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)


def copy(callee: PeerKeeper, verb: Verb, memory: memoryview) -> None:
    """All of the memory to or from a keeper."""
    ask = PeerRequest(verb=verb, rank=0, layout="", bytes=len(memory), ranges=((0, len(memory)),))
    if verb == "push":
        peer_transport.push_state(callee, ask, [memory], BytePacer(0))
    else:
        peer_transport.pull_state(callee, ask, [memory])


def _of(memory: memoryview, ask: PeerRequest) -> list[memoryview]:
    return [memory[start:end] for start, end in ask.ranges]


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
