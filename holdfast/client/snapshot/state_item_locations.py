"""Locates the items of a laid-out state at every step, and writes them back on restore."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, MutableSequence
from operator import getitem, is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.image_layout import EXTRA, ImageLayout, Path
from holdfast.checkpoint.memory_copy import MemoryCopier
from holdfast.checkpoint.state_image import FlatState, StateImage, bare_local, item_slices

ABSENT = object()  # an optimizer keeps nothing for parameters that never had a gradient

Way = Callable[[], object]
Spot = tuple[dict[Any, Any], Any]  # a dict and a key in it
Holder = MutableMapping[Any, Any] | MutableSequence[Any]


class ChangedError(Exception):
    """Raised when the state no longer has the form of its layout."""


class ItemLocation(NamedTuple):
    """How to reach one item, its expected shape and dtype, and the slice of the tensor that it covers."""

    key: str
    way: Way
    form: tuple[torch.Size, torch.dtype] | None  # None: a value
    part: tuple[slice, ...] | None


class CurrentItems(NamedTuple):
    """The present content of each item: a tensor, a value, or ABSENT."""

    version: int  # another one when tensors were exchanged or came or went, not when their content changed
    all: list[object]
    absent: list[str]


class StateLocations:
    """Reads the items of a state. Shapes are checked only when a tensor is not the same object as at the last read."""

    def __init__(self, layout: ImageLayout, found: FlatState, way: Callable[[Path], Way]) -> None:
        self._rows: list[ItemLocation] = []
        self._paths = [item.spec.path for item in layout.items]
        for item, part in zip(layout.items, item_slices(layout), strict=True):
            key, form = item.spec.key, _tensor_form(found.objects.get(item.spec.key)) if item.spec.dtype else None
            self._rows.append(ItemLocation(key, way(item.spec.path) if key != EXTRA else _get_absent, form, part))
        self._tensors = [index for index, row in enumerate(self._rows) if row.form]
        self._values = [index for index, row in enumerate(self._rows) if not row.form and row.key != EXTRA]
        self._parts = [index for index in self._tensors if self._rows[index].part]
        self._spread: list[int] = []  # which of them are DTensors
        self._seen: list[object] = []
        self._gone: list[int] = []
        self.set_spots(lambda path: None)
        self._things = CurrentItems(0, [ABSENT] * len(self._rows), [])

    def set_spots(self, spot: Callable[[Path], Spot | None]) -> None:
        """Let later reads take a tensor from the dict and key that `spot` returns for its path, unless it is None."""
        spots = {index: found for index in self._tensors if (found := spot(self._paths[index]))}
        self._tensors = [*spots, *(index for index in self._tensors if index not in spots)]
        self._ways = [self._rows[index].way for index in self._tensors]
        self._holders = [holder for holder, _ in spots.values()]
        self._keys = [key for _, key in spots.values()]
        self._seen = []

    def read(self) -> CurrentItems:
        seen = self._read_tensors()
        values = {index: self._rows[index].way() for index in self._values}
        gone = [index for index, value in values.items() if value is ABSENT]
        if gone != self._gone or not _are_identical(seen, self._seen):
            self._check_things(seen, gone)
        version, things, absent = self._things
        things = things.copy()
        for index, value in values.items():
            things[index] = value
        for index in self._parts:  # the memory of a tensor may be another although the tensor is the same
            thing, part = things[index], self._rows[index].part
            things[index] = thing[part] if isinstance(thing, torch.Tensor) else thing
        return CurrentItems(version, things, absent)

    def _read_tensors(self) -> list[object]:
        """Return the current tensors; of a DTensor, its local part. This must be fast: there may be thousands."""
        try:
            seen = [*map(getitem, self._holders, self._keys), *(way() for way in self._ways[len(self._keys) :])]
        except LookupError:
            seen = [way() for way in self._ways]
        if not self._seen:
            self._spread = [number for number, thing in enumerate(seen) if isinstance(thing, DTensor)]
        for number in self._spread:
            seen[number] = getattr(seen[number], "_local_tensor", seen[number])
        return seen

    def _check_things(self, seen: list[object], gone: list[int]) -> None:
        things: list[object] = [ABSENT] * len(self._rows)
        for index, thing in zip(self._tensors, seen, strict=True):
            things[index] = _check_thing(self._rows[index], thing)
        lost = {self._rows[index].key for index in (*self._tensors, *gone) if things[index] is ABSENT}
        self._seen, self._gone = seen, gone
        self._things = CurrentItems(self._things.version + 1, things, sorted(lost))


def _are_identical(these: list[object], those: list[object]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def load_image(image: StateImage, absent: Collection[str], target: Callable[[Path], torch.Tensor], put: "Put") -> None:
    """Copy an image into the tensors that `target` returns, and pass its values to `put`."""
    targets: dict[str, torch.Tensor] = {}
    moves = []
    with torch.no_grad():
        for index, (item, part) in enumerate(zip(image.layout.items, item_slices(image.layout), strict=True)):
            spec = item.spec
            if spec.key == EXTRA or spec.key in absent:
                continue
            if not spec.dtype:
                put(spec.path, image.get_value(index))
                continue
            if spec.key not in targets:
                targets[spec.key] = bare_local(target(spec.path))
            whole = targets[spec.key]
            moves.append(image.get_tensor(index, whole[part] if part is not None else whole))
    MemoryCopier().copy_moves(filter(None, moves))
    image.settle()
    if any(tensor.is_cuda for tensor in targets.values()):
        torch.cuda.synchronize()


Put = Callable[[Path, object], None]


def descend_path(holder: object, path: Path) -> tuple[Holder, Any]:
    """Return the container and key at the end of a path; ChangedError if the container is no mapping or sequence."""
    for number, name in enumerate(path):
        key = _find_key(holder, name)
        if number == len(path) - 1:
            if isinstance(holder, MutableMapping | MutableSequence):
                return holder, key
            break
        holder = holder[key]  # type: ignore[index]
    raise ChangedError(f"{'.'.join(map(str, path))} is gone")


def _find_key(holder: object, name: str | int) -> Any:
    if isinstance(holder, Mapping) and name not in holder:
        for key in holder:
            if str(key) == name:
                return key
    return name


def _check_thing(row: ItemLocation, thing: object) -> object:
    if thing is ABSENT or thing is None:
        return ABSENT
    if isinstance(thing, torch.Tensor) and (thing.shape, thing.dtype) == row.form:
        return thing
    raise ChangedError(f"{row.key} has another shape or type than before")


def _tensor_form(thing: object) -> tuple[torch.Size, torch.dtype] | None:
    return (thing.shape, thing.dtype) if isinstance(thing, torch.Tensor) else None


def _get_absent() -> object:
    return ABSENT
