"""Ranks that survive, from their agent's side: parked by a stop, and told to go on by the next launch."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from holdfast.model.action import HandOver
from holdfast.model.node_errands import Parking
from holdfast.wire import survivor_messages, unix_sockets
from holdfast.wire.holder_messages import (
    ExecRank,
    ForgetRank,
    HolderRank,
    KillRank,
    RankEnded,
    RankKey,
    RankStarted,
    RekeyRank,
    StartRefused,
    SweepDone,
    SweepLeftovers,
)
from holdfast.wire.holder_zygote_messages import ForkRank
from holdfast.wire.progress_environment import REHEARSAL, SEATLESS, STANDING
from holdfast.wire.rank_memory.flight_log_writer import slot_memory_bytes
from holdfast.wire.survivor_messages import PartOrder, RejoinOrder, SurvivorState
from tests.agent.test_rank_processes import Bench, close, launch_of


class RankLine:
    """The end of a rank that survives."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank

    async def open(self, generation: int, *, parked: bool = False) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=unix_sockets.connect(self.path))
        self.tell(generation, parked=parked)

    def tell(self, generation: int, *, parked: bool) -> None:
        state = SurvivorState(rank=self.rank, generation=generation, parked=parked)
        self.writer.write(survivor_messages.encode(state) + b"\n")

    async def hear(self) -> survivor_messages.SurvivorOrder:
        async with asyncio.timeout(60):
            order: survivor_messages.SurvivorOrder = survivor_messages.to_rank(await self.reader.readline())
        return order


class Survival(Bench):
    """Two ranks of a node, 4 and 5, on their lines."""

    async def train(self, *, warm: bool = False) -> None:
        await self.begin(warm=warm)
        await self.start_all(launch_of(1), first_pid=os.getpid())
        self.serving = asyncio.create_task(self.ranks.survivors.serve())
        path = Path(self.ranks.spec.log_dir) / survivor_messages.SOCKET
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.lines = {rank: RankLine(path, rank) for rank in (4, 5)}
        for line in self.lines.values():
            await line.open(1)
        await self.until(lambda: all(self.ranks.survivors.is_there(key) for key in self.ranks.held))

    async def until(self, look: object) -> None:
        async with asyncio.timeout(60):
            while not look():  # type: ignore[operator]  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def end_rank(self, rank: int) -> None:
        await self.say(RankEnded(rank=HolderRank(key=f"1:{rank}", pid=1, code=-9)))

    async def swept(self, stopping: "asyncio.Task[str]") -> str:
        while not isinstance(await self.hear(), SweepLeftovers):
            pass
        await self.say(SweepDone())
        return await stopping


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Survival]:
    made = Survival(tmp_path)
    await made.train()
    yield made
    made.serving.cancel()
    for line in made.lines.values():
        line.writer.close()
    await close(made)


@pytest.fixture
async def forking(tmp_path: Path) -> AsyncIterator[Survival]:
    made = Survival(tmp_path, zygote=True)
    await made.train(warm=True)
    yield made
    made.serving.cancel()
    for line in made.lines.values():
        line.writer.close()
    await close(made)


async def park(bench: Survival, *ranks: int, standing: tuple[int, ...] = (), hand_over: HandOver | None = None) -> str:
    """Stop the generation; these ranks leave it, and others are ended."""
    park_s = 0.5 if len(ranks) + len(standing) < 2 else 60.0
    stopping = asyncio.create_task(bench.ranks.stop_ranks(1, 0.0, Parking(park_s, standing, hand_over)))
    for rank in (4, 5):
        assert await bench.lines[rank].hear() == PartOrder(generation=1, hand_over=hand_over)
    for rank in ranks:
        bench.lines[rank].tell(1, parked=True)
    for rank in {4, 5} - {*ranks}:
        assert await bench.hear() == KillRank(key=f"1:{rank}", signal=signal.SIGKILL)
        await bench.end_rank(rank)
    return await bench.swept(stopping)


async def test_ranks_are_told_what_to_hand_over_before_they_leave(bench: Survival) -> None:
    assert await park(bench, 4, 5, hand_over=HandOver(leaving=(5,), within_s=60.0)) == ""
    assert {key.rank for key in bench.ranks.parked} == {4, 5}


KEEP = msgspec.structs.replace(launch_of(2), keep=True)


