"""Ranks that read a checkpoint together: each block is read once, and all of them fail, or none."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.manifest import BLOCK_BYTES
from tests.checkpoint.making import content, save
from tests.client.conftest import Zygote

pytestmark = pytest.mark.e2e

SCRIPT = str(Path(__file__).with_name("shared_read_job.py"))
SIZES = (3 * BLOCK_BYTES + 4096 + 17, 5000, 2 * BLOCK_BYTES)  # 4, 1 and 2 blocks
Group = Callable[[], list[dict[str, str]]]
Piece = tuple[int, int, int, int]  # rank, start, bytes, to
WHOLE: list[Piece] = [(0, 0, SIZES[0], 100), (1, 10, 4000, SIZES[0] + 100), (2, 7, SIZES[2] - 7, SIZES[0] + 5000)]
# The same bytes, in another order and cut in two.
TURNED: list[Piece] = [(2, 7, SIZES[2] - 7, 0), (1, 10, 4000, SIZES[2]), (0, 0, 99, SIZES[2] + 4000)]
TURNED += [(0, 99, SIZES[0] - 99, SIZES[2] + 4099)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Not to be changed."""
    return save(tmp_path_factory.mktemp("base"), 3, sizes=SIZES)


def expect(pieces: list[Piece]) -> str:
    memory = bytearray(max(to + size for _, _, size, to in pieces))
    for rank, start, size, to in pieces:
        memory[to : to + size] = content(SIZES[rank], 3000 + rank)[start : start + size]
    return hashlib.sha256(memory).hexdigest()


def read(warm: Zygote, group: Group, url: str, pieces: list[list[Piece]], *more: str) -> list[str]:
    """What each rank printed."""
    told = {"WORLD_SIZE": str(len(pieces)), "LOCAL_WORLD_SIZE": str(len(pieces))}
    envs = [env | told for env in group()[: len(pieces)]]
    ended = [warm.wait(rank) for rank in warm.forks(envs, SCRIPT, url, json.dumps(pieces), *more)]
    assert [one.code for one in ended] == [0] * len(pieces), ended
    return [one.out.strip() for one in ended]


def test_each_block_is_read_by_one_of_all_ranks(warm: Zygote, group: Group, url: str) -> None:
    found = read(warm, group, url, [WHOLE, TURNED, WHOLE])
    assert [one.split()[1] for one in found] == [expect(WHOLE), expect(TURNED), expect(WHOLE)]
    assert sorted(int(one.split()[0]) for one in found) == [2, 2, 3]


def test_ranks_that_need_other_blocks_read_for_themselves(warm: Zygote, group: Group, url: str) -> None:
    left: list[Piece] = [(0, 0, SIZES[0], 0)]
    alone: list[Piece] = [(2, 0, 10, 0)]
    found = read(warm, group, url, [left, alone, left])
    assert [one.split()[1] for one in found] == [expect(left), expect(alone), expect(left)]
    assert [int(one.split()[0]) for one in found] == [2, 0, 2]  # the one in the middle reads in place


ALIKE, ONE_OTHER = [WHOLE, TURNED, WHOLE], [WHOLE, [(2, 0, 10, 0)], WHOLE]
FAULTS = [
    (ALIKE, "--fails=0", "refused: the disk is gone"),
    (ALIKE, "--garbles=2", "refused: a block came damaged from rank 2: block {} of __0_0.distcp"),
    (ALIKE, "--lacks=1", "refused: there is no memory"),
    pytest.param((ONE_OTHER, "--fails=0", "refused: the disk is gone"), marks=pytest.mark.slow),
    pytest.param((ONE_OTHER, "--lacks=1", "refused: there is no memory"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", FAULTS)
def test_all_fail_if_one_does(warm: Zygote, group: Group, url: str, case: tuple[list[list[Piece]], str, str]) -> None:
    pieces, fault, told = case
    found = read(warm, group, url, pieces, fault)
    assert len(set(found)) == 1
    assert found[0] in {told.format(block) for block in range(4)}
