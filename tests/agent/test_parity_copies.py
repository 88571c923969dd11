"""Parity between nodes: half the memory of copies, and the same state out of it."""

import os
import socket

import msgspec
import pytest

from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.parity_image import half_of
from holdfast.checkpoint.peer_transport import TransportError
from holdfast.model.job_and_seats import Seat
from holdfast.wire.rank_keeper_messages import FromKeeper, KeeperRefusal, StateGrant, StateRequest
from tests.agent.peers import Fleet, Node, Trained, image, save, until


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transport, "CHUNK_BYTES", 128 << 10)


@pytest.fixture
def fleet(fleet: Fleet) -> Fleet:
    fleet.parity = True
    return fleet


def kept(job: Trained) -> set[int]:
    return {job.fleet.nodes[name].keeper.parity_step for name in job.names}


async def back_up(job: Trained, step: int, floor: int = -1) -> None:
    """As the controller does it: the floor rises when all have sent and all have sealed."""
    await job.fleet.aim(floor, step)
    job.save(step)
    await until(lambda: all(job.backed(name) == step for name in job.names) and kept(job) == {step})
    await job.fleet.aim(step, -1)


async def take_seats(job: Trained, lost: dict[str, str]) -> None:
    """The next generation: spares sit where lost nodes sat."""
    names = [lost.get(name, name) for name in job.names]
    job.fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(names))
    plan = job.fleet.plan(*(name for name in job.names if name not in lost))
    job.fleet.launch(2, *names, restore=plan)


async def resumed(job: Trained, rank: int, spare: str) -> tuple[FromKeeper, Arena]:
    node = job.fleet.nodes[spare]
    arena = await node.arena(job.plans[rank], 2)
    return await node.ask(StateRequest(rank=rank, generation=2)), arena


def parities(node: Node) -> dict[tuple[int, int], Arena]:
    return {ranks: backup.arena for ranks, (_, backup) in node.keeper._shelf.pairs._kept.items()}


def for_others(node: Node) -> int:
    """Bytes that a node keeps for others."""
    return sum(os.fstat(fd).st_size for name, fd in node.memory.items() if name.startswith("backup-"))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", ["abc", "abcd"])
async def test_a_lost_rank_is_told_apart_again(fleet: Fleet, shared: bool, names: str) -> None:
    job = Trained(fleet, shared, names)
    await job.start("spare")
    await back_up(job, 5)
    job.save(6, 7)
    expected = image(job.arenas[1], job.plans[1], 5)
    await take_seats(job, {"b": "spare"})
    answer, arena = await resumed(job, 1, "spare")
    assert isinstance(answer, StateGrant), answer
    assert (answer.source, answer.step) == ("peer", 5)
    assert image(arena, job.plans[1], 5) == expected


@pytest.mark.parametrize("shared", [True, False])
async def test_two_lost_nodes_that_keep_nothing_of_each_other(fleet: Fleet, shared: bool) -> None:
    """Of six, three and three keep for each other; a lost rank's state has parts that another lost one owned."""
    job = Trained(fleet, shared, "abcdef")
    await job.start("x", "y")
    await back_up(job, 5)
    expected = [image(job.arenas[rank], job.plans[rank], 5) for rank in (0, 1)]
    await take_seats(job, {"a": "x", "b": "y"})
    for rank, spare in enumerate(("x", "y")):
        answer, arena = await resumed(job, rank, spare)
        assert isinstance(answer, StateGrant), answer
        assert image(arena, job.plans[rank], 5) == expected[rank]