async def test_parked_ranks_go_on(bench: Survival) -> None:
    assert await park(bench, 4, 5) == ""
    assert {key.rank for key in bench.ranks.parked} == {4, 5}
    launching = asyncio.create_task(bench.ranks.launch_ranks(KEEP))
    for rank in (4, 5):
        assert await bench.hear() == RekeyRank(key=f"2:{rank}", old=f"1:{rank}")
        await bench.say(RankStarted(key=f"2:{rank}", pid=os.getpid()))
    assert await launching == "" and bench.ranks.kept == 2
    order = await bench.lines[5].hear()
    assert isinstance(order, RejoinOrder)
    assert (order.env["RANK"], order.env["HOLDFAST_GENERATION"]) == ("5", "2")
    assert REHEARSAL not in order.env
    assert {str(key) for key in bench.ranks.held} == {"2:4", "2:5"} and not bench.ranks.parked


async def test_parked_ranks_go_on_under_other_numbers(bench: Survival) -> None:
    assert await park(bench, 4, 5) == ""
    seat = msgspec.structs.replace(KEEP.seat, group_rank=0, first_rank=2)
    launching = asyncio.create_task(bench.ranks.launch_ranks(msgspec.structs.replace(KEEP, seat=seat, world_size=6)))
    for rank in (4, 5):
        assert await bench.hear() == RekeyRank(key=f"2:{rank - 2}", old=f"1:{rank}")
        await bench.say(RankStarted(key=f"2:{rank - 2}", pid=os.getpid()))
    assert await launching == "" and bench.ranks.kept == 2
    order = await bench.lines[5].hear()
    assert isinstance(order, RejoinOrder)
    assert [order.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "6"]


async def test_one_that_does_not_leave_in_time_is_ended_and_its_heir_rehearses(bench: Survival) -> None:
    assert await park(bench, 5) == ""
    launching = asyncio.create_task(bench.ranks.launch_ranks(KEEP))
    asked: list[object] = []
    while len(asked) < 2:
        if isinstance(one := await bench.hear(), ExecRank | RekeyRank):
            asked.append(one)
            await bench.say(RankStarted(key=one.key, pid=os.getpid()))
    assert await launching == "" and bench.ranks.kept == 1
    [fresh] = [one for one in asked if isinstance(one, ExecRank)]
    assert fresh.key == "2:4" and fresh.env[REHEARSAL] == "1"


async def test_one_that_stands_is_not_waited_for(bench: Survival) -> None:
    async with asyncio.timeout(30):
        assert await park(bench, 5, standing=(4,)) == ""
    assert {key.rank for key in bench.ranks.parked} == {5}


async def test_one_that_has_ended_meanwhile_is_started_anew(bench: Survival) -> None:
    assert await park(bench, 4, 5) == ""
    launching = asyncio.create_task(bench.ranks.launch_ranks(msgspec.structs.replace(KEEP, seat=launch_of(2, 1).seat)))
    assert await bench.hear() == KillRank(key="1:5", signal=signal.SIGKILL), "it has no seat any more"
    await bench.end_rank(5)
    assert await bench.hear() == RekeyRank(key="2:4", old="1:4")
    await bench.say(StartRefused(key="2:4", error="it has ended"))
    assert isinstance(await bench.hear(), ExecRank)
    await bench.say(RankStarted(key="2:4", pid=9))
    assert await launching == "" and bench.ranks.kept == 0


async def test_a_launch_that_keeps_nobody_ends_who_is_parked(bench: Survival) -> None:
    assert await park(bench, 4, 5) == ""
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch_of(2)))
    ended = [await bench.hear(), await bench.hear()]
    assert {one.key for one in ended if isinstance(one, KillRank)} == {"1:4", "1:5"}
    for line in bench.lines.values():
        line.writer.close()
    await bench.until(lambda: not bench.ranks.parked)
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):  # two generations are never on a node at once
        bench.holder.recv(1)
    for rank in (4, 5):
        await bench.end_rank(rank)
    for _ in range(2):
        while not isinstance(one := await bench.hear(), ExecRank):
            pass
        assert REHEARSAL not in one.env
        await bench.say(RankStarted(key=one.key, pid=9))
    assert await launching == ""


async def test_a_plain_stop_ends_who_is_parked(bench: Survival) -> None:
    assert await park(bench, 4, 5) == ""
    stopping = asyncio.create_task(bench.ranks.stop_ranks(1, 0.0))
    ended = [await bench.hear(), await bench.hear()]
    assert {one.key for one in ended if isinstance(one, KillRank)} == {"1:4", "1:5"}
    for rank in (4, 5):
        await bench.end_rank(rank)
    assert await bench.swept(stopping) == ""


