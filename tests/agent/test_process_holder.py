"""The holder's book-keeping: whose end was that, and what is told to a new agent."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.agent.process_holder import Holder
from holdfast.agent.zygotes import Zygote
from holdfast.core.agent_state_machine import RememberLeaving
from holdfast.core.incident.incident_text import describe_exit
from holdfast.linux import own_process_settings
from holdfast.model.node_errands import Leave
from holdfast.wire import holder_messages, holder_zygote_messages, run_and_node_specs
from holdfast.wire.holder_messages import (
    ArenaMade,
    ExecRank,
    HolderListing,
    HolderRank,
    KeptArena,
    KillRank,
    MakeArena,
    PreloadZygote,
    RankEnded,
    RankStarted,
    RekeyRank,
    StartRefused,
    ZygoteWarmed,
)
from holdfast.wire.holder_zygote_messages import ForkRank, RankForked, ZygoteReady
from holdfast.wire.rank_memory.flight_log_writer import slot_memory_bytes
from tests.fleet.places import TEMPLATE

AGENT, ZYGOTE = 1_000_001, 1_000_002  # no process has these pids here


class Bench:
    """A holder that is not run, with both its companions played by hand."""

    def __init__(self, folder: Path) -> None:
        run_and_node_specs.write_json(folder / "spec.json", msgspec.structs.replace(TEMPLATE, node="n0", nproc=2))
        self.holder = Holder(folder)
        ours, self.agent = holder_messages.make_socket_pair()
        self.holder._agent = (AGENT, ours)
        self.holder._selector.register(ours, 1, self.holder._on_request)
        theirs, self.zygote = holder_messages.make_socket_pair()
        self.zygotes = self.holder._zygotes
        self.now = self.zygotes._now = Zygote(ZYGOTE, theirs)
        self.now.threads = 1
        self.holder._selector.register(theirs, 1, self.zygotes._on_packet)
        for end in (self.agent, self.zygote):
            end.setblocking(False)
        self.started = 0
        self.holder._start_agent = self._start_agent  # type: ignore[method-assign]

    def _start_agent(self) -> None:
        self.started += 1

    def heard(self) -> list[object]:
        """What the agent was told."""
        found: list[object] = []
        while packet := _receive(self.agent):
            found.append(holder_messages.to_agent(packet))
        return found

    def forked(self, key: str, pid: int) -> None:
        self.zygote.send(holder_zygote_messages.encode(RankForked(key=key, pid=pid)))
        self.zygotes._on_packet(self.now.sock)

    def better(self) -> tuple[Zygote, socket.socket]:
        """A zygote that shall take the place of the present one, and its end of the line."""
        ours, theirs = holder_messages.make_socket_pair()
        better = self.zygotes._next = Zygote(ZYGOTE + 1, ours)
        self.holder._selector.register(ours, 1, self.zygotes._on_packet)
        return better, theirs

    def close(self) -> None:
        for end in (self.agent, self.zygote):
            end.close()
        if self.holder._agent:
            self.holder._drop_socket(self.holder._agent[1])
        for one in (self.zygotes._now, self.zygotes._next):
            if one:
                self.holder._drop_socket(one.sock)
        self.holder._selector.close()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(holder_messages.PACKET_BYTES)
    except BlockingIOError:
        return b""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def fork_of(key: str) -> ForkRank:
    return ForkRank(key=key, argv=("t.py",), module=False, env={}, cwd="/", stdout="/dev/null", stderr="/dev/null")


def test_a_node_that_is_started_anew_was_not_alone_before(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    notes.mark_alone(5.0)
    notes.write_deed(RememberLeaving(Leave(id=0, code=1, grace_s=2.0, reason="no controller for 60 s")))
    Bench(tmp_path).close()
    assert notes.mark_alone(9.0) == 9.0 and (tmp_path / "alone").is_symlink(), "in memory, whatever becomes of the disk"
    assert notes.read_leave_intent() is None, "the life before has left"


def test_a_rank_that_ends_before_its_birth_is_told(bench: Bench) -> None:
    bench.zygotes.fork(fork_of("1:0"))
    bench.zygotes.fork(fork_of("1:1"))
    bench.holder._on_child_exit(501, 7, 12.0)  # whose that was, the zygote has not said yet
    bench.holder._on_child_exit(666, 0, 12.5)  # an orphan of nobody we know
    bench.forked("1:0", 500)
    bench.forked("1:1", 501)
    over = RankEnded(rank=HolderRank(key="1:1", pid=501, code=7, at=12.0))
    assert bench.heard() == [RankStarted(key="1:0", pid=500), RankStarted(key="1:1", pid=501), over]
    assert bench.holder._unclaimed == {}, "once nothing is being born, the pids of strangers are forgotten"


def test_a_pid_that_comes_again_is_not_mistaken(bench: Bench) -> None:
    bench.holder._on_child_exit(777, 0, 1.0)  # a stray ends while nothing is being born
    bench.zygotes.fork(fork_of("1:0"))
    bench.forked("1:0", 777)
    assert bench.heard() == [RankStarted(key="1:0", pid=777)]
    assert bench.holder.ranks["1:0"].code is None


def test_without_a_zygote_a_fork_is_refused(bench: Bench) -> None:
    bench.now.threads = 0
    bench.zygotes.fork(fork_of("1:0"))
    assert bench.heard() == [StartRefused(key="1:0", error="no zygote is ready")]


def test_a_zygote_that_dies_refuses_what_it_owed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: None)
    bench.zygotes.fork(fork_of("1:0"))
    bench.holder._on_child_exit(ZYGOTE, -9, 1.0)
    refused, warmed = bench.heard()
    assert isinstance(warmed, ZygoteWarmed) and not warmed.ok
    assert isinstance(refused, StartRefused) and warmed.lost in refused.error
    assert warmed.lost == describe_exit(-9)


def test_a_program_that_is_not_there_is_refused(bench: Bench, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    bench.holder._exec_rank(ExecRank(key="1:0", argv=("/no/such",), env={}, cwd="/", stdout=log, stderr=log))
    bench.holder._exec_rank(ExecRank(key="1:1", argv=("true",), env={}, cwd="/no/such", stdout=log, stderr=log))
    bench.holder._exec_rank(ExecRank(key="1:2", argv=("true",), env={}, cwd="/", stdout="/no/such/log", stderr=log))
    errors = [told.error for told in bench.heard() if isinstance(told, StartRefused)]
    assert len(errors) == 3 and all(os.strerror(errno.ENOENT) in error for error in errors)
    assert bench.holder.ranks == {}
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600, "what ranks print may be secret"


def test_what_a_dead_agent_still_wanted_is_not_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor will be told to do it; done twice, a rank would run twice."""
    monkeypatch.setattr(bench.holder, "_exec_rank", lambda request: pytest.fail("it was done"))
    bench.agent.send(
        holder_messages.encode(ExecRank(key="1:0", argv=("true",), env={}, cwd="/", stdout="x", stderr="x"))
    )
    assert bench.holder._agent
    dead = bench.holder._agent[1]
    bench.holder._on_child_exit(AGENT, -9, 1.0)
    assert bench.started == 1 and dead.fileno() == -1
    assert bench.holder._lost_agent == "was killed by SIGKILL (sender unknown)", "which its successor is told"
    bench.holder._on_request(dead)  # as the selector would, had it seen the packet in the same round


