"""What is known of CUDA graphs: which of them step, and that no thread of ours asks the GPU while one is captured."""

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from holdfast.client.snapshot.cuda_graph_replays import GraphWatch, watch_graphs


class Follower:
    def __init__(self) -> None:
        self.told: list[bool | None] = []

    def before_replay(self, steps: bool | None) -> None:
        self.told.append(steps)


def watched() -> tuple[GraphWatch, type]:
    """A class as torch.cuda.CUDAGraph is, and who watches it."""

    class Graph:
        fails = ""

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            if self.fails == "begin":
                raise RuntimeError("begin")

        def capture_end(self) -> None:
            if self.fails == "end":
                raise RuntimeError("end")

        def replay(self) -> None: ...

    watch = GraphWatch()
    watch_graphs(Graph, watch)
    return watch, Graph


def step() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()


def capture(graph: object, work: Callable[[], object]) -> None:
    graph.capture_begin(capture_error_mode="thread_local")  # type: ignore[attr-defined]
    try:
        work()
    finally:
        graph.capture_end()  # type: ignore[attr-defined]


def test_which_graphs_step() -> None:
    watch, graphs = watched()
    follower = Follower()
    watch.follow(follower)
    steps, forward, unseen, announced = graphs(), graphs(), graphs(), graphs()
    capture(steps, step)
    step()  # outside of any
    capture(forward, lambda: None)
    capture(announced, watch.note_step)
    for graph in (steps, forward, unseen, announced):
        graph.replay()
    assert follower.told == [True, False, None, True]
    capture(steps, lambda: None)
    steps.replay()
    assert follower.told[4:] == [False], "it was captured anew"
    assert not watch.note_step(), "none is captured now"


def test_who_is_gone_is_told_nothing() -> None:
    watch, graphs = watched()
    follower = Follower()
    told = follower.told
    watch.follow(follower)
    del follower
    gc.collect()
    graphs().replay()
    assert not told


def test_threads_wait_for_the_end_of_a_capture() -> None:
    watch, graphs = watched()
    graph, asked = graphs(), threading.Event()

    def ask() -> None:
        with watch.between_captures():
            asked.set()

    thread = threading.Thread(target=ask, daemon=True)
    graph.capture_begin()
    thread.start()
    assert not asked.wait(0.2)
    graph.capture_end()
    assert asked.wait(30)
    thread.join()


def test_a_capture_waits_for_threads() -> None:
    watch, graphs = watched()
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def ask() -> None:
        with watch.between_captures():
            inside.set()
            leave.wait(30)
            order.append("asked")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert inside.wait(30)
    threading.Timer(0.1, leave.set).start()
    capture(graphs(), lambda: order.append("captured"))
    thread.join()
    assert order == ["asked", "captured"]


@pytest.mark.parametrize("fails", ["begin", "end", "work"])
def test_a_capture_that_fails(fails: str) -> None:
    watch, graphs = watched()
    graph = graphs()
    graph.fails = fails
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        capture(graph, lambda: 1 / 0 if fails == "work" else None)
    began = time.monotonic()
    with watch.between_captures():
        assert time.monotonic() < began + 30
    assert not watch.note_step()