async def test_a_rank_that_hangs_up_is_not_parked(bench: Survival) -> None:
    assert await park(bench, 4, 5) == ""
    bench.lines[4].writer.close()
    await bench.until(lambda: {key.rank for key in bench.ranks.parked} == {5})


async def test_one_that_comes_late_is_told_at_once(bench: Survival) -> None:
    """As after a new agent: it carries out the same stop, and ranks connect to it again."""
    bench.lines[4].writer.close()
    await bench.until(lambda: not bench.ranks.survivors.is_there(next(k for k in bench.ranks.held if k.rank == 4)))
    bench.ranks.survivors.part_ranks(1)
    await bench.lines[4].open(1)
    assert await bench.lines[4].hear() == PartOrder(generation=1)


async def lose_rank(bench: Survival, rank: int) -> ForkRank:
    """A rank dies; return the request for a spare one."""
    bench.lines[rank].writer.close()
    await bench.until(lambda: not bench.ranks.survivors.is_there(RankKey(1, rank)))
    await bench.end_rank(rank)
    spare = await bench.hear()
    assert isinstance(spare, ForkRank) and spare.key == f"0:{rank}"
    return spare


async def stop_and_keep(bench: Survival) -> "asyncio.Task[str]":
    """The rank that is left is parked, and a launch keeps it; return that launch."""
    stopping = asyncio.create_task(bench.ranks.stop_ranks(1, 0.0, Parking(60.0, (), None)))
    assert await bench.lines[4].hear() == PartOrder(generation=1)
    bench.lines[4].tell(1, parked=True)
    assert await bench.swept(stopping) == "", "nobody waits for a spare rank to start"
    launching = asyncio.create_task(bench.ranks.launch_ranks(KEEP))
    assert await bench.hear() == ForgetRank(key="1:5")
    assert await bench.hear() == RekeyRank(key="2:4", old="1:4")
    await bench.say(RankStarted(key="2:4", pid=os.getpid()))
    return launching


@pytest.mark.parametrize("early", [True, False])
async def test_a_spare_rank_takes_the_seat_of_a_dead_one(forking: Survival, early: bool) -> None:
    spare = await lose_rank(forking, 5)
    assert spare.env[REHEARSAL] == SEATLESS and "gen-2" in spare.stdout
    own = forking.ranks.environment_for(KEEP, 1)
    assert spare.env["HOLDFAST_SLOT"] != own["HOLDFAST_SLOT"], "what the dead rank wrote is still to be read"
    assert os.stat(spare.env["HOLDFAST_SLOT"].rpartition(":")[0]).st_size == slot_memory_bytes(2)
    seated = RankLine(forking.lines[5].path, 5)
    if early:
        await forking.say(RankStarted(key="0:5", pid=7))
        await seated.open(0, parked=True)
        await forking.until(lambda: forking.ranks.survivors.is_parked(RankKey(0, 5)))
    launching = await stop_and_keep(forking)
    if not early:
        await forking.say(RankStarted(key="0:5", pid=7))
    assert await forking.hear() == RekeyRank(key="2:5", old="0:5")
    await forking.say(RankStarted(key="2:5", pid=7))
    assert await launching == "" and forking.ranks.kept == 1
    if not early:
        await seated.open(0, parked=True)
    order = await seated.hear()
    assert isinstance(order, RejoinOrder) and order.env["HOLDFAST_SLOT"] == own["HOLDFAST_SLOT"]
    assert {str(key) for key in forking.ranks.held} == {"2:4", "2:5"}
    seated.writer.close()


async def test_a_spare_rank_that_cannot_be_had_is_done_without(forking: Survival) -> None:
    await lose_rank(forking, 5)
    await forking.say(RankStarted(key="0:5", pid=7))
    launching = await stop_and_keep(forking)
    assert await forking.hear() == RekeyRank(key="2:5", old="0:5")
    await forking.say(StartRefused(key="2:5", error="it has ended"))
    fresh = await forking.hear()
    assert isinstance(fresh, ForkRank) and (fresh.key, fresh.env[REHEARSAL]) == ("2:5", "1")
    await forking.say(RankStarted(key="2:5", pid=8))
    assert await launching == ""