def test_a_rank_that_has_ended_gets_no_signal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "holdfast.agent.system.child_process.signal_group", lambda pid, number: signalled.append((pid, number))
    )
    bench.holder.ranks = {"1:0": HolderRank(key="1:0", pid=5), "1:1": HolderRank(key="1:1", pid=6, code=0)}
    assert bench.holder._agent
    for key in ("1:0", "1:1", "1:2"):
        bench.agent.send(holder_messages.encode(KillRank(key=key, signal=15)))
        bench.holder._on_request(bench.holder._agent[1])
    assert signalled == [(5, 15)]


def test_a_warning_is_passed_on_to_the_agent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    bench.holder._pass_warning()
    assert signalled == [(AGENT, own_process_settings.END_WARNING)]
    assert bench.holder._agent
    agent, bench.holder._agent = bench.holder._agent, None
    bench.holder._pass_warning()
    assert len(signalled) == 1, "it is being started anew"
    bench.holder._agent = agent


def test_the_first_words_to_an_agent(bench: Bench) -> None:
    holder = bench.holder
    holder.ranks = {"1:0": HolderRank(key="1:0", pid=5)}
    holder._send_agent(HolderListing(ranks=tuple(holder.ranks.values()), arena=holder.arena, arenas=(), warm=True))
    [listing] = bench.heard()
    assert isinstance(listing, HolderListing) and listing.ranks == (HolderRank(key="1:0", pid=5),)
    assert Path(listing.arena).stat().st_size == slot_memory_bytes(2)


