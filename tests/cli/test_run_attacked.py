"""Jobs of several hosts that are attacked while they recover, and after somebody has destroyed their records."""

import contextlib
import itertools
import os
import signal
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.core.decide.controller_takeover import lost_journal_sentence
from holdfast.model.decider_events import Successor
from holdfast.wire.credentials import mutual_tls
from tests.cli.conftest import Start
from tests.cli.driver import Job, gone
from tests.cli.test_join import host, leader_of, port
from tests.cli.test_run_state import TRAIN as SNAPSHOTS
from tests.cli.test_run_state import said

__all__ = ["port"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECORDS = ("journal.db", "journal.db-wal", "journal.db-shm", "journal.mark", "plan.json")
RATE_HZ = 300  # of a flood


def cut(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, remove])
def test_a_journal_that_is_lost_with_its_mark_and_the_newest_plan(
    start: Start, port: int, damage: Callable[[Path], None]
) -> None:
    """Hosts that joined before tell what they know; the job goes on from their states, and says what was lost."""
    flags = ("--nnodes", "2", "--nproc-per-node", "1")
    jobs = [host(start, f"127.0.0.1:{port}", *flags, name=name, script=SNAPSHOTS) for name in ("one", "two")]
    leader = leader_of(*jobs)
    leader.until(lambda: leader.status().get("floor", 0) > 3, "copies on peers")
    supervisor, controller = leader.process.pid, leader.controller()
    os.kill(supervisor, signal.SIGSTOP)  # it would start another controller at once
    os.kill(controller, signal.SIGKILL)
    leader.until(lambda: gone(controller), "the controller's end")
    for path in (leader.run_dir / name for name in RECORDS):
        if path.exists():
            damage(path)
    os.kill(supervisor, signal.SIGCONT)
    leader.trains(generation=2)
    [lost] = [event.lost for event in leader.events(Successor) if event.lost]
    assert (lost.generation, len(lost.nodes)) == (1, 2)
    assert any(lost_journal_sentence(lost) in line for line in leader.sentences()), "people are told"
    resumed = [int(step) for job in jobs for step, *_ in said(job, "from")]
    assert len(resumed) == 4 and min(sorted(resumed)[2:]) > 3, "not from step 0"
    leader.finish()
    for job in jobs:
        job.ends(0)


def keeper_port(job: Job) -> int:
    """The port of a host's keeper: all that its agent listens at."""
    [holder] = job.run_dir.glob("nodes/*/holder.pid")
    agent = psutil.Process(job.agent(holder.parent.name))
    [found] = {link.laddr.port for link in agent.net_connections("tcp") if link.status == psutil.CONN_LISTEN}
    return int(found)


def hello() -> bytes:
    out, tls = ssl.MemoryBIO(), mutual_tls.unproved_tls()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


@contextlib.contextmanager
def flood(*ports: int) -> Iterator[list[int]]:
    """Whole TLS hellos at each port: in turn from a hundred addresses, and from the one that the job's own nodes have.
    Yields how many there were."""
    opened, ending, text = [0], threading.Event(), hello()

    def call() -> None:
        links: deque[socket.socket] = deque()
        began_at = time.monotonic()
        for number in itertools.count():
            while not ending.is_set() and number > (time.monotonic() - began_at) * RATE_HZ:
                time.sleep(0.005)
            if ending.is_set():
                break
            link = socket.socket()
            with contextlib.suppress(OSError):
                link.bind(("127.0.0.1" if number % 2 else f"127.9.0.{1 + number // 2 % 100}", 0))
                link.settimeout(2.0)
                link.connect(("127.0.0.1", ports[number // 2 % len(ports)]))
                link.sendall(text)
                opened[0] += 1
            links.append(link)
            if len(links) > 500:
                links.popleft().close()
        for link in links:
            link.close()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield opened
    finally:
        ending.set()
        thread.join()


def test_a_flood_at_keepers_while_a_node_is_lost_costs_nobody_but_that_node(start: Start, port: int) -> None:
    """Its state is fetched all the same: the restore does not fail, no script is blamed, no other node is evicted."""
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", "--set", "silence.silence_s=3")
    jobs = [host(start, f"127.0.0.1:{port}", *flags, name=name, script=SNAPSHOTS) for name in ("a", "b", "c")]
    leader = leader_of(*jobs)
    leader.until(lambda: leader.status().get("floor", 0) > 3, "copies on peers")

    def nodes(role: str) -> list[str]:
        return [one["node"] for one in leader.status().get("nodes", ()) if one["role"] == role]

    leader.until(lambda: nodes("ready"), "a standby")
    name = next(node for node in nodes("active") if node != leader.run_dir.name)
    [lost] = [job for job in jobs if job.run_dir.name == name]
    others = [job for job in jobs if job is not lost]
    with flood(*map(keeper_port, others)) as opened:
        leader.until(lambda: opened[0] > 2 * RATE_HZ, "a flood")
        os.kill(lost.holder(name), signal.SIGKILL)
        leader.trains(generation=2)
        so_far = opened[0]
        leader.until(lambda: opened[0] > so_far + 2 * RATE_HZ, "more of the flood")
    assert leader.trains(generation=2), "the job trains on"
    lost.ends(137)
    resumed = [int(step) for job in others for step, *_ in said(job, "from")]
    assert len(resumed) == 3 and min(sorted(resumed)[1:]) > 3, "both ranks restored what was copied"
    [record] = leader.report().incidents
    assert (record.kind, record.evicted) == ("silence", (name,))
    leader.finish()
    for job in others:
        job.ends(0)
