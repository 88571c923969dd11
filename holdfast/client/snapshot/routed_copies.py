"""Copies a snapshot along the routes that were chosen for its items, through buffers that are allocated beforehand."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.arena import Arena, SlotClaim
from holdfast.checkpoint.arena_header import SlotHeader
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout
from holdfast.checkpoint.state_image import StateImage, bytes_of, shape_payload
from holdfast.client.snapshot.copy_routes import CopyRoutes, is_large
from holdfast.client.snapshot.cuda_streams import CudaStreams
from holdfast.client.snapshot.seal_fence import SealPass

STAGES = 3  # the processor may be as many snapshots ahead of the GPU before it has to wait

# What the GPU writes into a slot's header: seq while it is written; step, generation, at, flags; seq when it is whole.
_WORDS = struct.Struct("<QqqdI4xQ")
_SEQ, _BODY, _WHOLE = slice(0, 8), slice(8, SlotHeader.flags.offset + 4), slice(_WORDS.size - 8, _WORDS.size)
_TURN_BYTES = 32 << 20  # copied without letting others onto the bus
_FIXED = frozenset((type(None), bool, int, float, str, bytes))


class GpuSlots:
    """The memory of an arena, as tensors into which the GPU copies."""

    def __init__(self, arena: Arena, layout: ImageLayout) -> None:
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self.pattern = arena.slot_image(0)  # all slots have the same bytes around payloads
        self.heads = [memory[arena.head_at(slot) :] for slot in range(arena.slots)]
        self.images = [memory[arena.image_at(slot) :][: arena.image_bytes] for slot in range(arena.slots)]
        self.payloads = [
            {i: shape_payload(image, item.spec, item.payload) for i, item in enumerate(layout.items) if is_large(item)}
            for image in self.images
        ]


class HostStage(NamedTuple):
    """Pinned host memory from which the GPU takes small items."""

    flat: torch.Tensor
    image: StateImage


class RoutedCopies:
    """Copies snapshots along fixed routes. All buffers are allocated beforehand, so a snapshot is only copies."""

    def __init__(
        self, layout: ImageLayout, slots: GpuSlots, chosen: CopyRoutes, streams: CudaStreams, seals: SealPass
    ) -> None:
        self.split, self._seals = chosen, seals
        self._layout = layout
        self._slots = slots
        specs = [item.spec for item in layout.items]
        on_gpu = {"dtype": torch.uint8, "device": streams.device}
        self._device = torch.empty(chosen.stage_bytes, **on_gpu)  # type: ignore[call-overload]
        self._views = {
            i: shape_payload(self._device, specs[i], chosen.places[i]) for i in (*chosen.packed, *chosen.early)
        }
        self._shadows = {
            i: shape_payload(torch.empty(specs[i].bytes, **on_gpu), specs[i], 0)  # type: ignore[call-overload]
            for i in chosen.shadowed
        }
        self._stages = [self._make_stage(streams.host_buffer(chosen.stage_bytes)) for _ in range(STAGES)]
        sources = [self._device[at : at + run.end - run.start] for run, at in chosen.runs]
        self._runs = [([image[run.start : run.end] for run, _ in chosen.runs], sources) for image in slots.images]
        self._tensors = [index for index in chosen.host if specs[index].dtype and specs[index].key != EXTRA]
        self._values = [index for index in chosen.host if not specs[index].dtype]
        self._extra = [index for index in chosen.host if specs[index].key == EXTRA]
        self._tick, self._tock = torch.zeros(8, **on_gpu), streams.host_buffer(8)  # type: ignore[call-overload]

    @property
    def shadow_bytes(self) -> int:
        return sum(shadow.nbytes for shadow in self._shadows.values())

    # What the processor does, in a stage that the GPU has done with.

    @torch.no_grad()
    def keep_host_values(self, number: int, things: Sequence[Any]) -> None:
        """Copy the host items that may change as soon as the script continues."""
        image = self._stages[number % STAGES].image
        for index in self._tensors:
            image.payloads[index].copy_(things[index])
        for index in self._values:
            if not _is_fixed(things[index]):
                image.put_value(index, things[index])

    def fill_stage(self, number: int, claim: SlotClaim, things: Sequence[Any], packed: bytes) -> torch.Tensor:
        """Write the snapshot's header, extra state and constant values into a stage, the pinned memory from which the
        GPU copies; return the stage's tensor."""
        flat, image = self._stages[number % STAGES]
        name = claim.name
        with self._seals.lock:
            whole = claim.seq + self._seals.is_valid  # an odd seq: the slot is never whole
            words = (claim.seq, name.step, name.generation, claim.at, name.flags, whole)
            image.memory[: _WORDS.size] = _WORDS.pack(*words)
        for index in self._extra:
            image.put_bytes(index, packed)
        for index in self._values:
            if _is_fixed(things[index]):
                image.put_value(index, things[index])
        return flat

    def void_seals(self) -> None:
        """Void the seals of snapshots that the GPU has not begun to copy. The seal fence holds its lock meanwhile."""
        for _, image in self._stages:
            image.memory[_WHOLE] = image.memory[_SEQ]

    # What the GPU does.

    def copy_early(self, things: Sequence[Any]) -> None:
        """Queue the copies of tensors that training may change before the optimizer's step, on the compute stream."""
        loose = self.split.at_once
        _copy_tensors([self._shadows[index] for index in loose], [things[index] for index in loose])

    def warm_up(self) -> None:
        """Load the copy kernels, which takes a tenth of a second, by copying a few tensors on the side stream."""
        for dtype in {view.dtype for view in (*self._views.values(), *self._shadows.values())}:
            few = torch.zeros(4, 16, dtype=dtype, device=self._device.device)
            _copy_tensors([few[0], few[1]], [few[2], few[3]])

    def begin_copy(self, slot: int, things: Sequence[Any], stage: torch.Tensor) -> None:
        """Queue the copies that the optimizer's next step has to wait for."""
        chosen, shadows, into = self.split, self._shadows, self._slots.payloads[slot]
        self._device.copy_(stage, non_blocking=True)
        _copy_tensors([*self._views.values()], [shadows.get(index, things[index]) for index in self._views])
        self._slots.heads[slot][_SEQ].copy_(self._device[_SEQ], non_blocking=True)
        _copy_tensors([shadows[index] for index in chosen.tail], [things[index] for index in chosen.tail])
        self._in_turns([into[index] for index in chosen.loose], [shadows[index] for index in chosen.loose])
        self._in_turns([into[index] for index in chosen.direct], [things[index] for index in chosen.direct])

    def end_copy(self, slot: int) -> None:
        """Queue the copies that the optimizer's next step need not wait for: of the tail and of small items."""
        chosen, into = self.split, self._slots.payloads[slot]
        self._in_turns([into[index] for index in chosen.tail], [self._shadows[index] for index in chosen.tail])
        _copy_tensors(*self._runs[slot])

    def seal_copy(self, slot: int) -> None:
        """Queue the copy of the slot's header. It seals the snapshot, so it must be the last copy."""
        head = self._slots.heads[slot]
        head[_BODY].copy_(self._device[_BODY], non_blocking=True)
        head[_SEQ].copy_(self._device[_WHOLE], non_blocking=True)

    def _in_turns(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy to the host in chunks, with a tiny copy to the GPU after each, so that other copies get their turn. If
        one copy were queued instead, a script that reads its loss would wait for the whole snapshot."""
        into: list[torch.Tensor] = []
        outof: list[torch.Tensor] = []
        size = 0
        for target, source in zip(targets, sources, strict=True):
            for part, of in _cut_parts(target, source):
                into.append(part)
                outof.append(of)
                size += part.nbytes
                if size >= _TURN_BYTES:
                    _copy_tensors(into, outof)
                    self._tick.copy_(self._tock, non_blocking=True)
                    into, outof, size = [], [], 0
        _copy_tensors(into, outof)

    def _make_stage(self, flat: torch.Tensor) -> HostStage:
        memory = bytes_of(flat)
        for run, at in self.split.runs:
            memory[at : at + run.end - run.start] = self._slots.pattern[run.start : run.end]
        return HostStage(flat, StateImage(self._layout, memory, self.split.places))


def _cut_parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if target.nbytes < 2 * _TURN_BYTES or not source.is_contiguous():
        return iter([(target, source)])
    size = _TURN_BYTES // target.element_size()
    return zip(target.view(-1).split(size), source.detach().view(-1).split(size), strict=True)


def _is_fixed(value: object) -> bool:
    """Return whether a value is immutable."""
    return type(value) in _FIXED or (type(value) is tuple and _FIXED.issuperset(map(type, value)))


@torch.no_grad()
def _copy_tensors(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
