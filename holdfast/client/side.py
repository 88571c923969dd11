"""Snapshots of a state on a GPU: copied beside the next forward and backward pass, and waited for by the GPU alone.

The copies run on a stream of their own. It writes the slot's header too, so whatever happens to a slot happens in the
order of that stream, however far ahead the processor is: a slot that is not whole is never sealed, and a whole one
stays until the next is. Parameters and optimizer state may be read until the optimizer's next step, which waits for
that on the GPU. What may change earlier, buffers say, is copied on the GPU first; and so is as much of the rest as the
bus cannot take within a step.
"""

import struct
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.arena import Arena, Claim, Name
from holdfast.checkpoint.header import SlotHead
from holdfast.checkpoint.layout import EXTRA, Layout
from holdfast.checkpoint.state import Image, bytes_of, shaped
from holdfast.client.found import Things
from holdfast.client.split import kinds_of, longer, split
from holdfast.client.streams import Streams

# What the GPU writes into a slot's header: seq while it is written; step, generation, at, flags; seq when it is whole.
_WORDS = struct.Struct("<QqqdI4xQ")
_SEQ, _BODY, _WHOLE = slice(0, 8), slice(8, SlotHead.flags.offset + 4), slice(_WORDS.size - 8, _WORDS.size)
_STAGES = 3  # the processor may be as many snapshots ahead of the GPU before it has to wait
_HOST_BYTES = 64 << 20  # of a state that has more than this on the host, the processor makes the copies
_SHADOW_SHARE = 0.6  # of the state, at most, is copied on the GPU first
_SHADOW_ROOM = 0.8  # of what the GPU has left
_MARGIN = 0.9  # of the time in a step that copies are planned for


class Stage(NamedTuple):
    """Memory of the host from which the GPU takes what is small."""

    flat: torch.Tensor
    image: Image


class Turn(NamedTuple):
    """One snapshot on its way."""

    ready: Any  # the state is as it was when save was called
    free: Any  # it may change again
    sealed: Any
    alive: object  # is read until then


class Wait(NamedTuple):
    """Where an optimizer came to wait for a snapshot."""

    reached: Any
    turn: Turn


