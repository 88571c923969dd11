"""Copies between nodes: what is held, what is sent, and how a lost rank's state is gathered again."""

import asyncio
import os
import socket
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.snapshots.keeper_note_folder import KeeperNoteFolder
from holdfast.agent.snapshots.peer_arenas import NO_LAYOUT, PeerLayouts
from holdfast.checkpoint import peer_server, peer_transport
from holdfast.checkpoint.keeper_client import StateFetchError, _parse_answer
from holdfast.checkpoint.peer_server import PushTarget
from holdfast.checkpoint.peer_transport import PeerRefusal, PeerRequest, RefusalCode, TransportError
from holdfast.checkpoint.relayed_push_tickets import RelayTickets
from holdfast.decoding import from_json
from holdfast.model.copy_aim import Aim
from holdfast.model.job_and_seats import Seat
from holdfast.wire import rank_keeper_messages
from holdfast.wire.credentials.certificate_authority import CertificateAuthority
from holdfast.wire.rank_keeper_messages import KeeperRefusal, StateGrant, StateRequest
from tests.agent.peers import Fleet, Node, Trained, backups, image, layout, save, until


@pytest.mark.parametrize("shared", [True, False])
async def test_a_lost_rank_is_gathered_from_its_peer_and_its_replicas(fleet: Fleet, shared: bool) -> None:
    plans = [layout(rank, 3, shared) for rank in range(3)]
    for name in ("a", "b", "c", "spare"):
        await fleet.add(name)
    fleet.launch(1, "a", "b", "c")
    arenas = [await fleet.nodes[n].arena(plan, 1) for n, plan in zip("abc", plans, strict=True)]
    await fleet.aim(-1, 5)
    for step in (4, 5, 6, 7):
        for arena, plan in zip(arenas, plans, strict=True):
            save(arena, plan, step, 1)
        await asyncio.sleep(0.1)
    await until(lambda: all(fleet.nodes[n].keeper.backing.backed == 5 for n in "abc"))
    expected = image(arenas[1], plans[1], 5)
    fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(("a", "spare", "c")))
    restore = fleet.plan("a", "c")
    assert restore.step == 5 and [source.own for source in restore.sources] == [True, False, True]
    fleet.launch(2, "a", "spare", "c", restore=restore)
    spare = fleet.nodes["spare"]
    arena = await spare.arena(plans[1], 2)
    answer = await spare.ask(StateRequest(rank=1, generation=2))
    assert isinstance(answer, StateGrant), answer
    assert (answer.source, answer.step) == ("peer", 5)
    assert image(arena, plans[1], 5) == expected
    assert "rank 1 got " in spare.said[-1]


async def test_a_lost_rank_is_gathered_from_its_second_keeper_when_the_first_is_lost_too(fleet: Fleet) -> None:
    fleet.two_copies = True
    job = Trained(fleet, shared=False, names="abcd")
    await job.start("spare", "other")
    await job.back_up(5)
    keepers = {rank: {name for name in "abcd" if (rank, 5) in backups(fleet.nodes[name])} for rank in range(4)}
    aims = [fleet.nodes[name].keeper.backing.aim for name in "abcd"]
    assert all(keepers[rank] == {aim.peer, aim.second} for rank, aim in enumerate(aims))
    first, second = aims[0].peer, aims[0].second
    expected = image(job.arenas[0], job.plans[0], 5)
    new = {"a": "spare", first: "other"}
    seats = [new.get(name, name) for name in "abcd"]
    fleet.seats = tuple(Seat(node=node, group_rank=i, first_rank=i, nproc=1) for i, node in enumerate(seats))
    restore = fleet.plan(*(name for name in "abcd" if name not in new))
    assert restore.step == 5 and restore.sources[0].nodes == (second,)
    fleet.two_copies = False
    fleet.launch(2, *seats, restore=restore)
    arena = await fleet.nodes["spare"].arena(job.plans[0], 2)
    answer = await fleet.nodes["spare"].ask(StateRequest(rank=0, generation=2))
    assert isinstance(answer, StateGrant) and answer.source == "peer", answer
    assert image(arena, job.plans[0], 5) == expected


