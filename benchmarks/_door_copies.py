"""What locked links cost a copy between keepers: its speed, processor time, and the steps of a rank beside it."""

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks._door_hosts import Host, Keeper, Verb, copy, everybody, far_host, keeper, own_cpu_s, touched
from benchmarks._report import FULL
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_transport import PeerKeeper
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.linux import own_process_settings
from holdfast.model.state_copy import Address
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles

STATE_BYTES = int(os.environ.get("BENCH_STATE_BYTES", "536870912"))
ROUNDS = 9 if FULL else 5  # the first is not counted
STEP_ROUNDS = 9 if FULL else 6
_BLOCK_S = 3.0
_SMALL_BYTES = min(256 << 20, STATE_BYTES)  # copied beside steps: several copies in a block, and worth relays
_STEP_CPU_S, _STEP_WAIT_S = 0.004, 0.016  # of a rank whose work is a GPU's: it launches, and waits
_RECORD_BYTES = 16384  # what TLS encrypts at once


class Way(NamedTuple):
    """One way to copy."""

    to: Keeper
    callee: PeerKeeper
    verb: Verb


class Cost(NamedTuple):
    wall_s: float
    near_cpu_s: float  # of the process that calls
    far_cpu_s: float


Costs = dict[str, list[Cost]]


class Found(NamedTuple):
    between: Costs  # two hosts
    within: Costs  # one host
    suites: tuple[str, str]  # by default, and with AES-128 alone
    steps: dict[str, list[float]]  # mean seconds of a step, by block


def measure(folder: Path, apart: bool) -> Found:
    authority = CertificateAuthority(folder / "authority")
    near, far = (enrol_local_node(authority, name, folder / name) for name in ("near", "far"))
    memory = touched(STATE_BYTES)
    with keeper(folder, STATE_BYTES, far, far_host(apart)) as other:
        beside = Host(address=other.doors.tls[0], beside=other.pid if apart else 0)
        with keeper(folder, STATE_BYTES, far, beside, short=True) as short:
            suites = (_suite(near, other.doors.tls), _suite(near, short.doors.tls))
            between = _in_turns(_between(near, other, short), memory)
        steps = _beside_steps(near, other)
    with keeper(folder, STATE_BYTES, far, Host()) as neighbour:
        within = _in_turns(_within(neighbour), memory)
    return Found(between, within, suites, steps)


def _between(keys: KeyFiles, other: Keeper, short: Keeper) -> dict[str, Way]:
    """Plain by one link, where no number is named; TLS as keepers use it."""
    guard = PeerAdmission(keys, everybody)
    plain, tls = PeerKeeper(other.doors.plain, None, 1), PeerKeeper(other.doors.tls, guard)
    one, tls128 = tls._replace(links=1, relayed=False), PeerKeeper(short.doors.tls, guard, 1, relayed=False)
    return {
        "plain push": Way(other, plain, "push"),
        "tls push": Way(other, tls, "push"),
        "plain pull": Way(other, plain, "pull"),
        "tls pull": Way(other, tls, "pull"),
        "tls push by 1": Way(other, one, "push"),
        "tls128 push": Way(short, tls128, "push"),
        "plain pull by 4": Way(other, plain._replace(links=4), "pull"),
        "tls pull by 1": Way(other, one, "pull"),
        "tls pull by 4 threads": Way(other, one._replace(links=4), "pull"),
        "tls pull by 4 relays": Way(other, one._replace(links=4, relayed=True), "pull"),
    }


def _within(neighbour: Keeper) -> dict[str, Way]:
    loopback, unix = PeerKeeper(neighbour.doors.plain, None, 1), PeerKeeper(neighbour.doors.unix)
    return {
        "loopback push": Way(neighbour, loopback, "push"),
        "unix push": Way(neighbour, unix, "push"),
        "loopback pull": Way(neighbour, loopback, "pull"),
        "unix pull": Way(neighbour, unix, "pull"),
    }


