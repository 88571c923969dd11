"""How many slots a rank gets: never more than fit, never fewer than need be, and a refusal names its numbers."""

import itertools
import re

import msgspec
import pytest

from holdfast.core.snapshots.memory_grant import (
    LEAST_SLOTS,
    MemoryCap,
    MemoryRequest,
    MemoryRoom,
    format_bytes,
    grant_memory,
    parse_cap,
)

G = 1 << 30


def room(available: int, cap: str = "100%", nproc: int = 1, nodes: int = 1) -> MemoryRoom:
    return MemoryRoom(available_bytes=available, cap=cap, nproc=nproc, nodes=nodes)


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("1", MemoryCap(bytes=1)),
        ("4096", MemoryCap(bytes=4096)),
        ("4096B", MemoryCap(bytes=4096)),
        ("2k", MemoryCap(bytes=2048)),
        ("2KiB", MemoryCap(bytes=2048)),
        ("2kB", MemoryCap(bytes=2000)),
        ("1.5M", MemoryCap(bytes=3 << 19)),
        ("64G", MemoryCap(bytes=64 * G)),
        ("64 GB", MemoryCap(bytes=64 * 10**9)),
        ("1T", MemoryCap(bytes=1 << 40)),
        ("50%", MemoryCap(fraction=0.5)),
        ("100 %", MemoryCap(fraction=1.0)),
        ("0.5%", MemoryCap(fraction=0.005)),
    ],
)
def test_caps(text: str, cap: MemoryCap) -> None:
    assert parse_cap(text) == cap


@pytest.mark.parametrize("text", ["", "0", "0G", "0%", "101%", "-1G", "1e9", "lots", "64 Q", "64Gi", "G", "%", "1 2"])
def test_what_is_no_cap(text: str) -> None:
    with pytest.raises(ValueError, match=r" 64G, .* 50%$") as raised:
        parse_cap(text)
    assert str(raised.value).startswith(f"'{text}' ")


def test_a_cap_never_exceeds_what_is_there() -> None:
    assert parse_cap("64G").allowed_bytes(10 * G) == 10 * G
    assert parse_cap("64G").allowed_bytes(100 * G) == 64 * G
    assert parse_cap("50%").allowed_bytes(100 * G) == 50 * G
    assert room(90 * G, "50%", nodes=3).bytes == 15 * G
    assert room(90 * G, "40G", nodes=3).bytes == 30 * G


def test_every_small_case_of_equal_ranks() -> None:
    """By hand: the most slots, from those wanted down to two, that all ranks of the node can have at once. When this
    leaves something over, a later rank may get one more."""
    cases = itertools.product((1, 2, 3), (1, 2, 3), (0, 1, 4), (2, 3, 4), range(40))
    for nproc, slot, backup, wanted, available in cases:
        fits = [n for n in range(LEAST_SLOTS, wanted + 1) if nproc * (n * slot + backup) <= available]
        made: dict[int, int] = {}
        for rank in range(nproc):
            ask = MemoryRequest(rank=rank, slot_bytes=slot, slots=wanted, backup_bytes=backup)
            given = grant_memory(ask, made, room(available, nproc=nproc))
            same = given.slots == max(fits, default=0)
            assert same or (rank and given.slots > max(fits)), (nproc, slot, backup, wanted, available, rank)
            assert bool(given.why) == (given.slots < wanted)
            assert (given.need_bytes <= given.room_bytes) == bool(fits)
            made[rank] = ask.need_bytes(given.slots)
            if not fits:
                break
        assert not fits or sum(made.values()) <= available


def test_whatever_is_asked_what_was_given_fits() -> None:
    """Ranks of all sizes, in every order: the sum of what is given never exceeds the room."""
    refused = 0
    for sizes, available in itertools.product(itertools.product((1, 2, 5), repeat=3), range(50)):
        made: dict[int, int] = {}
        for rank, slot in enumerate(sizes):
            ask = MemoryRequest(rank=rank, slot_bytes=slot, slots=3)
            given = grant_memory(ask, made, room(available, nproc=3))
            if given.slots:
                made[rank] = ask.need_bytes(given.slots)
            refused += not given.slots
        assert sum(made.values()) <= available
    assert refused


