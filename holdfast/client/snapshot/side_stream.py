"""Takes snapshots of a GPU state on a side stream, while the next forward and backward passes run.

The side stream also writes the slot's header. So all writes to a slot happen in stream order, however far ahead the CPU
is. A seal in the header marks a snapshot as whole; a whole snapshot stays until the next one is sealed. Parameters and
optimizer state may be read until the optimizer's next step; on the GPU, that step waits for the reads. Buffers and
other state that may change before the step are copied at once to a shadow on the GPU. If the bus cannot take all of the
state within a step, the rest, called the tail, is also copied to a shadow, but during the forward pass.

Copies run beside training only if a step was announced since the previous snapshot; otherwise training waits for them.
A script whose optimizers are not torch's may announce no steps. A step in a captured graph calls no hook. So each
replay of a graph that makes a step, or may make one, counts as an announcement. Announcements that only the script can
make are checked: when it announces the next step, the snapshot is sealed if torch has counted no change of a tensor.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.arena import Arena, SlotClaim, SnapshotName
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.client.snapshot.copy_routes import choose_routes, guess_kinds, kinds_of, lengthen_tail, total_bytes
from holdfast.client.snapshot.cuda_graph_replays import GRAPH_WATCH
from holdfast.client.snapshot.cuda_streams import CudaStreams
from holdfast.client.snapshot.routed_copies import STAGES, GpuSlots, RoutedCopies
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from holdfast.client.snapshot.state_item_locations import CurrentItems

_HOST_BYTES = 64 << 20  # of a state that has more than this on the host, the processor makes the copies
_SHADOW_SHARE = 0.6  # of the state, at most, is copied on the GPU first
_SHADOW_ROOM = 0.8  # of what the GPU has left
_MARGIN = 0.9  # of the time in a step that copies are planned for
_LATE_S = 1e-3  # a copy that had to wait as long for its slot says nothing about the bus
_LOOSE_SHARE = 0.05  # of a state, at most, may change unannounced, and is then copied on the GPU at once
_UNTOLD = (
    "training waits for every copy of its state into memory, because nothing says when the state changes: give "
    "optimizer=, or call before_step() right before each change"
)
_UNKNOWN = (
    "a CUDA graph was captured before the Checkpointer was made and may change the state: its replays wait until the "
    "newest snapshot is copied; make the Checkpointer before you capture graphs"
)


class SnapshotRequest(NamedTuple):
    """A snapshot that the script asked for."""

    claim: SlotClaim
    number: int
    things: Sequence[Any]
    packed: bytes
    ready: Any  # the state is as it was when save was called


class CopyTurn(NamedTuple):
    """One snapshot whose copies are queued on the GPU."""

    asked: SnapshotRequest  # and what is read until it is sealed
    free: Any  # the state may change again
    sealed: Any
    late: bool  # the slot was not at hand when it should have begun


class OptimizerWait(NamedTuple):
    """A wait of the optimizer for a snapshot: the snapshot's copies, and the GPU event recorded when the wait began."""

    reached: Any
    turn: CopyTurn


class UnprovenSnapshot(NamedTuple):
    """The newest snapshot, if only the script announces changes. It is sealed once its tensors prove unchanged."""

    items: list[int]  # that are read while training goes on
    tensors: list[torch.Tensor]
    counts: list[int]  # how often each had been changed

    def changed_items(self) -> list[int]:
        counts = map(_count_changes, self.tensors)
        return [item for item, was, now in zip(self.items, self.counts, counts, strict=True) if was != now]


