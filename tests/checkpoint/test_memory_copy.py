"""Copies by several threads: every byte, no other, whatever the sizes and places."""

import ctypes
import mmap
import random

import pytest

from holdfast.checkpoint.memory_copy import MemoryCopier, prefer_large_pages

MIB = 1 << 20


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("large", [False, True])
def test_every_byte_and_no_other(threads: int, large: bool) -> None:
    chance = random.Random(7)
    size = 24 * MIB
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    source[:] = chance.randbytes(size)
    if large:
        prefer_large_pages(_address(target), size)
    wanted, moves, at = bytearray(size), [], 3
    for count in (1, 0, 4095, 4 * MIB, 4 * MIB - 1, 9 * MIB + 5, 17):
        start = chance.randrange(size - count)
        moves.append((_address(target) + at, _address(source) + start, count))
        wanted[at : at + count] = source[start : start + count]
        at += count + 11
    MemoryCopier(threads).copy_moves(iter(moves))
    assert target[:] == wanted


def test_nothing_to_copy() -> None:
    MemoryCopier(2).copy_moves([])


def test_large_pages_are_only_a_wish() -> None:
    memory = mmap.mmap(-1, 8 * MIB)
    memory[5] = 1
    prefer_large_pages(_address(memory) + 5, 6 * MIB)
    prefer_large_pages(_address(memory), 0)
    assert memory[5] == 1


def test_threads_are_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    found = {}
    for ranks in (1, 2, 3, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found[ranks] = MemoryCopier().threads
    assert found == {1: 4, 2: 3, 3: 2, 8: 1}