def warm(end: socket.socket, threads: int) -> None:
    end.send(holder_zygote_messages.encode(ZygoteReady(modules=9, threads=threads, skipped=())))


def test_a_better_zygote_takes_over_once_it_is_warm(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: killed.append(pid))
    better, end = bench.better()
    bench.zygotes.fork(fork_of("1:0"))  # the old one still owes an answer
    warm(end, threads=1)
    bench.zygotes._on_packet(better.sock)
    assert bench.zygotes._now is bench.now and killed == []
    bench.forked("1:0", 500)
    assert bench.zygotes._now is better
    assert killed == [], "it has yet to tell its rank that it may run"
    assert bench.zygote.recv(holder_messages.PACKET_BYTES) and not bench.zygote.recv(holder_messages.PACKET_BYTES), (
        "then it ends"
    )
    assert bench.zygotes.pids == {ZYGOTE, ZYGOTE + 1}
    assert bench.zygotes.on_child_exit(ZYGOTE, 0) and bench.zygotes.pids == {ZYGOTE + 1} and bench.zygotes.warm
    bench.zygotes.fork(fork_of("2:0"))
    assert holder_zygote_messages.to_zygote(end.recv(holder_messages.PACKET_BYTES)).key == "2:0"
    end.close()


def test_a_zygote_with_more_threads_is_not_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: killed.append(pid))
    better, end = bench.better()
    warm(end, threads=5)
    bench.zygotes._on_packet(better.sock)
    assert bench.zygotes._now is bench.now and bench.zygotes.warm and killed == [ZYGOTE + 1]
    [told] = bench.heard()
    assert isinstance(told, ZygoteWarmed) and told.ok and "5 threads" in told.detail
    end.close()


