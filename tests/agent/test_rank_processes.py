"""The agent's side of starting and ending ranks, against a holder that is played by hand."""

import asyncio
import errno
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.rank import rank_processes, zygote_preload
from holdfast.agent.rank.rank_processes import RankProcesses
from holdfast.model.code_release import Release
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import LaunchHere
from holdfast.wire import holder_messages
from holdfast.wire.holder_messages import (
    ExecRank,
    ForgetRank,
    HolderListing,
    HolderRank,
    KillRank,
    PreloadZygote,
    RankEnded,
    RankStarted,
    StartRefused,
    SweepDone,
    SweepLeftovers,
    ZygoteWarmed,
)
from holdfast.wire.holder_zygote_messages import ForkRank
from holdfast.wire.rank_memory.flight_log_writer import slot_memory_bytes
from holdfast.wire.releases.staged_release import StagedRelease
from tests.fleet.places import TEMPLATE


def launch_of(generation: int, nproc: int = 2) -> LaunchHere:
    return LaunchHere(
        id=generation,
        generation=generation,
        seat=Seat(node="n0", group_rank=1, first_rank=4, nproc=nproc),
        world_size=8,
        group_world_size=3,
        store_host="127.0.0.1",
        store_port=7,
        run_id="r",
        max_restarts=5,
    )


class Bench:
    """Ranks, and the other end of their socket."""

    def __init__(self, folder: Path, zygote: bool = False, learned: str = "", cwd: str = TEMPLATE.entry.cwd) -> None:
        entry = msgspec.structs.replace(TEMPLATE.entry, zygote=zygote, argv=("t.py", "--l=${local_rank}"), python="py")
        entry = msgspec.structs.replace(entry, cwd=cwd)
        node = msgspec.structs.replace(TEMPLATE, node="n0", nproc=2, log_dir=str(folder / "logs"), entry=entry)
        node = msgspec.structs.replace(node, learned=learned)
        ours, self.holder = holder_messages.make_socket_pair()
        self.holder.setblocking(False)
        self.over: list[HolderRank] = []
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.releases: Callable[[Release], StagedRelease] = lambda release: StagedRelease()
        self.ranks = RankProcesses(
            node, Path(node.log_dir), ours, SystemClock(),
            on_rank_exit=self.over.append, say=self.said.put_nowait, staged=lambda release: self.releases(release),
        )  # fmt: skip
        self.sock: socket.socket = ours
        self.arena = folder / "arena"
        self.arena.write_bytes(bytes(slot_memory_bytes(2)))

    async def begin(self, *held: HolderRank, warm: bool = False) -> None:
        listed = asyncio.Event()
        self.listening = asyncio.create_task(self.ranks.listen(listed))
        await self.say(HolderListing(ranks=held, arena=str(self.arena), arenas=(), warm=warm))
        await listed.wait()

    async def say(self, message: holder_messages.ToAgent) -> None:
        await asyncio.get_running_loop().sock_sendall(self.holder, holder_messages.encode(message))

    async def hear(self) -> holder_messages.ToHolder:
        async with asyncio.timeout(120):
            packet = await asyncio.get_running_loop().sock_recv(self.holder, holder_messages.PACKET_BYTES)
        heard: holder_messages.ToHolder = holder_messages.to_holder(packet)
        return heard

    async def start_all(self, errand: LaunchHere, first_pid: int = 100) -> str:
        """Play a holder that starts everything it is asked for."""
        launching = asyncio.create_task(self.ranks.launch_ranks(errand))
        for pid in range(first_pid, first_pid + errand.seat.nproc):
            while not isinstance(asked := await self.hear(), ExecRank | ForkRank):
                pass
            await self.say(RankStarted(key=asked.key, pid=pid))
        return await launching


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await close(made)


async def close(bench: Bench) -> None:
    bench.listening.cancel()
    await asyncio.gather(bench.listening, return_exceptions=True)
    bench.sock.close()
    bench.holder.close()


async def test_ranks_are_executed_with_torchruns_environment(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    await bench.begin()
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(2)))
    asked = [await bench.hear(), await bench.hear()]
    for pid, exec in enumerate(asked, 100):
        assert isinstance(exec, ExecRank)
        await bench.say(RankStarted(key=exec.key, pid=pid))
    assert await launching == ""
    second = asked[1]
    assert isinstance(second, ExecRank)
    assert second.argv == ("py", "-u", "t.py", "--l=1")
    assert second.key == "2:5"
    assert [second.env[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")] == ["5", "1", "1", "8"]
    assert second.env["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert second.env["OMP_NUM_THREADS"] == "3"
    assert "HOLDFAST_TOKEN" not in second.env
    assert second.env["HOLDFAST_SLOT"] == f"{bench.arena}:1"
    where = tmp_path / "logs" / "gen-2" / "rank-5"
    assert second.stdout == str(where / "stdout.log")
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (where, where.parent)} == {0o700}
    assert (where / "pid").read_text() == "101\n"
    assert [rank.pid for rank in bench.ranks.running_ranks()] == [100, 101]


async def test_a_refusal_is_an_error_in_words(bench: Bench) -> None:
    await bench.begin()
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(1)))
    for _ in range(2):
        asked = await bench.hear()
        assert isinstance(asked, ExecRank)
        await bench.say(StartRefused(key=asked.key, error="no such program"))
    assert await launching == "rank 4: no such program; rank 5: no such program"