async def test_two_lost_nodes_that_do(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await back_up(job, 5)
    assert fleet.plan("a").sources == (), "what it was laid over is lost too"
    assert fleet.plan("a", "c").step == 5


async def test_it_takes_half_the_memory(fleet: Fleet) -> None:
    job = Trained(fleet, names="abcd")
    await job.start()
    await back_up(job, 5)
    await back_up(job, 9, floor=5)
    laid = [for_others(fleet.nodes[name]) for name in job.names]
    for name in job.names:
        for memory in [memory for memory in fleet.nodes[name].memory if memory.startswith("backup-")]:
            await fleet.nodes[name].make(memory, 0)
    fleet.parity = False
    fleet.launch(2, *job.names)
    await fleet.aim(-1, 20)
    for name, plan in zip(job.names, job.plans, strict=True):
        save(await fleet.nodes[name].arena(plan, 2), plan, 20, 2)
    await until(lambda: all(job.backed(name) == 20 for name in job.names))
    whole = [for_others(fleet.nodes[name]) for name in job.names]
    ratios = [a / b for a, b in zip(laid, whole, strict=True)]
    assert all(0.49 < ratio < 0.53 for ratio in ratios), ratios


async def test_the_floor_stays_while_the_next_is_made(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await back_up(job, 5)
    await fleet.aim(5, 9)
    save(job.arenas[0], job.plans[0], 9, 1)
    save(job.arenas[1], job.plans[1], 9, 1)
    await until(lambda: job.backed("a") == job.backed("b") == 9)
    assert -1 < min(kept(job)) == 5, "what c has to give is missing"
    assert fleet.plan("a", "b").step == fleet.plan("b", "c").step == 5
    save(job.arenas[2], job.plans[2], 9, 1)
    await until(lambda: kept(job) == {9})
    assert fleet.plan("a", "b").step == 9


async def test_a_damaged_parity_is_not_used(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start("spare")
    await back_up(job, 5)
    await back_up(job, 9, floor=5)
    [arena] = [arena for ranks, arena in parities(fleet.nodes["c"]).items() if 1 in ranks]
    newest = arena.list_sealed()[0]
    await until(lambda: arena.read_checksums(newest.slot))
    arena.slot_image(newest.slot)[100] ^= 1
    await take_seats(job, {"b": "spare"})
    answer, _ = await resumed(job, 1, "spare")
    assert isinstance(answer, KeeperRefusal) and "rank 1 at step 9" in answer.why
    assert "at step 9" in fleet.nodes["c"].said[-1]
    assert fleet.plan("a", "c").step == 5, "the one before"


async def test_damage_in_what_it_was_laid_over_is_seen(fleet: Fleet) -> None:
    """No checksum of the other rank's snapshot was computed yet; what the lost one had sent is known all the same."""
    job = Trained(fleet, shared=False)
    await job.start("spare")
    await back_up(job, 5)
    other = job.arenas[0]
    [one] = [one for one in other.list_sealed() if one.step == 5]
    assert not other.read_checksums(one.slot)
    for start, _ in [part for half in (0, 1) for part in _halves(job, 0, half)]:
        other.slot_image(one.slot)[start + 10] ^= 1
    await take_seats(job, {"b": "spare"})
    answer, _ = await resumed(job, 1, "spare")
    assert isinstance(answer, KeeperRefusal) and answer.unfetched
    assert "parity" in answer.why and "rank 1 " in answer.why


def _halves(job: Trained, rank: int, half: int) -> tuple[tuple[int, int], ...]:
    return half_of([(part.start, part.end) for part in job.plans[rank].owned_ranges()], half)


async def test_a_link_that_breaks_again_and_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every link carries a few chunks and ends; none of them is XORed twice."""
    sent: list[int] = []
    real = peer_transport.send_chunk

    def send(link: socket.socket, chunk: memoryview, pacer: BytePacer) -> None:
        sent.append(len(chunk))
        if len(sent) % 5 == 0:
            link.sendall(chunk[: len(chunk) // 2])
            raise TransportError("broken by the test")
        real(link, chunk, pacer)

    monkeypatch.setattr("holdfast.agent.snapshots.peer_sender._AGAIN_S", 0.05)
    job = Trained(fleet, shared=False)
    await job.start("spare")
    with monkeypatch.context() as patch:
        patch.setattr(peer_transport, "send_chunk", send)
        await back_up(job, 5)
    assert len(sent) > 40
    expected = image(job.arenas[1], job.plans[1], 5)
    await take_seats(job, {"b": "spare"})
    answer, arena = await resumed(job, 1, "spare")
    assert isinstance(answer, StateGrant), answer
    assert image(arena, job.plans[1], 5) == expected


async def test_who_goes_on_to_a_later_step_is_heard_of(fleet: Fleet) -> None:
    """Steps that differ must come to the controller's ears at once; it aims anew."""
    job = Trained(fleet)
    await job.start()
    await back_up(job, 5)
    await fleet.aim(5, 9)
    save(job.arenas[0], job.plans[0], 10, 1)  # it had heard of it too late
    for rank in (1, 2):
        save(job.arenas[rank], job.plans[rank], 9, 1)
    await until(lambda: [job.backed(name) for name in "abc"] == [10, 9, 9])
    assert fleet.plan("b", "c").step == 5 and kept(job) != {9} != {10}
    await back_up(job, 20, floor=5)
    assert fleet.plan("b", "c").step == 20


async def test_a_keeper_that_starts_anew_is_given_its_halves_again(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await back_up(job, 5)
    await fleet.aim(5, 9)
    for rank in (0, 1):
        save(job.arenas[rank], job.plans[rank], 9, 1)
    await until(lambda: job.backed("a") == job.backed("b") == 9)
    node = fleet.nodes["b"]
    await fleet.restart("b")
    assert node.keeper.parity_step == -1
    assert {copy.step for copy in node.keeper.list_copies() if copy.half >= 0} == {5}, "and nothing that is not whole"
    await fleet.aim(5, 9)
    save(job.arenas[2], job.plans[2], 9, 1)
    await until(lambda: [job.backed(name) for name in "ac"] == [9, 9] and node.keeper.parity_step == 9)


async def test_parity_of_a_line_that_was_left_is_dropped(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await back_up(job, 5)
    assert any(copy.half >= 0 for copy in fleet.copies("a", "b", "c"))
    fleet.launch(2, "a", "b", "c")  # from nothing
    assert fleet.copies("a", "b", "c") == []


async def test_memory_of_pairs_that_nobody_needs_is_given_back(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await back_up(job, 5)
    node = fleet.nodes["b"]
    assert for_others(node)
    await node.keeper.apply_aim(msgspec.structs.replace(node.keeper.backing.aim, floor=7))
    assert not for_others(node)
