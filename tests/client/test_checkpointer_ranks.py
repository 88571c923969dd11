"""A Checkpointer on many ranks: exact after a kill, whole on storage, and cut anew for another number of ranks."""

import os
import re
import signal
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from holdfast.checkpoint import dcp
from holdfast.wire.progress_environment import KEEPER
from tests.client.conftest import Ended, Rank, Zygote
from tests.client.fake_keeper import FakeKeeper

pytestmark = pytest.mark.e2e

SCRIPT = str(Path(__file__).with_name("rank_job.py"))
Group = Callable[[], list[dict[str, str]]]


class Job:
    """Ranks that start together; when one dies, the others are ended."""

    def __init__(self, zygote: Zygote, group: Group, keeper: FakeKeeper | None = None) -> None:
        self._zygote = zygote
        self._group = group
        self._env = {KEEPER: str(keeper.path)} if keeper else {}

    def run(self, world: int, *argv: str) -> list[Ended]:
        told = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), **self._env}
        envs = [env | told for env in self._group()[:world]]
        ranks = self._zygote.forks(envs, SCRIPT, *argv)
        killed = [int(argv[argv.index("--kill") + 1].split(":")[0])] if "--kill" in argv else []
        ended = {number: self._zygote.wait(ranks[number]) for number in killed}
        for number, rank in enumerate(ranks):
            if killed and number not in killed:
                _kill(rank)
        return [ended.get(number) or self._zygote.wait(rank) for number, rank in enumerate(ranks)]

    def told(self, world: int, *argv: str) -> list[list[str]]:
        ended = self.run(world, *argv)
        assert [one.code for one in ended] == [0] * world, ended
        return [one.out.split(maxsplit=3) for one in ended]


def _kill(rank: Rank) -> None:
    try:
        os.kill(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


KILLS = [
    "ddp 4 during",
    "plain 2 during",
    pytest.param("ddp 4 before", marks=pytest.mark.slow),
    pytest.param("ddp 4 after", marks=pytest.mark.slow),
    pytest.param("fsdp 4 during", marks=pytest.mark.slow),
    pytest.param("hsdp 4 after", marks=pytest.mark.slow),
    pytest.param("tp 2 during", marks=pytest.mark.slow),
]
STORED = [
    ("ddp", 3),
    pytest.param("fsdp", 3, marks=pytest.mark.slow),
    pytest.param("hsdp", 4, marks=pytest.mark.slow),
    pytest.param("tp", 2, marks=pytest.mark.slow),
]
CUT_ANEW = [
    ("tp", 2),
    pytest.param("ddp", 4, marks=pytest.mark.slow),
    pytest.param("fsdp", 4, marks=pytest.mark.slow),
    pytest.param("hsdp", 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", KILLS)
def test_exact_after_a_kill(warm: Zygote, group: Group, keeper: FakeKeeper, case: str) -> None:
    how, number, when = case.split()
    world = int(number)
    reference = [told[2:] for told in Job(warm, group).told(world, how, "7")]
    job = Job(warm, group, keeper)
    ended = job.run(world, how, "7", "--kill", f"1:5:{when}")
    assert ended[1].code == -signal.SIGKILL
    again = job.told(world, how, "7", "--seed", "3")
    assert {told[0] for told in again} == {"5" if when == "after" else "4"}
    assert {told[1] for told in again} == {"memory"}
    assert [told[2:] for told in again] == reference


@pytest.mark.parametrize(("how", "world"), STORED)
def test_on_storage(warm: Zygote, group: Group, tmp_path: Path, how: str, world: int) -> None:
    job, path = Job(warm, group), str(tmp_path / "checkpoints")
    reference = [told[2:] for told in job.told(world, how, "6")]
    job.run(world, how, "5", "--path", path)
    assert sorted(found.name for found in Path(path).glob("step-*")) == ["step-00000002", "step-00000004"]
    again = job.told(world, how, "6", "--path", path, "--seed", "3")
    assert {tuple(told[:2]) for told in again} == {("4", "storage")}
    assert [told[2:] for told in again] == reference
    metadata = dcp.decode_metadata(Path(path, "step-00000004", ".metadata").read_bytes())
    chunks = {name: found for name, found in metadata.state_dict_metadata.items() if name.startswith("model.0.weight")}
    cells = [prod(chunk.sizes) for found in chunks.values() for chunk in found.chunks]  # type: ignore[union-attr]
    assert sum(cells) == 36 * 12, "what replicas share is there once"


@pytest.mark.parametrize("how", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_model_that_was_changed_is_told_by_each_rank_in_one_sentence(
    warm: Zygote, group: Group, tmp_path: Path, how: str
) -> None:
    job, path = Job(warm, group), tmp_path / "checkpoints"
    job.told(2, how, "4", "--path", str(path))
    before = sorted(path.rglob("*"))
    ended = job.run(2, how, "6", "--path", str(path), "--wide", "48")
    assert [one.code for one in ended] == [1, 1], ended
    for one in ended:
        assert one.err.count("Traceback (most recent call last)") == 1, one.err
        *_, told = (line for line in one.err.splitlines() if "StateError: " in line)
        assert f"{path}/step-00000004 " in told
        assert re.search(r"model\.0\.(bias is 36 there and 48|weight is 36x12 there and 48x12) here", told), told
    assert sorted(path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("how", "world"), CUT_ANEW)
def test_another_number_of_ranks(warm: Zygote, group: Group, tmp_path: Path, how: str, world: int) -> None:
    job, path = Job(warm, group), str(tmp_path / "checkpoints")
    wanted = job.told(world, how, "4", "--path", path)[0][2]
    for other, many in (("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("plain", 1)):
        told = job.told(many, other, "4", "--path", path, "--seed", "3")
        assert {tuple(one[:2]) for one in told} == {("4", "storage")}
        assert {one[2] for one in told} == {wanted}, f"{how} on {world} to {other} on {many}"
    # And torch alone reads it, into one process.
    model = nn.Sequential(nn.Linear(12, 36), nn.Tanh(), nn.Linear(36, 12), nn.Linear(12, 7))
    model.register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    torch_dcp.load(state, checkpoint_id=f"{path}/step-00000004")
    from tests.client.rank_job import digest

    assert digest(model, optimizer) == wanted
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-2 * 0.9**4)