async def test_a_log_folder_that_cannot_be_made(bench: Bench, tmp_path: Path) -> None:
    await bench.begin()
    (tmp_path / "logs").touch()
    error = await bench.ranks.launch_ranks(launch_of(1, nproc=1))
    assert (
        error.startswith("rank 4: ") and str(tmp_path / "logs") in error and error.endswith(os.strerror(errno.ENOTDIR))
    )


async def test_an_environment_beyond_all_bounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        monkeypatch.setenv(f"LARGE_{n}", "x" * 100_000)
    await bench.begin()
    error = await bench.ranks.launch_ranks(launch_of(1, nproc=1))
    assert error.startswith("rank 4: ") and error.endswith(str(holder_messages.PACKET_BYTES))


async def test_what_an_earlier_agent_started_is_not_started_again(bench: Bench) -> None:
    await bench.begin(HolderRank(key="3:4", pid=50), HolderRank(key="2:4", pid=40, code=-9))
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(3)))
    assert await bench.hear() == ForgetRank(key="2:4")
    asked = await bench.hear()
    assert isinstance(asked, ExecRank) and asked.key == "3:5"
    await bench.say(RankStarted(key="3:5", pid=51))
    assert await launching == ""


async def test_stop_sends_sigterm_then_sigkill_and_sweeps(bench: Bench) -> None:
    await bench.begin()
    await bench.start_all(launch_of(1), first_pid=os.getpid())  # a pid that is certainly not stopped
    stopping = asyncio.create_task(bench.ranks.stop_ranks(1, 0.2))
    assert [await bench.hear(), await bench.hear()] == [
        KillRank(key=f"1:{rank}", signal=signal.SIGTERM) for rank in (4, 5)
    ]
    await bench.say(RankEnded(rank=HolderRank(key="1:4", pid=1, code=-15)))
    assert await bench.hear() == KillRank(key="1:5", signal=signal.SIGKILL)
    await bench.say(RankEnded(rank=HolderRank(key="1:5", pid=2, code=-9)))
    assert await bench.hear() == SweepLeftovers()
    await bench.say(SweepDone(left=(77,)))
    assert (await stopping).startswith("pid 77, ")
    assert [rank.key for rank in bench.over] == ["1:4", "1:5"]


async def test_a_rank_that_ignores_sigterm_is_named_before_it_is_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_SLOW_END_S", 0.05)
    await bench.begin()
    await bench.start_all(launch_of(1), first_pid=os.getpid())
    stopping = asyncio.create_task(bench.ranks.stop_ranks(1, 0.4))
    await bench.hear(), await bench.hear()
    await bench.say(RankEnded(rank=HolderRank(key="1:4", pid=1, code=-15)))
    assert await bench.hear() == KillRank(key="1:5", signal=signal.SIGKILL)
    assert bench.said.get_nowait() == "rank 5 has not ended on SIGTERM; it is killed in 0 s" and bench.said.empty()
    await bench.say(RankEnded(rank=HolderRank(key="1:5", pid=2, code=-9)))
    assert await bench.hear() == SweepLeftovers()
    await bench.say(SweepDone())
    assert await stopping == ""


async def test_a_rank_that_is_being_born_is_stopped_too(bench: Bench) -> None:
    """The order to stop overtakes the answer to the order to launch."""
    await bench.begin()
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(1, nproc=1)))
    asked = await bench.hear()
    assert isinstance(asked, ExecRank)
    stopping = asyncio.create_task(bench.ranks.stop_ranks(1, 5.0))
    await asyncio.sleep(0.05)
    assert not stopping.done()
    await bench.say(RankStarted(key=asked.key, pid=100))
    assert await bench.hear() == KillRank(key="1:4", signal=signal.SIGKILL)
    assert await launching == ""
    await bench.say(RankEnded(rank=HolderRank(key="1:4", pid=100, code=-9)))
    assert await bench.hear() == SweepLeftovers()
    await bench.say(SweepDone())
    assert await stopping == ""
    late = await bench.ranks.launch_ranks(launch_of(1))  # its second rank was never asked for
    assert late.startswith("rank 5: ") and "stopped" in late