def test_what_starts_threads_is_done_without(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script imports may start threads; the rest is preloaded all the same."""
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: None)
    asked: list[tuple[str, ...]] = []
    ends: list[socket.socket] = []

    def start(preload: PreloadZygote) -> Zygote:
        asked.append(preload.names())
        better, end = bench.better()
        ends.append(end)
        return better

    monkeypatch.setattr(bench.zygotes, "_start_zygote", start)
    bench.zygotes.ensure_zygote(PreloadZygote(modules=("torch", "more"), learned=("threaded",), env={}))
    for threads in (5, 1):
        warm(ends[-1], threads=threads)
        assert bench.zygotes._next
        bench.zygotes._on_packet(bench.zygotes._next.sock)
    assert asked == [("torch", "more", "threaded"), ("torch", "more")]
    [told] = bench.heard()
    assert isinstance(told, ZygoteWarmed) and told.ok and "threads" in told.detail
    assert told.learned == (), "no other host need try"
    assert bench.zygotes.modules == ("torch", "more") and bench.zygotes._next is None
    for end in ends:
        end.close()


def test_what_a_zygote_has_of_the_script_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: None)
    ends: list[socket.socket] = []

    def start(preload: PreloadZygote) -> Zygote:
        better, end = bench.better()
        ends.append(end)
        return better

    monkeypatch.setattr(bench.zygotes, "_start_zygote", start)
    bench.zygotes.ensure_zygote(PreloadZygote(modules=("torch",), learned=("rich", "broken", "wave"), env={}))
    ends[0].send(holder_zygote_messages.encode(ZygoteReady(modules=9, threads=1, skipped=("broken",))))
    assert bench.zygotes._next
    bench.zygotes._on_packet(bench.zygotes._next.sock)
    bench.zygotes.ensure_zygote(PreloadZygote(modules=("torch",), learned=("rich", "wave", "deadly"), env={}))
    bench.holder._on_child_exit(ZYGOTE + 1, 1, 1.0)
    told = bench.heard()
    assert [message.learned for message in told if isinstance(message, ZygoteWarmed)] == [("rich", "wave")] * 2
    for end in ends:
        end.close()


def test_a_zygote_that_is_lost_is_made_again_with_all_that_it_had(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: None)
    asked: list[tuple[str, ...]] = []
    ends: list[socket.socket] = []

    def start(preload: PreloadZygote) -> Zygote:
        asked.append(preload.names())
        better, end = bench.better()
        ends.append(end)
        return better

    bench.zygotes._preload = PreloadZygote(modules=("torch",), env={})
    monkeypatch.setattr(bench.zygotes, "_start_zygote", start)
    bench.zygotes.ensure_zygote(PreloadZygote(modules=("torch", "more"), env={}))
    better, bench.zygotes._tries = bench.zygotes._next, 0
    assert better
    better.threads = 1
    bench.zygotes._swap_zygotes()
    bench.holder._on_child_exit(better.pid, -9, 1.0)
    assert asked == [("torch", "more")] * 2
    for end in ends:
        end.close()


def test_a_better_zygote_that_dies_is_no_loss(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: None)
    _, end = bench.better()
    bench.holder._on_child_exit(ZYGOTE + 1, 1, 1.0)
    assert bench.zygotes.warm and bench.zygotes._next is None
    [told] = bench.heard()
    assert isinstance(told, ZygoteWarmed) and told.ok
    end.close()


def test_memory_is_kept_by_name(bench: Bench) -> None:
    def made(name: str, size: int) -> KeptArena:
        bench.holder._make_arena(MakeArena(name=name, bytes=size))
        [told] = bench.heard()
        assert isinstance(told, ArenaMade)
        return told.arena

    first = made("rank-0", 8192)
    Path(first.path).write_bytes(b"state")
    assert made("rank-0", 8192) == first and Path(first.path).read_bytes()[:5] == b"state"
    assert made("rank-1", 8192).path != first.path
    assert Path(made("rank-0", 4096).path).read_bytes() == bytes(4096), "another size is another memory"
    for kept in bench.holder._arenas.values():
        os.close(int(kept.path.rpartition("/")[2]))


def _refusing(folder: Path, monkeypatch: pytest.MonkeyPatch, refusals: list[OSError]) -> Holder:
    """A holder of its own, whose agents are refused so often before one is started."""

    def start(*_: object, **__: object) -> int:
        if refusals:
            raise refusals.pop()
        return AGENT

    run_and_node_specs.write_json(folder / "spec.json", msgspec.structs.replace(TEMPLATE, node="n0", nproc=1))
    monkeypatch.setattr("holdfast.linux.preimported_fork.fork", start)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return Holder(folder)


def test_an_agent_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = _refusing(tmp_path, monkeypatch, [OSError(11, "no more processes"), OSError(12, "no memory")])
    open_before = len(os.listdir("/proc/self/fd"))
    holder._start_agent()
    assert holder.code is None and holder._agent and holder._agent[0] == AGENT
    assert len(os.listdir("/proc/self/fd")) == open_before + 1, "our end of its line, and nothing of the tries"
    holder._drop_socket(holder._agent[1])


def test_an_agent_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [OSError(12, "no memory")] * 20
    holder = _refusing(tmp_path, monkeypatch, refusals)
    holder._start_agent()
    assert (holder.code, holder._agent) == (1, None)
    assert len(refusals) == 10


def test_a_rank_is_kept_under_the_key_of_its_next_generation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.system.child_process.signal_group", lambda pid, number: None)
    for key in ("1:0", "1:1"):
        bench.forked(key, 1_000_010 + int(key[-1]))
    bench.holder._record_exit("1:1", -9, 5.0)
    bench.heard()
    for key in ("2:0", "2:1"):
        bench.agent.send(holder_messages.encode(RekeyRank(key=key, old=f"1{key[1:]}")))
        bench.holder._on_request(bench.holder._agent[1])  # type: ignore[index]
    assert bench.heard() == [RankStarted(key="2:0", pid=1_000_010), StartRefused(key="2:1", error="it has ended")]
    assert set(bench.holder.ranks) == {"2:0", "1:1"}
    bench.holder._on_child_exit(1_000_010, 3, 6.0)
    assert bench.heard() == [RankEnded(rank=HolderRank(key="2:0", pid=1_000_010, code=3, at=6.0))]
