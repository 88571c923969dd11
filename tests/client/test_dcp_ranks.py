"""Several ranks save and load by torch.distributed.checkpoint: what we write torch reads, what torch writes we read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.conftest import ROOT, Zygote

Group = Callable[[], list[dict[str, str]]]
Run = Callable[..., None]
pytestmark = pytest.mark.e2e
JOB = str(Path(__file__).with_name("dcp_job.py"))


@pytest.fixture
def run(warm: Zygote, group: Group) -> Run:
    """So many ranks do something at a path, and all of them come to its end."""

    def ran(world: int, *argv: str) -> None:
        envs = [env | {"WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT)} for env in group()[:world]]
        ended = [warm.wait(rank) for rank in warm.forks(envs, JOB, *argv)]
        assert [(one.code, one.out) for one in ended] == [(0, "done\n")] * world, [one.err[-3000:] for one in ended]

    return ran


@pytest.mark.parametrize(
    ("world", "what"),
    [
        (2, "caching"),
        (3, "some"),
        (2, "silent"),
        (2, "failed"),
        (3, "rivals"),
        pytest.param(4, "caching", marks=pytest.mark.slow),
    ],
)
def test_no_save_is_lost(run: Run, tmp_path: Path, world: int, what: str) -> None:
    run(world, what, str(tmp_path / "ckpt"))


WAYS = [("ours", "torch"), ("torch", "ours"), ("ours", "ours")]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("worlds", [(1, 4), (2, 3), (3, 2), (4, 1), (4, 4)], ids=str)
@pytest.mark.slow
def test_other_worlds(run: Run, tmp_path: Path, worlds: tuple[int, int], way: tuple[str, str]) -> None:
    run(worlds[0], "save", str(tmp_path / "ckpt"), way[0])
    run(worlds[1], "load", str(tmp_path / "ckpt"), way[1])


@pytest.mark.parametrize("how", ["lowest", "thread", "process"])
@pytest.mark.slow
def test_ways_to_save(run: Run, tmp_path: Path, how: str) -> None:
    run(2, "save", str(tmp_path / "ckpt"), f"ours,{how}")
    for reader in ("ours", "torch"):
        run(3, "load", str(tmp_path / "ckpt"), reader)
