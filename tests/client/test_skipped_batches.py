"""Batches that are left out: exactly those, on every rank alike, and nothing else changes."""

import json
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast.client.training import skipped_batches
from holdfast.client.training.progress import RankProgress
from holdfast.wire.rank_memory.slot_reader import read_slot
from tests.client.conftest import ENV, Zygote

Arena = tuple[str, mmap.mmap]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Look at the environment anew, as a rank does."""

    def again(**env: str) -> None:
        for name in ("HOLDFAST_SKIP", "HOLDFAST_EASE", "HOLDFAST_SLOT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(skipped_batches, "_this", skipped_batches.BatchSkips(RankProgress()))

    again()
    return again


Fresh = Callable[..., None]


def test_nothing_is_left_out_without_a_word() -> None:
    assert not any(holdfast.skip(step) for step in range(1000))
    assert list(holdfast.batches("abc", first=5)) == [(5, "a"), (6, "b"), (7, "c")]


def test_what_was_named_is_left_out(fresh: Fresh, capfd: pytest.CaptureFixture[str]) -> None:
    fresh(HOLDFAST_SKIP="3-4,7-7")
    assert [step for step in range(1, 10) if holdfast.skip(step)] == [3, 4, 7]
    assert [line for line in capfd.readouterr().err.splitlines() if line] == [
        "holdfast: steps 3-4 left out: 2 batches",
        "holdfast: step 7 left out: 1 batch",
    ]


@pytest.mark.parametrize("nonsense", ["words", object(), None, [1], float("nan"), torch.ones(3)])
def test_nothing_raises(fresh: Fresh, nonsense: Any) -> None:
    fresh(HOLDFAST_SKIP="3-4")
    assert not holdfast.skip(nonsense)
    assert holdfast.skip(3)


@pytest.mark.parametrize("told", ["words", "4-3", "3"])
def test_what_cannot_be_read_is_said_and_nothing_left_out(
    fresh: Fresh, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh(HOLDFAST_SKIP=told)
    assert not any(holdfast.skip(step) for step in range(10))
    assert capfd.readouterr().err.count("HOLDFAST_SKIP") == 1


def test_numbers_count_on_over_epochs_though_the_last_batch_of_one_is_left_out(
    fresh: Fresh, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh(HOLDFAST_SKIP="3-4")
    batches = holdfast.batches(["a", "b", "c"])
    epochs = [list(batches) for _ in range(2)]
    assert epochs == [[(1, "a"), (2, "b")], [(5, "b"), (6, "c")]]
    assert (batches.step, batches.skipped) == (6, 2)
    assert capfd.readouterr().err.count("left out") == 2, "what an epoch ends with is told at its end"


def test_nothing_is_read_ahead(fresh: Fresh) -> None:
    fresh(HOLDFAST_SKIP="2-3")
    given: list[int] = []

    def loader() -> Any:
        for batch in range(10, 20):
            given.append(batch)
            yield batch

    batches = iter(holdfast.batches(loader()))
    assert (next(batches), given) == ((1, 10), [10])
    assert (next(batches), given) == ((4, 13), [10, 11, 12, 13])


@pytest.mark.parametrize("first", [-1, "1", 1.0, None])
def test_a_first_number_that_is_none_is_refused(first: Any) -> None:
    with pytest.raises(ValueError, match=r"^first "):
        holdfast.batches([], first=first)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(8, 3), 8),
        ([torch.ones(8, 3), torch.ones(8)], 8),
        ({"ids": torch.ones(8, 3), "labels": torch.ones(8)}, 8),
        (({"ids": torch.ones(8, 3)}, torch.ones(8)), 8),
        ([{"id": 1}, {"id": 2}], 2),
        (["a", "b", "c"], 3),
        (torch.tensor(1.0), 1),
        ([], 0),
        ({}, 0),
        (object(), 0),
        ("text", 0),
    ],
)
def test_samples_are_counted(fresh: Fresh, batch: object, samples: int) -> None:
    fresh(HOLDFAST_SKIP="1-1")
    batches = holdfast.batches([batch])
    assert list(batches) == []
    assert (batches.skipped, batches.skipped_samples) == (1, samples)


def test_the_node_is_told(fresh: Fresh, arena: Arena, capfd: pytest.CaptureFixture[str]) -> None:
    fresh(HOLDFAST_SKIP="2-3", HOLDFAST_SLOT=f"{arena[0]}:1", HOLDFAST_GENERATION="4", RANK="0")
    loader: DataLoader[torch.Tensor] = DataLoader(torch.arange(20.0), batch_size=4)  # type: ignore[arg-type]
    progress = skipped_batches._this._progress
    for step, _ in holdfast.batches(loader):
        now = read_slot(arena[1], 1)
        assert now and now.skippable
        progress.step(step)
    now = read_slot(arena[1], 1)
    assert now and (now.generation, now.step, now.skipped, now.skipped_samples) == (4, 5, 2, 8)
    assert re.search(r"\bsteps 2-3 .*: 2 batches, .*\b8 samples\b", capfd.readouterr().err)


def test_a_script_that_does_not_ask_is_not_skippable(fresh: Fresh, arena: Arena) -> None:
    fresh(HOLDFAST_SKIP="2-3", HOLDFAST_SLOT=f"{arena[0]}:1")
    skipped_batches._this._progress.step(1)
    now = read_slot(arena[1], 1)
    assert now and not now.skippable


def test_who_asks_twice_leaves_it_out_once(fresh: Fresh) -> None:
    fresh(HOLDFAST_SKIP="2-3")
    assert all(holdfast.skip(step) for step in (2, 2, 3, 3))
    assert skipped_batches._this.batches == 2


def test_it_costs_no_torch() -> None:
    code = "import sys, holdfast; [*holdfast.batches([1])]; assert not {'torch', 'msgspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, timeout=60)


TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import holdfast
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
skipped = json.loads(sys.argv[1])  # left out by hand, where holdfast is not asked
ways = sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
rows = TensorDataset(torch.randn(96, 6), torch.randn(96, 2))
model = DistributedDataParallel(torch.nn.Linear(6, 2), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
seen = []
def batches():
    loader = DataLoader(rows, batch_size=6, sampler=list(range(rank, 96, 4)))
    if ways == "batches":
        found = holdfast.batches(loader)
        for epoch in range(3):
            yield from found
        return
    step = 0
    for epoch in range(3):
        for batch in loader:
            step += 1
            if not (holdfast.skip(step) if ways == "skip" else step in skipped):
                yield step, batch
for step, (x, y) in batches():
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    seen.append(step)
    holdfast.step(step, loss=loss)
print(json.dumps([seen, [p.double().tolist() for p in model.parameters()]]), flush=True)
os._exit(0)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("ways", ["batches", pytest.param("skip", marks=pytest.mark.slow)])
def test_ranks_that_skip_equal_ranks_that_leave_out_the_same_by_hand(
    warm: Zygote, group: Callable[[], list[dict[str, str]]], tmp_path: Path, ways: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def trained(ways: str, **env: str) -> list[Any]:
        ranks = warm.forks([one | env for one in group()], str(script), "[4, 8, 9]", ways)
        found = [warm.wait(rank) for rank in ranks]
        assert [one.code for one in found] == [0] * 4, found[0].err
        return [json.loads(one.out) for one in found]

    by_hand, asked = trained("hand"), trained(ways, HOLDFAST_SKIP="4-4,8-9")
    assert asked == by_hand, "steps and weights, bit for bit"
    assert [4, 8, 9] == sorted(set(range(1, 13)) - set(asked[0][0]))
    assert trained(ways)[0][1] != by_hand[0][1], "what was left out mattered"