class SideStream:
    """Copies the snapshots of one rank, one after the other in the order of the requests."""

    def __init__(
        self,
        layout: ImageLayout,
        arena: Arena,
        guarded: Sequence[bool],
        streams: CudaStreams,
        reach: Callable[[int, int], None],
        *,
        say: Callable[[str], None],
        followed: bool = True,
    ) -> None:
        """`reach` waits until the GPU can reach a slot's image up to a given byte. `say` prints a sentence for the
        user. Without `followed`, only the script announces changes, and its announcements are checked."""
        self._layout = layout
        self._arena = arena
        self._guarded = list(guarded)
        self._say = say
        self._followed = followed
        self._unproven: UnprovenSnapshot | None = None
        self._heard = False  # a step was announced since the last snapshot
        self._streams = streams
        self._reach = reach
        self._slots = GpuSlots(arena, layout)
        self._seals = SEAL_FENCE.make_pass()
        self._hold = False  # nobody announces all changes of the state: what comes after waits for the copies
        self._queue = ThreadPoolExecutor(
            1, "holdfast-side", streams.use_device
        )  # to queue hundreds of copies takes a while
        self._turns: deque[Future[CopyTurn]] = deque()
        self._taken = self._waited = 0
        self._known = self._version = -1  # of the things
        self._takes = False
        self._waits: deque[OptimizerWait] = deque(maxlen=4)
        self._arrange_plan(guess_kinds(layout), frozenset())
        # Memory that copies still use must not be given to anybody else, even if nobody closes what they let go of.
        weakref.finalize(self, _drain_turns, self._turns, streams).atexit = False
        SEAL_FENCE.add_source(self)
        GRAPH_WATCH.follow(self)

    @property
    def device(self) -> torch.device:
        return self._streams.device

    def is_capturing(self) -> bool:
        return self._streams.is_capturing()

    def can_copy(self, things: CurrentItems) -> bool:
        """Return whether the GPU can copy this state: all of it is on this GPU, except a small part on the host."""
        if things.version != self._known:
            tensors = [thing for thing in things.all if isinstance(thing, torch.Tensor)]
            devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
            on_host = sum(tensor.nbytes for tensor in tensors if tensor.is_cpu)
            self._takes = devices == {self._streams.device} and on_host <= _HOST_BYTES
            self._known = things.version
        return self._takes

    def queue_snapshot(self, name: SnapshotName, found: CurrentItems, packed: bytes) -> SlotClaim | None:
        """Queue a snapshot; None if no slot is free."""
        self._prove_newest(announced=False)
        self._adapt_plan(found)
        claim = self._arena.claim(name, spare_newest=SEAL_FENCE.armed)
        while claim is None and SEAL_FENCE.armed and self._turns:
            self._streams.sync(self._turns.popleft().result().sealed)
            claim = self._arena.claim(name, spare_newest=True)
        if claim is None:
            return None
        things: list[Any] = found.all
        streams, compute, ways = self._streams, self._streams.compute_stream(), self.ways
        if len(self._turns) >= STAGES:
            streams.sync(self._turns.popleft().result().sealed)
        ways.keep_host_values(self._taken, things)
        if ways.split.at_once:
            if self._turns:
                streams.wait(compute, self._turns[-1].result().free)  # until these shadows have been read
            streams.run(compute, lambda: ways.copy_early(things))
        asked = SnapshotRequest(claim, self._taken, things, packed, streams.record_event(compute))
        held, self._heard = self._hold or not self._heard, False
        self._turns.append(self._queue.submit(self._copy_snapshot, asked, held or self._followed))
        self._taken += 1
        if held:
            streams.wait(compute, self._turns[-1].result().free)
            if not self._followed and self._taken > 1:
                self._say(_UNTOLD)
        elif not self._followed:
            items = ways.split.steady
            tensors = [things[item] for item in items]
            self._unproven = UnprovenSnapshot(items, tensors, [*map(_count_changes, tensors)])
        return claim

    def before_step(self, *_: object) -> None:
        """Make the optimizer's step wait on the GPU until the queued copies have read the state."""
        if self._hold:
            return
        if self._streams.is_capturing():
            self._hold = not GRAPH_WATCH.note_step()  # steps of a captured graph do not come by here
            return
        self._heard = True
        self._let_change()

    def before_replay(self, steps: bool | None) -> None:
        """Act as `before_step` does if the next graph to be replayed makes an optimizer's step, or may make one."""
        if self._hold or steps is False:
            return
        if steps:
            self._heard = True
        elif self._turns:
            self._say(_UNKNOWN)
        self._let_change()

    def _let_change(self) -> None:
        """Make the next work of the script wait on the GPU until the queued copies have read the state."""
        self._prove_newest(announced=True)
        if not self._turns:
            return
        compute, turn = self._streams.compute_stream(), self._turns[-1].result()
        if self._waited < self._taken:
            self._waited = self._taken
            if not turn.late:
                self._waits.append(OptimizerWait(self._streams.record_event(compute), turn))
        self._streams.wait(compute, turn.free)

    def void_seals(self) -> None:
        """Void the seals of snapshots that the GPU has not begun to copy. The seal fence holds its lock meanwhile."""
        self.ways.void_seals()

    def drain(self) -> None:
        """Wait until all queued snapshots are sealed."""
        self._prove_newest(announced=True)  # whoever waits for it changes nothing meanwhile
        _drain_turns(self._turns, self._streams)

    def _prove_newest(self, *, announced: bool) -> None:
        """Seal the unproven newest snapshot if its tensors are unchanged and the step is `announced`; else drop it."""
        unproven, self._unproven = self._unproven, None
        if unproven is None:
            return
        changed = unproven.changed_items()
        if announced and not changed:
            self._turns[-1] = self._queue.submit(self._seal_copied, self._turns[-1].result())
            return
        turn = self._turns.pop().result()
        self._streams.sync(turn.sealed)
        self._arena.drop(turn.asked.claim.slot)
        self._say(f"a snapshot is dropped: {self._distrust(changed)}")

    def _distrust(self, changed: list[int]) -> str:
        """Copy the changed items at once from now on, and not beside training. If they are a large part of the state,
        let training wait for every copy. Return the reason and the consequence in words."""
        if not changed:
            return "before_step() was not called between two saves, so its state may have changed meanwhile"
        key, more = self._layout.items[changed[0]].spec.key, len(changed) - 1
        why = f"{f'{key} and {more} more have' if more else f'{key} has'} changed before before_step() was called"
        if total_bytes(self._layout, changed) > _LOOSE_SHARE * total_bytes(self._layout, self.ways.split.steady):
            self._hold = True
            return f"{why}; from now on training waits for every copy"
        for index in changed:
            self._guarded[index] = False
        _drain_turns(self._turns, self._streams)
        self._arrange_plan(self._kinds, self._tail)
        return f"{why}; from now on that is copied at once"

    def _copy_snapshot(self, asked: SnapshotRequest, seal: bool) -> CopyTurn:
        """Queue the copies of one snapshot on the GPU. Called in a thread, while the script goes on."""
        stage = self.ways.fill_stage(asked.number, asked.claim, asked.things, asked.packed)
        began_at = time.monotonic()
        self._reach(asked.claim.slot, self._layout.image_bytes)
        late = time.monotonic() - began_at > _LATE_S
        with GRAPH_WATCH.between_captures():
            return self._queue_copies(asked, seal, stage, late)

    def _queue_copies(self, asked: SnapshotRequest, seal: bool, stage: torch.Tensor, late: bool) -> CopyTurn:
        slot, streams, ways = asked.claim.slot, self._streams, self.ways
        streams.wait(streams.side, asked.ready)
        streams.run(streams.side, lambda: ways.begin_copy(slot, asked.things, stage))
        free = streams.record_event(streams.side)
        streams.run(streams.side, lambda: ways.end_copy(slot))
        if seal:
            streams.run(streams.side, lambda: ways.seal_copy(slot))
        turn = CopyTurn(asked, free, streams.record_event(streams.side), late)
        while self._waits and self._is_over(self._waits[0]):
            self._tail = self._judge_tail(self._waits.popleft())
        return turn

    def _seal_copied(self, turn: CopyTurn) -> CopyTurn:
        """Queue the copy of the header, which seals a snapshot, behind the snapshot's other copies."""
        with GRAPH_WATCH.between_captures():
            self._streams.run(self._streams.side, lambda: self.ways.seal_copy(turn.asked.claim.slot))
            return turn._replace(sealed=self._streams.record_event(self._streams.side))

    def _adapt_plan(self, things: CurrentItems) -> None:
        """Choose new routes if items have moved between host and GPU, or if the optimizer had to wait for copies."""
        kinds = self._kinds
        if things.version != self._version:
            kinds, self._version = kinds_of(self._layout, things.all), things.version
        if kinds != self._kinds or self._tail is not self._arranged:
            self.drain()
            self._arrange_plan(kinds, self._tail)

    def _is_over(self, wait: OptimizerWait) -> bool:
        return self._streams.is_passed(wait.reached) and self._streams.is_passed(wait.turn.free)

    def _judge_tail(self, wait: OptimizerWait) -> frozenset[int]:
        """Return the tail for the next snapshots, longer than before if the optimizer had to wait for this one."""
        had_s = self._streams.between_s(wait.turn.asked.ready, wait.reached)
        took_s = self._streams.between_s(wait.turn.asked.ready, wait.turn.free)
        if took_s <= had_s or self._tail is not self._arranged:
            return self._tail
        split, state = self.ways.split, sum(item.spec.bytes for item in self._layout.items)
        size = total_bytes(self._layout, split.direct)
        most = min(_SHADOW_SHARE * state, self.ways.shadow_bytes + _SHADOW_ROOM * self._streams.free_bytes())
        tail = lengthen_tail(self._layout, split, size * _MARGIN * had_s / took_s, int(most))
        return tail if tail != self._tail else self._tail

    def _arrange_plan(self, kinds: list[str], tail: frozenset[int]) -> None:
        self._kinds, self._tail, self._arranged = kinds, tail, tail
        self._waits.clear()  # they were waits for other ways
        steady = [self._hold or guarded for guarded in self._guarded]
        chosen = choose_routes(self._layout, kinds, steady, tail)
        self.ways: RoutedCopies = RoutedCopies(self._layout, self._slots, chosen, self._streams, self._seals)
        self._queue.submit(self._warm_up, self.ways)

    def _warm_up(self, ways: RoutedCopies) -> None:
        with GRAPH_WATCH.between_captures():
            self._streams.run(self._streams.side, ways.warm_up)


def _count_changes(tensor: torch.Tensor) -> int:
    """Return torch's count of changes to this tensor's memory. It misses changes by kernels outside of torch."""
    return 0 if tensor.is_inference() else tensor._version


def _drain_turns(turns: deque[Future[CopyTurn]], streams: CudaStreams) -> None:
    while turns:
        streams.sync(turns.popleft().result().sealed)