@pytest.mark.parametrize("how", ["stop", "launch", "probe"])
async def test_a_spare_rank_that_is_not_needed_is_ended(forking: Survival, how: str) -> None:
    await lose_rank(forking, 5)
    await forking.say(RankStarted(key="0:5", pid=7))
    ranks = forking.ranks
    does = {"stop": lambda: ranks.stop_ranks(1, 0.0), "launch": lambda: ranks.launch_ranks(launch_of(2))}
    task = asyncio.create_task(does.get(how, ranks.end_parked)())
    heard = await forking.hear()
    while heard == ForgetRank(key="1:5"):
        heard = await forking.hear()
    assert heard == KillRank(key="0:5", signal=signal.SIGKILL)
    await forking.say(RankEnded(rank=HolderRank(key="0:5", pid=7, code=-9)))
    task.cancel()
    assert [str(rank.key) for rank in forking.over] == ["1:5"], "nobody hears of its end"


@pytest.fixture
async def sparing(forking: Survival) -> Survival:
    """The same, and each rank is to have a spare one."""
    limits = msgspec.structs.replace(forking.ranks.spec.settings.recovery, spares=True)
    settings = msgspec.structs.replace(forking.ranks.spec.settings, recovery=limits)
    forking.ranks.spec = msgspec.structs.replace(forking.ranks.spec, settings=settings)
    return forking


async def begin_standing(bench: Survival, rank: int, pid: int) -> RankLine:
    """A standing spare rank is forked for this one, and waits for its seat; return its line."""
    bench.ranks.keep_spares(True)
    spare = await bench.hear()
    assert isinstance(spare, ForkRank) and (spare.key, spare.env[REHEARSAL]) == (f"0:{rank}", STANDING)
    bench.ranks.keep_spares(True)  # one after the other
    await bench.say(RankStarted(key=spare.key, pid=pid))
    line = RankLine(bench.lines[4].path, rank)
    await line.open(0, parked=True)
    await bench.until(lambda: bench.ranks.survivors.is_parked(RankKey(0, rank)))
    return line


async def test_a_standing_spare_rank_takes_the_seat_and_the_others_stay(sparing: Survival) -> None:
    sparing.ranks.keep_spares(False)  # nobody trains yet
    spares = [await begin_standing(sparing, rank, pid) for rank, pid in ((4, 7), (5, 8))]
    sparing.lines[5].writer.close()
    await sparing.until(lambda: not sparing.ranks.survivors.is_there(RankKey(1, 5)))
    await sparing.end_rank(5)
    launching = await stop_and_keep(sparing)  # nothing is forked
    assert await sparing.hear() == RekeyRank(key="2:5", old="0:5")
    await sparing.say(RankStarted(key="2:5", pid=8))
    assert await launching == ""
    assert isinstance(await spares[1].hear(), RejoinOrder)
    spares[1].tell(2, parked=False)
    sparing.lines[4].tell(2, parked=False)
    await sparing.until(lambda: all(sparing.ranks.survivors.is_there(RankKey(2, rank)) for rank in (4, 5)))
    spares.append(await begin_standing(sparing, 5, 9))  # and 4 has its own from before
    sparing.ranks.keep_spares(True)
    stopping = asyncio.create_task(sparing.ranks.stop_ranks(2, 0.0))
    ended = {(await sparing.hear()).key for _ in range(4)}  # type: ignore[union-attr]
    assert ended == {"0:4", "0:5", "2:4", "2:5"}, "a stop that parks nobody ends them too"
    stopping.cancel()
    for line in spares:
        line.writer.close()


async def test_a_standing_spare_rank_that_fails_is_not_forked_again_and_again(sparing: Survival) -> None:
    line = await begin_standing(sparing, 4, 7)
    line.writer.close()
    await sparing.say(RankEnded(rank=HolderRank(key="0:4", pid=7, code=1)))
    assert await sparing.hear() == ForgetRank(key="0:4")
    other = await begin_standing(sparing, 5, 8)
    assert await sparing.said.get() == "the spare of rank 4 has ended, and the rank has none until the next launch"
    other.writer.close()


async def test_no_spare_rank_is_forked_where_all_are_ended(forking: Survival) -> None:
    stopping = asyncio.create_task(forking.ranks.stop_ranks(1, 0.0))
    assert {(await forking.hear()).key for _ in range(2)} == {"1:4", "1:5"}  # type: ignore[union-attr]
    for rank in (4, 5):
        await forking.end_rank(rank)
    heard = []
    while not isinstance(one := await forking.hear(), SweepLeftovers):
        heard.append(one)
    assert not any(isinstance(one, ForkRank) for one in heard)
    await forking.say(SweepDone())
    assert await stopping == ""