class Side:
    """The copies of one rank's state, one after the other in the order in which they were asked for."""

    def __init__(self, layout: Layout, arena: Arena, guarded: Sequence[bool], streams: Streams) -> None:
        self._layout = layout
        self._arena = arena
        self._guarded = guarded
        self._streams = streams
        self._memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self._hold = not any(guarded)  # nobody tells when the state changes: what comes after waits for the copies
        self._queue = ThreadPoolExecutor(1, "holdfast-side")  # to queue hundreds of copies takes a while
        self._turns: deque[Future[Turn]] = deque()
        self._taken = self._waited = 0
        self._known = self._version = -1  # of the things
        self._takes = False
        self._waits: deque[Wait] = deque(maxlen=4)
        self._arrange([], frozenset())

    def takes(self, things: Things) -> bool:
        """Whether this state is one for the GPU to copy."""
        if things.version != self._known:
            tensors = [thing for thing in things.all if isinstance(thing, torch.Tensor)]
            devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
            on_host = sum(tensor.nbytes for tensor in tensors if tensor.is_cpu)
            self._takes = devices == {self._streams.device} and on_host <= _HOST_BYTES
            self._known = things.version
        return self._takes

    def take(self, name: Name, found: Things, packed: bytes) -> Claim | None:
        """Queue a snapshot; None if no slot is free."""
        self._adapt(found)
        things: list[Any] = found.all
        claim = self._arena.claim(name)
        if claim is None:
            return None
        streams, compute = self._streams, self._streams.compute()
        stage = self._filled(claim, things, packed)
        if self._shadows:
            if self._turns:
                streams.wait(compute, self._turns[-1].result().sealed)  # until the shadows have been read
            sources = [things[index] for index in self._shadows]
            streams.run(compute, lambda: _copy([*self._shadows.values()], sources))
        ready = streams.record(compute)
        self._turns.append(self._queue.submit(self._queued, claim, things, stage, ready))
        self._taken += 1
        if self._hold:
            streams.wait(compute, self._turns[-1].result().free)
        return claim

    def before_step(self, *_: object) -> None:
        """An optimizer is about to change the state."""
        if self._hold or not self._turns:
            return
        if self._streams.is_capturing():
            self._hold = True  # steps of a captured graph do not come by here
            return
        compute, turn = self._streams.compute(), self._turns[-1].result()
        if self._waited < self._taken:
            self._waited = self._taken
            self._waits.append(Wait(self._streams.record(compute), turn))
        self._streams.wait(compute, turn.free)

    def drain(self) -> None:
        """Wait until all that was queued is sealed."""
        while self._turns:
            self._streams.sync(self._turns.popleft().result().sealed)

    def _queued(self, claim: Claim, things: Sequence[Any], stage: Stage, ready: Any) -> Turn:
        streams, ways, device = self._streams, self._split, self._device
        head, memory = self._arena.head_at(claim.slot), self._memory
        image = memory[self._arena.image_at(claim.slot) :]
        into = {i: shaped(image, self._layout.items[i].spec, self._layout.items[i].payload) for i in self._large}

        def begin() -> None:
            device.copy_(stage.flat, non_blocking=True)
            _copy([*self._views.values()], [self._shadows.get(index, things[index]) for index in self._views])
            memory[head : head + 8].copy_(device[_SEQ], non_blocking=True)
            _copy([into[index] for index in ways.direct], [things[index] for index in ways.direct])

        def end() -> None:
            _copy([into[index] for index in ways.late], [self._shadows[index] for index in ways.late])
            for run, at in ways.runs:
                image[run.start : run.end].copy_(device[at : at + run.end - run.start], non_blocking=True)
            memory[head + _BODY.start : head + _BODY.stop].copy_(device[_BODY], non_blocking=True)
            memory[head : head + 8].copy_(device[_WHOLE], non_blocking=True)

        streams.wait(streams.side, ready)
        streams.run(streams.side, begin)
        free = streams.record(streams.side)
        streams.run(streams.side, end)
        return Turn(ready, free, streams.record(streams.side), (things, stage))

    @torch.no_grad()
    def _filled(self, claim: Claim, things: Sequence[Any], packed: bytes) -> Stage:
        """What the host adds, in memory that the last snapshots have done with."""
        if len(self._turns) >= _STAGES:
            self._streams.sync(self._turns.popleft().result().sealed)
        stage = self._stages[self._taken % _STAGES]
        name = claim.name
        words = (claim.seq, name.step, name.generation, claim.at, name.flags, claim.seq + 1)
        stage.image.memory[: _WORDS.size] = _WORDS.pack(*words)
        for index in self._split.host:
            thing = things[index]
            if self._layout.items[index].spec.key == EXTRA:
                stage.image.put_bytes(index, packed)
            elif isinstance(thing, torch.Tensor):
                stage.image.payloads[index].copy_(thing)
            else:
                stage.image.put_value(index, thing)
        return stage

    def _adapt(self, things: Things) -> None:
        """Choose the ways anew if things lie elsewhere than before, or if the optimizer had to wait for them."""
        while self._turns and self._turns[0].done() and self._streams.passed(self._turns[0].result().sealed):
            self._turns.popleft()
        kinds, tail = self._kinds, frozenset(self._split.late)
        if things.version != self._version:
            kinds, self._version = kinds_of(self._layout, things.all), things.version
        while self._waits and self._streams.passed(self._waits[0].reached) and not self._is_under_way(self._waits[0]):
            tail = self._tail(self._waits.popleft())
        if kinds != self._kinds or tail != frozenset(self._split.late):
            self.drain()
            self._waits.clear()  # they were waits for other ways
            self._arrange(kinds, tail)

    def _is_under_way(self, wait: Wait) -> bool:
        return not self._streams.passed(wait.turn.free)

    def _tail(self, wait: Wait) -> frozenset[int]:
        """What to copy on the GPU first, judged by an earlier snapshot."""
        had_s = self._streams.between_s(wait.turn.ready, wait.reached)
        took_s = self._streams.between_s(wait.turn.ready, wait.turn.free)
        if took_s <= had_s:
            return frozenset(self._split.late)
        size = sum(self._layout.items[index].spec.bytes for index in self._split.direct)
        held = sum(shadow.nbytes for shadow in self._shadows.values())
        state = sum(item.spec.bytes for item in self._layout.items)
        most = min(_SHADOW_SHARE * state, held + _SHADOW_ROOM * self._streams.room())
        return longer(self._layout, self._split, size * _MARGIN * had_s / took_s, int(most))

    def _arrange(self, kinds: list[str], tail: Collection[int]) -> None:
        self._kinds = kinds
        steady = [self._hold or guarded for guarded in self._guarded]
        self._split = ways = split(self._layout, kinds or [""] * len(steady), steady, tail)
        self._large = (*ways.direct, *ways.late)
        self._shadows = self._views = {}
        self._stages: list[Stage] = []
        if not kinds:
            return
        make = {"dtype": torch.uint8, "device": self._streams.device}
        self._device = torch.empty(ways.stage_bytes, **make)  # type: ignore[call-overload]
        specs = [item.spec for item in self._layout.items]
        self._views = {i: shaped(self._device, specs[i], ways.places[i]) for i in (*ways.packed, *ways.early)}
        self._shadows = {i: shaped(torch.empty(specs[i].bytes, **make), specs[i], 0) for i in ways.shadowed}  # type: ignore[call-overload]
        self._stages = [self._stage() for _ in range(_STAGES)]

    def _stage(self) -> Stage:
        flat = self._streams.host(self._split.stage_bytes)
        memory = bytes_of(flat)
        pattern = self._arena.image(0)  # all slots have the same bytes around payloads
        for run, at in self._split.runs:
            memory[at : at + run.end - run.start] = pattern[run.start : run.end]
        return Stage(flat, Image(self._layout, memory, self._split.places))


@torch.no_grad()
def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