async def test_a_keeper_that_takes_no_copies_is_not_waited_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.snapshots.floor_pins_and_copies._ABSENT_S", 0.5)
    monkeypatch.setattr("holdfast.agent.snapshots.peer_sender._AGAIN_S", 0.1)
    fleet.two_copies = True
    job = Trained(fleet)
    await job.start(slots=4)
    keeper, nowhere = fleet.nodes["a"].keeper, ("127.0.0.1", 1)
    aim = keeper.backing.aim
    await keeper.apply_aim(msgspec.structs.replace(aim, second_at=nowhere, next=5))
    job.save(5)
    await until(lambda: keeper.backing.backed == 5)
    assert keeper.backing.absent == aim.second
    assert (0, 5) in backups(fleet.nodes[aim.peer]) and (0, 5) not in backups(fleet.nodes[aim.second])
    await asyncio.sleep(0.6)
    await keeper.apply_aim(msgspec.structs.replace(aim, floor=5, next=6))
    job.save(6)
    await until(lambda: keeper.backing.backed == 6)
    assert not keeper.backing.absent and (0, 6) in backups(fleet.nodes[aim.second])


async def test_a_copy_goes_to_another_host_by_relays_and_comes_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keepers with certificates, on a machine with cores to spare; whatever the size, as of a large state."""
    relayed, redeem = list[str](), RelayTickets.redeem

    def count_relays(tickets: RelayTickets, link: socket.socket) -> str:
        node = redeem(tickets, link)
        relayed.extend([node] * bool(node))
        return node

    monkeypatch.setattr(RelayTickets, "redeem", count_relays)
    monkeypatch.setattr(peer_server, "most_relays", lambda: 8)
    monkeypatch.setattr(peer_transport, "_is_relayed", lambda keeper, all: keeper.guard is not None)
    fleet.authority = CertificateAuthority(tmp_path / "door")
    job = Trained(fleet, shared=False, names="ab")
    await job.start("spare")
    await job.back_up(5)
    assert set(relayed) == {"a", "b"} and backups(fleet.nodes["b"]) == {(0, 5)}
    expected = image(job.arenas[0], job.plans[0], 5)
    fleet.launch(2, "spare", "b", restore=fleet.plan("b"))
    arena = await fleet.nodes["spare"].arena(job.plans[0], 2)
    answer = await fleet.nodes["spare"].ask(StateRequest(rank=0, generation=2))
    assert isinstance(answer, StateGrant), answer
    assert image(arena, job.plans[0], 5) == expected


async def test_the_floor_stays_while_snapshots_roll_on(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    job.save(*range(6, 20))
    assert all(job.steps(rank) == {5, 18, 19} for rank in range(3))
    await job.back_up(20, floor=5)
    job.save(*range(21, 25))
    assert all(job.steps(rank) == {20, 23, 24} for rank in range(3))
    assert backups(fleet.nodes["b"]) == {(0, 20), (0, 5)}


async def test_a_floor_that_is_not_confirmed_does_not_cost_the_one_before(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    for step in (10, 20, 30):  # aimed at, copied, and never agreed upon
        await fleet.aim(5, step)
        job.save(step)
        await until(lambda step=step: all(job.backed(name) == step for name in "abc"))  # type: ignore[misc]
    assert all((rank, 5) in backups(fleet.nodes[name]) for rank, name in enumerate("bca"))
    assert all(5 in job.steps(rank) for rank in range(3))


async def test_what_is_let_go_before_it_is_sent_is_not_sent(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    backing = fleet.nodes["a"].keeper.backing
    for task in fleet.nodes["a"].running:
        task.cancel()  # we have the turns of its keeper
    await fleet.aim(-1, 5)
    job.save(5)
    assert backing.is_next_ready()
    sending = backing.send_next()
    backing.step_aside()  # a checkpoint took the slot first
    await sending
    assert backing.backed == -1 and backing.is_next_ready(), "it is held anew"


async def test_a_checkpoint_that_is_written_for_long_stops_no_copies(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start(slots=4)
    await job.back_up(5)
    job.save(6)
    [written] = [one for one in job.arenas[1].list_sealed() if one.step == 6]
    assert job.arenas[1].pin(written.slot, written.seq)  # as its writer does
    for step in (7, 8):
        await job.back_up(step, floor=5 if step == 7 else 7)
        assert job.steps(1) >= {6, step}, "and the rank goes on"
    job.save(9, 10)


async def test_ranks_of_a_node_agree_on_the_step(fleet: Fleet) -> None:
    """Of two ranks one has gone on before we looked."""
    node = await fleet.add("a")
    await fleet.add("b")
    seat = Seat(node="a", group_rank=0, first_rank=0, nproc=2)
    fleet.launch(1, "a", "b")
    keeper = node.keeper
    keeper.backing.begin_generation(1, 2, -1)
    keeper.backing.set_aim(Aim(generation=1, peer="b", peer_at=fleet.nodes["b"].keeper.address, next=5))
    plans = [layout(rank, 2, False) for rank in range(2)]
    arenas = [await node.arena(plan, 1) for plan in plans]
    assert seat.nproc == len(arenas)
    for step in (6, 7):
        save(arenas[0], plans[0], step, 1)
    for step in (7, 8):
        save(arenas[1], plans[1], step, 1)
    await until(lambda: keeper.backing.backed == 7)


async def test_with_two_slots_nothing_is_copied_and_it_is_said(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start(slots=2)
    job.save(1, 2)
    backing = fleet.nodes["a"].keeper.backing
    assert backing.newest_shared_step() == -1 and "to b: that takes 3 " in fleet.nodes["a"].said[0]
    assert backing.newest_shared_step() == -1 and len(fleet.nodes["a"].said) == 1, "once"


async def test_a_damaged_copy_is_not_given(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start("spare")
    await job.back_up(5)
    await job.back_up(9, floor=5)
    keeper = fleet.nodes["c"].keeper
    copy = keeper._shelf._backups[1].arena
    newest = copy.list_sealed()[0]
    await until(lambda: copy.read_checksums(newest.slot))
    copy.slot_image(newest.slot)[100] ^= 1
    fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(("a", "spare", "c")))
    fleet.launch(2, "a", "spare", "c", restore=fleet.plan("a", "c"))
    spare = fleet.nodes["spare"]
    await spare.arena(job.plans[1], 2)
    answer = await spare.ask(StateRequest(rank=1, generation=2))
    assert isinstance(answer, KeeperRefusal) and "rank 1 at step 9" in answer.why
    assert "rank 1 at step 9" in fleet.nodes["c"].said[-1]
    assert fleet.plan("a", "c").step == 5, "the one before"


async def _spare_after_loss(fleet: Fleet) -> tuple[Node, Path]:
    """A spare has the seat of b, whose state only c holds; the socket of c's keeper is moved from the path returned."""
    job = Trained(fleet, shared=False)
    await job.start("spare")
    await job.back_up(5)
    fleet.launch(2, "a", "spare", "c", restore=fleet.plan("a", "c"))
    await fleet.nodes["spare"].arena(job.plans[1], 2)
    path = Path(fleet.nodes["c"].keeper.address[0])
    os.rename(path, path.with_name("moved"))
    return fleet.nodes["spare"], path