def _in_turns(ways: dict[str, Way], memory: memoryview) -> Costs:
    costs: Costs = {name: [] for name in ways}
    names = list(ways)
    for turn in range(ROUNDS):
        by = turn % len(names)
        for name in names[by:] + names[:by]:
            costs[name].append(_cost(ways[name], memory))
    return {name: each[1:] for name, each in costs.items()}


def _cost(way: Way, memory: memoryview) -> Cost:
    far, near, began = way.to.cpu_s(), own_cpu_s(), time.perf_counter()
    copy(way.callee, way.verb, memory)
    wall_s, near_s = time.perf_counter() - began, own_cpu_s() - near
    return Cost(wall_s, near_s, way.to.cpu_s() - far)


def _suite(keys: KeyFiles, address: Address) -> str:
    with (
        socket.create_connection(address) as link,
        mutual_tls.client_tls(keys, controller=False).wrap_socket(link) as proved,
    ):
        agreed = proved.cipher()
        return agreed[0] if agreed else "none"


# --- steps beside copies ---------------------------------------------------------------------------------------


def _beside_steps(keys: KeyFiles, other: Keeper) -> dict[str, list[float]]:
    """Steps with no copies, plain ones and locked ones beside them; this machine is both hosts, as a node is that
    sends its own state and takes another's."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    sender = spawn.Process(target=_send_on, args=(theirs,), daemon=True)
    sender.start()
    theirs.close()
    callees = {
        "none": None,
        "plain": PeerKeeper(other.doors.plain),
        "tls": PeerKeeper(other.doors.tls, PeerAdmission(keys, everybody)),
    }
    steps: dict[str, list[float]] = {name: [] for name in callees}
    names = list(callees)
    try:
        mine.recv()
        for turn in range(STEP_ROUNDS):
            by = turn % len(names)
            for name in names[by:] + names[:by]:
                mine.send(callees[name])
                steps[name].append(_step_s(_BLOCK_S))
                mine.send(None)
                mine.recv()
    finally:
        sender.kill()
        sender.join()
    return steps


def _send_on(parent: Connection) -> None:
    """Copies as often as the default duty allows, until told to rest."""
    own_process_settings.die_with(os.getppid())
    memory = touched(_SMALL_BYTES)
    pause = 1 / BackupLimits().duty - 1
    parent.send(None)
    while True:
        callee: PeerKeeper | None = parent.recv()
        while callee is not None and not parent.poll():
            began = time.monotonic()
            copy(callee, "push", memory)
            parent.poll(pause * (time.monotonic() - began))
        parent.recv()
        parent.send(None)


def _step_s(block_s: float) -> float:
    began, steps = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + block_s:
        launched_s = time.thread_time() + _STEP_CPU_S
        while time.thread_time() < launched_s:
            pass
        time.sleep(_STEP_WAIT_S)
        steps += 1
    return (now - began) / steps


# --- ciphers ---------------------------------------------------------------------------------------------------


def aes_alone(rounds: int = 9) -> tuple[float, float]:
    """Seconds of a core that AES-128-GCM alone takes for a gigabyte, in records of TLS, by the library of
    `cryptography`; and how many times as long AES-256-GCM takes."""
    record, nonce, count = os.urandom(_RECORD_BYTES), bytes(12), 2000
    short, long = (AESGCM(AESGCM.generate_key(bits)) for bits in (128, 256))

    def took(cipher: AESGCM) -> float:
        began = time.thread_time()
        for _ in range(count):
            cipher.encrypt(nonce, record, None)
        return time.thread_time() - began

    pairs = [(took(short), took(long)) for _ in range(rounds)]
    per_gb = statistics.median(fast for fast, _ in pairs) / (count * _RECORD_BYTES / 1e9)
    return per_gb, statistics.median(slow / fast for fast, slow in pairs)


def spread(costs: Costs, over: str, under: str, of: Callable[[Cost], float]) -> tuple[float, list[float]]:
    """The median of the ratios of every round, and all of them."""
    pairs = [of(a) / of(b) for a, b in zip(costs[over], costs[under], strict=True)]
    return statistics.median(pairs), pairs
