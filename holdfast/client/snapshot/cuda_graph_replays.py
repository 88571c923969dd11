"""Finds the CUDA graphs that change the state when they are replayed, and keeps our threads still during a capture.

A replay runs no Python, so an optimizer's step inside a graph calls no hook. This module wraps torch's own classes
instead: if an optimizer made a step while a graph was captured, each replay makes the step again. Nothing is known of
graphs that were captured earlier. In torch's default mode, a capture fails if another thread of the process registers
or allocates memory or asks for an event. So our threads wait for the end of a capture, and a capture for theirs.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_CAPTURE_S = 300.0  # a capture that nobody ends holds our threads up for no longer than this


class ReplayFollower(Protocol):
    def before_replay(self, steps: bool | None) -> None:
        """Called before each replay. `steps` says whether the graph has an optimizer's step; None if unknown."""


class GraphWatch:
    """Knows which CUDA graphs of this process make an optimizer's step."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by graph
        self._hooks: weakref.WeakKeyDictionary[Any, RemovableHandle] = weakref.WeakKeyDictionary()  # while captured
        self._followers: weakref.WeakSet[ReplayFollower] = weakref.WeakSet()
        self._news = threading.Condition()
        self._asking = 0  # threads of ours that ask the GPU for something
        self._captured_since = 0.0  # 0: no capture runs
        self._is_on = False

    def start(self) -> None:
        """Watch all graphs that are captured from now on. A second call has no effect."""
        if not self._is_on:
            self._is_on = True
            watch_graphs(torch.cuda.CUDAGraph, self)

    def follow(self, follower: ReplayFollower) -> None:
        """Call this follower before every replay, as long as the follower lives."""
        self._followers.add(follower)

    def note_step(self) -> bool:
        """Note that the graphs in capture make an optimizer's step; return False if no known graph is in capture."""
        for graph in list(self._hooks):
            self._steps[graph] = True
        return bool(self._hooks)

    @contextmanager
    def between_captures(self) -> Iterator[None]:
        """Wait for a running capture, and delay new ones during this block. Capturing threads must not call this."""
        with self._news:
            self._news.wait_for(self._is_capture_over, _CAPTURE_S)
            self._asking += 1
        try:
            yield
        finally:
            with self._news:
                self._asking -= 1
                self._news.notify_all()

    def on_capture(self, graph: Any) -> None:
        """Wait until our threads have stopped using the GPU, then begin to watch a capture."""
        with self._news:
            self._captured_since = time.monotonic()  # from now on none of them begins anything
            self._news.wait_for(lambda: not self._asking, _CAPTURE_S)
        self._steps[graph] = False
        self._hooks[graph] = register_optimizer_step_pre_hook(lambda *_: self._steps.__setitem__(graph, True))

    def on_captured(self, graph: Any) -> None:
        """Stop watching a capture that has ended, and let our other threads use the GPU again."""
        if hook := self._hooks.pop(graph, None):
            hook.remove()
        with self._news:
            self._captured_since = time.monotonic() if self._hooks else 0.0
            self._news.notify_all()

    def on_replay(self, graph: Any) -> None:
        for follower in list(self._followers):
            follower.before_replay(self._steps.get(graph))

    def _is_capture_over(self) -> bool:
        return not self._captured_since or time.monotonic() > self._captured_since + _CAPTURE_S


def watch_graphs(graphs: Any, watch: GraphWatch) -> None:
    """Make all graphs of the class `graphs` report their captures and replays to the watch."""
    begin: Callable[..., None] = graphs.capture_begin
    end: Callable[..., None] = graphs.capture_end
    replay: Callable[..., None] = graphs.replay

    @wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        watch.on_capture(graph)
        is_begun = False
        try:
            begin(graph, *args, **kwargs)
            is_begun = True
        finally:
            if not is_begun:
                watch.on_captured(graph)

    @wraps(end)
    def capture_end(graph: Any) -> None:
        try:
            end(graph)
        finally:
            watch.on_captured(graph)

    @wraps(replay)
    def replayed(graph: Any) -> None:
        watch.on_replay(graph)
        replay(graph)

    for name, method in (("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", replayed)):
        setattr(graphs, name, method)


GRAPH_WATCH = GraphWatch()