async def test_two_stops_at_once_share_one_sweep(bench: Bench) -> None:
    await bench.begin()
    stops = [asyncio.create_task(bench.ranks.stop_ranks(1, 0.0)) for _ in range(2)]
    assert await bench.hear() == SweepLeftovers()
    await bench.say(SweepDone())
    async with asyncio.timeout(120):
        assert await asyncio.gather(*stops) == ["", ""]


async def test_a_zygote_is_asked_for_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    bench = Bench(tmp_path, zygote=True)
    await bench.begin()
    preload = await bench.hear()
    assert isinstance(preload, PreloadZygote) and "HOLDFAST_TOKEN" not in preload.env
    assert not bench.ranks.warm.is_set()
    await bench.say(ZygoteWarmed(ok=True))
    await bench.ranks.warm.wait()
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(1, nproc=1)))
    assert isinstance(await bench.hear(), ForkRank)
    await bench.say(StartRefused(key="1:4", error="the zygote went away"))
    assert isinstance(await bench.hear(), ExecRank), "then it is executed afresh"
    await bench.say(RankStarted(key="1:4", pid=9))
    assert await launching == ""
    await close(bench)


@pytest.mark.parametrize(("ok", "then"), [(True, "another one is ready"), (False, "ranks now start as new processes")])
async def test_a_zygote_that_was_killed_is_told(tmp_path: Path, ok: bool, then: str) -> None:
    bench = Bench(tmp_path, zygote=True)
    said = bench.said
    await bench.begin()
    await bench.hear()
    await bench.say(ZygoteWarmed(ok=True))
    await bench.ranks.warm.wait()
    assert said.empty()
    await bench.say(ZygoteWarmed(ok=ok, lost="was killed by SIGKILL"))
    async with asyncio.timeout(120):
        assert (await said.get()).startswith(f"the zygote was killed by SIGKILL; {then}")
    await close(bench)


async def test_a_standby_preloads_what_others_have_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_preload, "_IDLE_S", -1.0)  # it has stood by for long enough
    learned = tmp_path / "learned.json"
    for folder in ("trains", "waits"):
        (tmp_path / folder / "logs").mkdir(parents=True)  # which is the node's own folder here
    trains = Bench(tmp_path / "trains", zygote=True, learned=str(learned))
    waits = Bench(tmp_path / "waits", zygote=True, learned=str(learned))
    await trains.begin(HolderRank(key="1:4", pid=50), warm=True)
    await waits.begin(warm=True)
    for bench in (waits, trains):
        bench.ranks.learn_imports()
    assert not learned.exists(), "there was nothing to learn"
    imports = tmp_path / "trains" / "logs" / "imports.json"
    imports.write_text('["numpy", "rich"]')
    trains.ranks.learn_imports()
    own = await trains.hear()
    assert isinstance(own, PreloadZygote) and own.names()[-2:] == ("numpy", "rich")
    assert not imports.exists()
    waits.ranks.learn_imports()
    taken = await waits.hear()
    assert isinstance(taken, PreloadZygote) and taken.names() == own.names()
    for bench in (waits, trains):
        bench.ranks.learn_imports()  # once is enough
        with pytest.raises(BlockingIOError):
            bench.holder.recv(1)
        await close(bench)


async def test_a_launch_waits_for_a_zygote_that_is_being_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path, zygote=True)
    (tmp_path / "logs").mkdir()
    await bench.begin(HolderRank(key="1:4", pid=50), warm=True)
    (tmp_path / "logs" / "imports.json").write_text('["rich"]')
    bench.ranks.learn_imports()
    assert isinstance(await bench.hear(), PreloadZygote)
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(2, nproc=1)))
    for _ in range(50):
        await asyncio.sleep(0)
    with pytest.raises(BlockingIOError):
        bench.holder.recv(1)  # what it has yet to import, the rank would have to import itself
    await bench.say(ZygoteWarmed(ok=True))
    assert isinstance(await bench.hear(), ForkRank)
    await bench.say(RankStarted(key="2:4", pid=9))
    assert await launching == ""
    await close(bench)


async def test_a_restart_before_the_zygote_has_all_asks_for_that_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, zygote=True)
    entry = msgspec.structs.replace(bench.ranks.spec.entry, later=("a_module_that_nobody_has",))
    bench.ranks._preloading._entry = entry
    await bench.begin(HolderRank(key="1:4", pid=50, code=-9), warm=True)
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(2, nproc=1)))
    asked = await bench.hear()
    assert isinstance(asked, PreloadZygote) and asked.modules == entry.later
    await bench.say(ZygoteWarmed(ok=True))
    while not isinstance(await bench.hear(), ForkRank):
        pass
    await bench.say(RankStarted(key="2:4", pid=9))
    assert await launching == ""
    await close(bench)
