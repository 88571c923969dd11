"""Which alarm flipped bits should lead to: one where another rank has the same state, none where nobody has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.chaos.ordered import _follows
from holdfast.chaos.orders import Order
from holdfast.chaos.scene import Scene
from holdfast.checkpoint.layout import Item, Layout, Spec
from holdfast.wire.keeping import plan_name

LAYOUT = "ab" * 32


def item(*path: str, replicas: tuple[int, ...], shape: tuple[int, ...] = (4,)) -> Item:
    spec = Spec(
        key=".".join(path), path=path, bytes=16, dtype="float32", shape=shape, group=replicas, replicas=replicas
    )
    return Item(spec=spec, owner=3, offset=0, length=16, payload=0)


def scene(folder: Path, *items: Item) -> Scene:
    layout = Layout(rank=3, world=4, items=items, image_bytes=64)
    (folder / plan_name(3, LAYOUT)).write_bytes(msgspec.msgpack.encode(layout))
    wants = [SimpleNamespace(rank=2, layout="cd" * 32), SimpleNamespace(rank=3, layout=LAYOUT)]
    sight: Any = SimpleNamespace(wants=lambda node: wants, folder=lambda node: folder)
    return cast(Scene, SimpleNamespace(sight=sight))


def order(place: str, bits: str = "mantissa") -> Order:
    return Order(id=1, ranks=(3,), deed="bits", place=place, bits=bits)


@pytest.mark.parametrize("place", ["weights", "gradients", "optimizer"])
def test_replicas_are_compared(tmp_path: Path, place: str) -> None:
    told = scene(tmp_path, item("model", "w", replicas=(2, 3)), item("optimizer", "w", replicas=(2, 3)))
    assert _follows(told, "n1", 3, order(place)) == (("replica", "loss"), "")


@pytest.mark.parametrize("place", ["weights", "gradients", "optimizer"])
def test_what_is_sharded_is_nobody_elses_although_all_count_their_steps_alike(tmp_path: Path, place: str) -> None:
    count = item("optimizer", "step", replicas=(0, 1, 2, 3), shape=())
    told = scene(tmp_path, item("model", "w", replicas=(3,)), item("optimizer", "w", replicas=(3,)), count)
    alarms, why = _follows(told, "n1", 3, order(place))
    assert alarms == () and "nothing to compare it with" in why


def test_what_goes_into_a_sum_is_wrong_for_all(tmp_path: Path) -> None:
    told = scene(tmp_path, item("model", "w", replicas=(2, 3)))
    assert _follows(told, "n1", 3, order("all_reduce"))[0] == ()
    assert _follows(told, "n1", 3, order("activations", "nan")) == (None, ""), "a loss that is no number is seen"
    assert _follows(told, "n1", 2, order("weights"))[0] == (), "no snapshots, nothing to compare"