async def test_a_keeper_that_cannot_be_reached_is_asked_again(fleet: Fleet) -> None:
    spare, path = await _spare_after_loss(fleet)
    asked = asyncio.create_task(spare.ask(StateRequest(rank=1, generation=2)))
    await until(lambda: spare.said)
    assert " step 5: c: " in spare.said[0] and str(path) in spare.said[0], "which one cannot be reached"
    os.rename(path.with_name("moved"), path)
    answer = await asked
    assert isinstance(answer, StateGrant), answer
    assert (answer.source, answer.step) == ("peer", 5)


async def test_a_keeper_that_stays_away_is_no_error_of_the_script(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.agent.snapshots.keeper._REACH_S", 0.5)
    spare, _ = await _spare_after_loss(fleet)
    answer = await spare.ask(StateRequest(rank=1, generation=2))
    assert isinstance(answer, KeeperRefusal) and answer.unfetched, answer
    with pytest.raises(StateFetchError, match=r"\brank 1 .* step 5: c: "):
        _parse_answer(rank_keeper_messages.encode(answer))


async def test_a_floor_that_was_damaged_is_held_no_longer(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start(slots=4)
    await job.back_up(5)
    own = fleet.nodes["b"].keeper._arenas.list_arenas()[0].arena
    newest = own.list_sealed()[0]
    assert own.write_checksums(newest.slot) and own.count_pinned() == 1, "the floor"
    own.slot_image(newest.slot)[100] ^= 1
    fleet.launch(2, "a", "b", "c", restore=fleet.plan("a", "b", "c"))
    assert isinstance(await fleet.nodes["b"].ask(StateRequest(rank=1, generation=2)), KeeperRefusal)
    fleet.launch(3, "a", "b", "c", restore=fleet.plan("a", "b", "c"))
    for name, plan in zip("abc", job.plans, strict=True):
        await fleet.nodes[name].arena(plan, 3, 4)
    assert own.count_pinned() == 0, "it lies there no more"
    for before, step in ((-1, 7), (7, 9), (9, 11)):  # floors go on, one after the other
        await fleet.aim(before, step)
        for arena, plan in zip(job.arenas, job.plans, strict=True):
            save(arena, plan, step, 3)
        await until(partial(lambda wanted: all(job.backed(name) == wanted for name in "abc"), step))
    assert own.count_pinned() == 2, "the floor, and the next"


async def test_copies_of_a_line_that_was_left_are_dropped(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    fleet.launch(2, "a", "b", "c")  # from nothing
    assert fleet.copies("a", "b", "c") == []


async def test_memory_of_copies_that_nobody_needs_is_given_back(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    assert "backup-0" in fleet.nodes["b"].memory
    await fleet.nodes["b"].keeper.apply_aim(Aim(generation=1, floor=7))
    assert "backup-0" not in fleet.nodes["b"].memory


async def test_the_next_agent_holds_what_was_held(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    node = fleet.nodes["b"]
    successor = node.successor()
    assert {(copy.rank, copy.step) for copy in successor.list_copies()} == {(0, 5), (1, 5)}
    aim = msgspec.structs.replace(node.keeper.backing.aim, floor=5)
    await successor.apply_aim(aim)
    job.save(6, 7, 8)
    assert job.steps(1) == {5, 7, 8}


async def test_the_next_agent_takes_copies(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    await fleet.restart("b")
    await job.back_up(9, floor=5)
    assert backups(fleet.nodes["b"]) == {(0, 5), (0, 9)}


async def test_a_peer_that_is_gone_is_told_of_once(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    for seat in fleet.seats:
        keeper = fleet.nodes[seat.node].keeper
        await keeper.apply_aim(Aim(generation=1, peer="gone", peer_at=("127.0.0.1", 1), next=3))
    job.save(3)
    await until(lambda: fleet.nodes["a"].said)
    assert "to gone: " in fleet.nodes["a"].said[0] and job.backed("a") == -1
    await fleet.nodes["a"].keeper.apply_aim(
        Aim(generation=1, peer="b", peer_at=fleet.nodes["b"].keeper.address, next=4)
    )
    job.save(4)
    await until(lambda: job.backed("a") == 4)


async def test_a_keeper_takes_from_other_hosts_only_what_it_is_to_keep_for_them(fleet: Fleet) -> None:
    node = await fleet.add("b")
    fleet.launch(1, "b")
    ward = Seat(node="a", group_rank=0, first_rank=0, nproc=2)
    await node.keeper.apply_aim(Aim(generation=1, wards=(ward,)))
    shelf, plan = node.keeper._shelf, layout(1, 4, False)
    ask = PeerRequest(verb="push", rank=1, layout=plan.digest.hex(), generation=1, world=4)
    for teller, rank in (("evil", 1), ("a", 2), ("evil", 2)):
        for verb in ("push", "tell"):
            refused = shelf.receive_push(msgspec.structs.replace(ask, verb=verb, rank=rank, bytes=9), teller)
            assert isinstance(refused, PeerRefusal) and refused.code is RefusalCode.OTHER
            assert refused.text.endswith(f" rank {rank} for {teller}")
    assert shelf.receive_push(ask, "a") == NO_LAYOUT == shelf.receive_push(ask)


async def test_no_chunk_of_a_copy_that_was_given_up_reaches_the_next_one(fleet: Fleet) -> None:
    """A link of the generation before brings its last chunk late, and the slot has been taken by then."""
    node = await fleet.add("b")
    fleet.launch(1, "b")
    shelf, plan = node.keeper._shelf, layout(1, 4, False)
    told = msgspec.msgpack.encode(plan)
    ask = PeerRequest(verb="tell", rank=1, layout=plan.digest.hex(), generation=1, world=4, bytes=len(told))
    target = shelf.receive_push(ask)
    assert isinstance(target, PushTarget)
    target.views[0][:] = told
    target.finish()
    size = sum(part.end - part.start for part in plan.owned_ranges())

    async def push(generation: int) -> PushTarget:
        wanted = msgspec.structs.replace(ask, verb="push", bytes=size, step=5, generation=generation)
        taken = await asyncio.to_thread(shelf.receive_push, wanted)
        assert isinstance(taken, PushTarget), taken
        return taken

    old = await push(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        chunks = peer_transport.cut_chunks(old.views)
        late = asyncio.create_task(asyncio.to_thread(peer_server._receive_chunks, theirs, old, chunks, 0))
        ours.sendall(b"o")
        await until(lambda: bytes(old.views[0][:1]) == b"o")
        fleet.launch(2, "b")
        new = await push(2)
        new.views[0][:2] = b"nn"
        with pytest.raises(TransportError):
            await asyncio.wait_for(late, 20.0)
        with pytest.raises(OSError):  # noqa: PT011 - whatever the system says of a link that has ended
            ours.sendall(b"o" * size)
    assert bytes(new.views[0][:2]) == b"nn"
    with pytest.raises(TransportError, match="given up"), old.admit_chunk(theirs):
        pass


def tell_layout(layouts: PeerLayouts, ask: PeerRequest, content: bytes) -> None:
    target = layouts.receive_layout(msgspec.structs.replace(ask, bytes=len(content)))
    assert isinstance(target, PushTarget)
    target.views[0][:] = content
    target.finish()


def test_a_layout_is_what_its_digest_says(tmp_path: Path) -> None:
    layouts, plan = PeerLayouts(KeeperNoteFolder(tmp_path)), layout(1, 4, False)
    ask = PeerRequest(verb="tell", rank=1, layout=plan.digest.hex())
    other = msgspec.msgpack.encode(layout(2, 4, False))
    for content in (bytes(100), other, b"\x80"):
        with pytest.raises(TransportError, match="this is"):
            tell_layout(layouts, ask, content)
    assert list(tmp_path.iterdir()) == [] and layouts.get(1, ask.layout) is None
    tell_layout(layouts, ask, msgspec.msgpack.encode(plan))
    assert layouts.get(1, ask.layout) == plan
    assert isinstance(layouts.receive_layout(msgspec.structs.replace(ask, bytes=1 << 28)), PeerRefusal)


@pytest.mark.parametrize("digits", ["\x00", "../x", "a" * 65, "a/b"])
def test_a_request_names_no_path(digits: str) -> None:
    request = msgspec.json.encode({"verb": "tell", "rank": 1, "layout": digits})
    with pytest.raises(msgspec.DecodeError):
        from_json(request, PeerRequest)
