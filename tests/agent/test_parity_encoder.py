"""Parity in the making: two halves in any order, by links that break and deliver twice, are XORed once."""

import random
from pathlib import Path

import pytest
import xxhash

from holdfast.agent.snapshots.parity_encoder import SUPERSEDED, ParityEncoder, ParityPair
from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.parity_image import SUM_BYTES, ParityLayout, make_parity_layout
from holdfast.checkpoint.peer_transport import TransportError
from tests.agent.peers import layout

Halves = tuple[bytes, bytes]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transport, "CHUNK_BYTES", 96 << 10)


@pytest.fixture
def shape() -> ParityLayout:
    """Of one rank that holds all by itself, and one that holds a third: the halves are not of one length."""
    return make_parity_layout(layout(0, 3, False), layout(1, 3, True))


@pytest.fixture
def mixing(tmp_path: Path, shape: ParityLayout) -> ParityEncoder:
    arena = Arena.make(str(tmp_path / "a"), layout=bytes(32), image_bytes=shape.image_bytes, slots=2)
    slot = arena.begin_slot(5, 1)
    assert slot
    slot.image[:] = random.Random(0).randbytes(shape.image_bytes)  # what lay there before
    return ParityEncoder(slot, shape, lambda mixing: None)


@pytest.fixture
def halves(shape: ParityLayout) -> Halves:
    chance = random.Random(1)
    return chance.randbytes(shape.starts[0][-1]), chance.randbytes(shape.starts[1][-1])


def put(mixing: ParityEncoder, shape: ParityLayout, half: int, number: int, halves: Halves) -> None:
    start, end = shape.starts[half][number : number + 2]
    chunk = halves[half][start:end]
    holding = mixing.half_target(half)
    assert holding.mix and len(holding.views[number]) == len(chunk)
    holding.mix(number, memoryview(chunk), xxhash.xxh3_64_digest(chunk))


def expected(halves: Halves) -> bytes:
    length = max(map(len, halves))
    one, two = (half.ljust(length, b"\0") for half in halves)
    return bytes(a ^ b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_chunks_in_any_order_and_more_than_once(
    mixing: ParityEncoder, shape: ParityLayout, halves: Halves, seed: int
) -> None:
    chance = random.Random(seed)
    counts = [len(chunks) for chunks in shape.chunks]
    assert counts[0] > 2 * counts[1] > 4
    while not mixing.is_complete():
        half = chance.randrange(2)
        done = mixing.half_target(half).done
        for number in {done, max(0, done - 1)}:  # the next, and one that comes once more by another link
            if number < counts[half]:
                put(mixing, shape, half, number, halves)
    assert bytes(mixing.slot.image[: shape.bytes]) == expected(halves)
    for half, starts in enumerate(shape.starts):
        sums = mixing.slot.image[shape.checksums_at(half) :]
        for number in range(counts[half]):
            chunk = halves[half][starts[number] : starts[number + 1]]
            assert bytes(sums[SUM_BYTES * number :][:SUM_BYTES]) == xxhash.xxh3_64_digest(chunk)


def test_what_is_given_up_takes_nothing_more(mixing: ParityEncoder, shape: ParityLayout, halves: Halves) -> None:
    put(mixing, shape, 0, 0, halves)
    before = bytes(mixing.slot.image)
    mixing.cancel()
    with pytest.raises(TransportError, match=SUPERSEDED.text):
        put(mixing, shape, 0, 1, halves)
    with pytest.raises(TransportError, match=SUPERSEDED.text):
        mixing.is_complete()
    assert bytes(mixing.slot.image) == before


def test_a_chunk_that_ends_half_way_spoils_it(
    mixing: ParityEncoder, shape: ParityLayout, halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how much of it was XORed, so it is not tried again."""
    put(mixing, shape, 0, 0, halves)
    with monkeypatch.context() as patch:
        patch.setattr(
            "holdfast.agent.snapshots.parity_encoder.xor_into", lambda into, other: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            put(mixing, shape, 1, 0, halves)
    with pytest.raises(TransportError, match=SUPERSEDED.text):
        put(mixing, shape, 1, 0, halves)


def test_pairs_are_told_apart() -> None:
    pair = ParityPair(ranks=(1, 2), layouts=("a", "b"))
    others = [ParityPair(ranks=(2, 1), layouts=("a", "b")), ParityPair(ranks=(1, 2), layouts=("a", "c"))]
    assert pair.name == "1+2" and len(pair.digest) == 32
    assert pair.digest not in {other.digest for other in others}
