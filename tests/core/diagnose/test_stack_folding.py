"""Stacks made comparable."""

import pytest

from holdfast.core.diagnose.stack_folding import (
    cluster_ranks,
    fold_stack,
    is_same_place,
    is_waiting,
    is_waiting_for_one,
    shorten_path,
)
from holdfast.model.rank_traces import Frame
from tests.core.diagnose.places import RECEIVE, REDUCE, SCRIPT, SLEEP, Places, process


def folded(places: Places) -> tuple[str, ...]:
    return fold_stack(Frame(*place) for place in places)


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", "yaml/loader.py"),
        ("/usr/lib/python3.11/selectors.py", "selectors.py"),
        ("/nodes/n0/release-7/src/train.py", "src/train.py"),
        ("train.py", "train.py"),
        ("<frozen runpy>", "<frozen runpy>"),
        ("", ""),
    ],
)
def test_paths_are_the_same_on_every_node(file: str, shown: str) -> None:
    assert shorten_path(file) == shown


def test_what_differs_for_no_reason_is_taken_out() -> None:
    one = folded((("step", "/a/x/train.py", 3), ("fn_0x7f00aa", "libfoo.so", 0), ("layer_12", "m.py", 1)))
    other = folded((("step", "/b/x/train.py", 9), ("fn_0x7f99bb", "libfoo.so", 0), ("layer_12", "m.py", 2)))
    assert one == other
    assert one[2] == "layer_12 (m.py)"


def test_who_waits() -> None:
    native = (("c10d::Work::wait", "libtorch_cpu.so", 0), ("pthread_cond_wait", "libc.so.6", 0))
    assert is_waiting(folded(REDUCE)) and is_waiting(folded((*REDUCE, *native)))
    assert not is_waiting(folded(SLEEP)) and not is_waiting(())
    assert not is_waiting(folded((*REDUCE, ("hook", "/a/train.py", 1))))  # called back into the script
    assert is_waiting_for_one(folded(RECEIVE)) and not is_waiting_for_one(folded(REDUCE))


def test_alike() -> None:
    deep = tuple((f"f{i}", "m.py", i) for i in range(40))
    assert is_same_place(folded(deep), folded(deep[:-3]))
    assert not is_same_place(folded(deep), folded(deep[:20]))
    assert not is_same_place(
        folded((*deep, *REDUCE[2:])), folded((*deep, ("sleep", "m.py", 1)))
    )  # however long the way
    assert not is_same_place(folded(REDUCE), folded(SLEEP))
    assert not is_same_place(folded((*deep, *REDUCE[2:])), folded((*deep, *RECEIVE[2:])))


def test_clusters() -> None:
    lines = (*SCRIPT[:1], ("train", "/opt/run/train.py", 8), *REDUCE[2:])  # another line of the same function
    found = cluster_ranks([process(0), process(1, lines), process(2, SLEEP), process(3), process(4, ())])
    assert [(c.ranks, c.waits) for c in found] == [((0, 1, 3), True), ((2,), False)]
    assert found[1].frames[-1] == "load (run/train.py)"
    assert cluster_ranks([]) == ()