def test_a_last_rank_that_fits_is_not_refused() -> None:
    """When everybody else has asked nothing is guessed any more."""
    for available, slot in itertools.product(range(10, 40), (1, 2, 5)):
        given = grant_memory(MemoryRequest(rank=2, slot_bytes=slot, slots=2), {0: 6, 1: 4}, room(available, nproc=3))
        assert bool(given.slots) == (10 + 2 * slot <= available)


def test_what_the_rank_had_before_is_replaced() -> None:
    ask = MemoryRequest(rank=0, slot_bytes=2, slots=3)
    assert grant_memory(ask, {0: 100}, room(6)).slots == 3
    assert grant_memory(ask, {1: 100}, room(6)).slots == 0


def test_ranks_that_are_no_longer_here_still_take_their_room() -> None:
    assert grant_memory(MemoryRequest(rank=0, slot_bytes=2, slots=3), {5: 10, 6: 10}, room(26, nproc=1)).slots == 3
    assert grant_memory(MemoryRequest(rank=0, slot_bytes=2, slots=3), {5: 10, 6: 10}, room(25, nproc=1)).slots == 2


def test_two_slots_are_the_least_even_if_one_is_asked_for() -> None:
    assert grant_memory(MemoryRequest(rank=0, slot_bytes=2, slots=1), {}, room(4)).slots == 2
    assert grant_memory(MemoryRequest(rank=0, slot_bytes=2, slots=1), {}, room(3)).slots == 0


def test_a_refusal_says_all_numbers_and_what_to_change() -> None:
    ask = MemoryRequest(rank=0, slot_bytes=11 * G, slots=3, backup_bytes=2 * G)
    why = grant_memory(ask, {}, room(200 * G, "50%", nproc=4, nodes=2)).why
    assert why == (
        "snapshots do not fit into the memory of this node: 2 slots of 11.0 GiB and 2.0 GiB of copies for another node "
        "for each of 4 ranks take 96.0 GiB, and 50.0 GiB may be used (--snapshot-memory 50%; 100.0 GiB are available, "
        "one part in 2 of the host's 200.0 GiB); allow more with --snapshot-memory 98304M, or put fewer ranks on a "
        "node, shard the state over more of them, or do without holdfast.Checkpointer"
    )
    assert "allow more" not in grant_memory(ask, {}, room(190 * G, "50%", nproc=4, nodes=2)).why
    last = grant_memory(
        msgspec.structs.replace(ask, rank=3), {0: 24 * G, 1: 24 * G, 2: 24 * G}, room(80 * G, nproc=4)
    ).why
    assert re.findall(r"[\d.]+ GiB", last)[2:5] == ["96.0 GiB", "72.0 GiB", "80.0 GiB"], "all, given already, allowed"
    assert "1 rank take" in grant_memory(ask, {}, room(G)).why


def test_what_is_advised_is_enough() -> None:
    for slot, nproc in itertools.product((1, 1 << 19, 3 * G + 1), (1, 3)):
        ask = MemoryRequest(rank=0, slot_bytes=slot, slots=2)
        why = grant_memory(ask, {}, room(1 << 40, "1", nproc=nproc)).why
        advised = re.search(r"allow more with --snapshot-memory (\S+),", why)
        assert advised and grant_memory(ask, {}, room(1 << 40, advised[1], nproc=nproc)).slots == 2


def test_fewer_slots_are_explained() -> None:
    given = grant_memory(MemoryRequest(rank=7, slot_bytes=8 * G, slots=3), {}, room(20 * G, "18G"))
    assert (given.slots, given.need_bytes, given.room_bytes) == (2, 16 * G, 18 * G)
    assert given.why == (
        "rank 7 gets 2 slots of 8.0 GiB for its snapshots instead of 3: 3 for each of 1 rank would take 24.0 GiB, and "
        "18.0 GiB may be used (--snapshot-memory 18G; 20.0 GiB are available)"
    )


def test_sizes() -> None:
    shown = [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 << 20, 7 * G, 3 << 40, 1 << 60)]
    assert shown == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "5.0 MiB", "7.0 GiB", "3.0 TiB", "1048576.0 TiB"]
