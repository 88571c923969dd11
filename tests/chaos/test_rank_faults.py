"""Orders that are carried out by a process that trains; which alarm flipped bits should lead to."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.chaos.injection_records import InjectedFault
from holdfast.chaos.injection_scene import InjectionScene
from holdfast.chaos.job_observer import ObservedNode, ObservedStatus
from holdfast.chaos.rank_faults import _expected_alarms
from holdfast.chaos.rank_faults import order_rank as strike
from holdfast.chaos.rank_orders import PRELOAD, RankOrder
from holdfast.chaos.undo_guard import UndoGuard
from holdfast.checkpoint.image_layout import ImageItem, ImageLayout, RecordSpec
from holdfast.wire.progress_environment import KEEPER
from holdfast.wire.rank_keeper_messages import layout_file_name
from tests.cli.driver import ROOT, until

LAYOUT = "ab" * 32


def item(*path: str, replicas: tuple[int, ...], shape: tuple[int, ...] = (4,)) -> ImageItem:
    spec = RecordSpec(
        key=".".join(path), path=path, bytes=16, dtype="float32", shape=shape, group=replicas, replicas=replicas
    )
    return ImageItem(spec=spec, owner=3, offset=0, length=16, payload=0)


def scene(folder: Path, *items: ImageItem) -> InjectionScene:
    layout = ImageLayout(rank=3, world=4, items=items, image_bytes=64)
    (folder / layout_file_name(3, LAYOUT)).write_bytes(msgspec.msgpack.encode(layout))
    wants = [SimpleNamespace(rank=2, layout="cd" * 32), SimpleNamespace(rank=3, layout=LAYOUT)]
    sight: Any = SimpleNamespace(arena_requests=lambda node: wants, node_folder=lambda node: folder)
    return cast(InjectionScene, SimpleNamespace(sight=sight))


def order(place: str, bits: str = "mantissa") -> RankOrder:
    return RankOrder(id=1, ranks=(3,), deed="bits", place=place, bits=bits)


@pytest.mark.parametrize("place", ["weights", "gradients", "optimizer"])
def test_replicas_are_compared(tmp_path: Path, place: str) -> None:
    told = scene(tmp_path, item("model", "w", replicas=(2, 3)), item("optimizer", "w", replicas=(2, 3)))
    assert _expected_alarms(told, "n1", 3, order(place)) == (("replica", "loss"), "")


@pytest.mark.parametrize("place", ["weights", "gradients", "optimizer"])
def test_what_is_sharded_is_nobody_elses_although_all_count_their_steps_alike(tmp_path: Path, place: str) -> None:
    count = item("optimizer", "step", replicas=(0, 1, 2, 3), shape=())
    told = scene(tmp_path, item("model", "w", replicas=(3,)), item("optimizer", "w", replicas=(3,)), count)
    alarms, why = _expected_alarms(told, "n1", 3, order(place))
    assert alarms == () and why


def test_what_goes_into_a_sum_is_wrong_for_all(tmp_path: Path) -> None:
    told = scene(tmp_path, item("model", "w", replicas=(2, 3)))
    assert _expected_alarms(told, "n1", 3, order("all_reduce"))[0] == ()
    assert _expected_alarms(told, "n1", 3, order("activations", "nan")) == (None, ""), (
        "a loss that is no number is seen"
    )
    assert _expected_alarms(told, "n1", 2, order("weights"))[0] == (), "no snapshots, nothing to compare"


# A rank of its own: it writes down each step that it has made.
TRAINING = f"""
import os, time
import {PRELOAD}
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1_000_000):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with open("steps.new", "w") as file:
        file.write(str(step))
    os.replace("steps.new", "steps")
    time.sleep(0.01)
"""


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, KEEPER: str(folder / "keeper.sock"), "RANK": "3", "PYTHONPATH": str(ROOT)}
    env.pop("HOLDFAST_SLOT", None)
    process = subprocess.Popen([sys.executable, "-c", TRAINING], cwd=folder, env=env)
    try:
        until((folder / "steps").exists, "its first step", 120)
        yield process
    finally:
        process.kill()
        process.wait()


def struck(folder: Path, guard: UndoGuard, fault: InjectedFault) -> str:
    nodes = (ObservedNode(node="n1", role="active", ranks="2-3"),)
    status = ObservedStatus(phase="training", generation=1, step=5, floor=1, nodes=nodes)
    entry = SimpleNamespace(preload=(PRELOAD,), zygote=True)
    sight: Any = SimpleNamespace(
        read_status=lambda: status,
        node_folder=lambda node: folder,
        node_spec=lambda node: SimpleNamespace(entry=entry),
    )
    made = InjectionScene(sight, guard, random.Random(1))
    made.id = 1
    told = strike(made, fault)
    assert told.ranks == (3,) and told.nodes == ("n1",)
    return told.what


@pytest.mark.slow
@pytest.mark.e2e
def test_a_rank_exits_with_the_code_that_was_asked_for(tmp_path: Path) -> None:
    with UndoGuard() as guard, training(tmp_path) as process:
        assert "code 7" in struck(tmp_path, guard, InjectedFault(kind="rank.exit", rank=3, code=7))
        assert process.wait(60) == 7


@pytest.mark.e2e
@pytest.mark.slow
def test_a_rank_hangs_until_its_fault_is_undone(tmp_path: Path) -> None:
    with UndoGuard() as guard, training(tmp_path) as process:
        assert "sleeps" in struck(tmp_path, guard, InjectedFault(kind="rank.hang", rank=3))
        at = (tmp_path / "steps").read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)  # a hundred steps' time
        assert (tmp_path / "steps").read_text() == at
        assert guard.run_undo(1) == ""
        until(lambda: int((tmp_path / "steps").read_text()) > int(at), "it goes on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
