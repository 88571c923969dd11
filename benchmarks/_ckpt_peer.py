"""Snapshots to and from a peer: the keepers' transport, checked and resumable, beside a bare loopback copy.

The other node is another process. Both sides write into memory that was touched before.
"""

import mmap
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Literal

from rich.table import Table

from benchmarks._ckpt_io import ratio, timed, turned
from benchmarks._report import FULL, Findings, report
from holdfast.checkpoint import peer_server, peer_transport
from holdfast.checkpoint.byte_pacer import UNPACED

STATE_BYTES = int(os.environ.get("BENCH_STATE_BYTES", "536870912"))
ROUNDS = 15 if FULL else 8  # the first is not counted
RAW_BYTES = 1 << 20  # at once: what plain code would do
GOAL = 0.6

Sides = dict[str, list[float]]


def measure(size: int = STATE_BYTES) -> Sides:
    """Seconds of a bare copy, a push and a pull, in turns."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    other = context.Process(target=_other_node, args=(theirs, size), daemon=True)
    other.start()
    try:
        raw, keeper = mine.recv()
        memory = _touched(size)
        ways: dict[str, Callable[[], object]] = {
            "raw": lambda: _raw_send(raw, memory),
            "push": lambda: peer_transport.push_state(
                peer_transport.PeerKeeper(keeper, None, 1), _ask("push", size), [memory], UNPACED
            ),
            "pull": lambda: peer_transport.pull_state(
                peer_transport.PeerKeeper(keeper, None, 1), _ask("pull", size), [memory]
            ),
        }
        took: Sides = {name: [] for name in ways}
        for turn in range(ROUNDS):
            for name in turned(sorted(ways), turn):
                took[name].append(timed(ways[name]))
        return {name: times[1:] for name, times in took.items()}
    finally:
        other.kill()
        other.join()


def judge_peer(sides: Sides, table: Table, findings: Findings) -> None:
    """How much of the bare copy's speed is reached."""
    for way in ("push", "pull"):
        middle, pairs = ratio(sides, "raw", way)
        findings.figures[f"peer_{way}_over_raw_loopback"] = round(middle, 3)
        findings.goals[f"peer_{way}_over_raw_loopback"] = middle >= GOAL
        table.add_row(
            f"speed of a {way} / bare loopback copy",
            f"{middle:.2f}",
            f"{min(pairs):.2f} to {max(pairs):.2f}",
            f"at least {GOAL:g}",
        )


def _other_node(parent: Connection, size: int) -> None:
    raw, keeper = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    memory = _touched(size)

    def take(ask: peer_transport.PeerRequest, node: str) -> peer_server.PushTarget:
        return peer_server.PushTarget(views=[memory], done=0, finish=lambda: None)

    def give(ask: peer_transport.PeerRequest) -> tuple[Sequence[memoryview], Callable[[], None]]:
        return [memory], lambda: None

    peer_server.PeerServer(keeper, None, take, give).start()
    parent.send((raw.getsockname(), keeper.getsockname()))
    while True:
        link, _ = raw.accept()
        with link:
            at = 0
            while at < size:
                at += link.recv_into(memory[at : at + RAW_BYTES])
            link.sendall(b".")


def _raw_send(address: tuple[str, int], memory: memoryview) -> None:
    with socket.create_connection(address) as link:
        link.sendall(memory)
        link.recv(1)


def _touched(size: int) -> memoryview:
    memory = mmap.mmap(-1, size)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = at % 251
    return memoryview(memory)


def _ask(verb: Literal["push", "pull"], size: int) -> peer_transport.PeerRequest:
    return peer_transport.PeerRequest(verb=verb, rank=0, layout="", bytes=size, ranges=((0, size),))


def main() -> int:
    title = f"{STATE_BYTES / 1e6:.0f} MB to a peer and back"
    table = Table("what", "median of pairs", "all pairs", "goal", title=title)
    findings, sides = Findings(), measure()
    judge_peer(sides, table, findings)
    report("ckpt_peer", table, findings, {side: list[float | None](took) for side, took in sides.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
