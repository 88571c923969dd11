"""Where the things of a laid out state are found again at every step, and put back when it is restored."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, MutableSequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.layout import EXTRA, Layout, Path
from holdfast.checkpoint.state import Found, Image, bare, slices

ABSENT = object()  # an optimizer keeps nothing for parameters that never had a gradient

Way = Callable[[], object]
Holder = MutableMapping[Any, Any] | MutableSequence[Any]


class ChangedError(Exception):
    """The state has another form than the one that was laid out."""


class Row(NamedTuple):
    """One item: how to get at it, what it must look like, and which part of it the item is."""

    key: str
    way: Way
    form: tuple[torch.Size, torch.dtype] | None  # None: a value
    part: tuple[slice, ...] | None


class Things(NamedTuple):
    """What is there now: for each item a tensor, a value, or nothing."""

    version: int  # another one when tensors were exchanged or came or went, not when their content changed
    all: list[object]
    absent: list[str]


class Rows:
    """How to read a state of one layout. At nearly every step all tensors are the ones of the step before."""

    def __init__(self, layout: Layout, found: Found, way: Callable[[Path], Way]) -> None:
        self._rows: list[Row] = []
        for item, part in zip(layout.items, slices(layout), strict=True):
            key, form = item.spec.key, _form(found.objects.get(item.spec.key)) if item.spec.dtype else None
            self._rows.append(Row(key, way(item.spec.path) if key != EXTRA else _nothing, form, part))
        self._tensors = [index for index, row in enumerate(self._rows) if row.form]
        self._values = [index for index, row in enumerate(self._rows) if not row.form and row.key != EXTRA]
        self._ways = [self._rows[index].way for index in self._tensors]
        self._parts = [index for index in self._tensors if self._rows[index].part]
        self._seen: list[object] = []
        self._gone: list[int] = []
        self._things = Things(0, [ABSENT] * len(self._rows), [])

    def read(self) -> Things:
        seen = [way() for way in self._ways]
        seen = [thing._local_tensor if isinstance(thing, DTensor) else thing for thing in seen]
        values = {index: self._rows[index].way() for index in self._values}
        gone = [index for index, value in values.items() if value is ABSENT]
        if gone != self._gone or len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self._look(seen, gone)
        version, things, absent = self._things
        things = things.copy()
        for index, value in values.items():
            things[index] = value
        for index in self._parts:  # the memory of a tensor may be another although the tensor is the same
            thing, part = things[index], self._rows[index].part
            things[index] = thing[part] if isinstance(thing, torch.Tensor) else thing
        return Things(version, things, absent)

    def _look(self, seen: list[object], gone: list[int]) -> None:
        things: list[object] = [ABSENT] * len(self._rows)
        for index, thing in zip(self._tensors, seen, strict=True):
            things[index] = _checked(self._rows[index], thing)
        lost = {self._rows[index].key for index in (*self._tensors, *gone) if things[index] is ABSENT}
        self._seen, self._gone = seen, gone
        self._things = Things(self._things.version + 1, things, sorted(lost))


def write(image: Image, absent: Collection[str], target: Callable[[Path], torch.Tensor], put: "Put") -> None:
    """Copy an image into the tensors that `target` names, and hand its values to `put`."""
    targets: dict[str, torch.Tensor] = {}
    moves = []
    with torch.no_grad():
        for index, (item, part) in enumerate(zip(image.layout.items, slices(image.layout), strict=True)):
            spec = item.spec
            if spec.key == EXTRA or spec.key in absent:
                continue
            if not spec.dtype:
                put(spec.path, image.get_value(index))
                continue
            if spec.key not in targets:
                targets[spec.key] = bare(target(spec.path))
            whole = targets[spec.key]
            moves.append(image.get(index, whole[part] if part is not None else whole))
    Copier().run(filter(None, moves))
    if any(tensor.is_cuda for tensor in targets.values()):
        torch.cuda.synchronize()


Put = Callable[[Path, object], None]


def descend(holder: object, path: Path) -> tuple[Holder, Any]:
    """The container and the key in it that a path leads to; a path has all keys of mappings as text."""
    for number, name in enumerate(path):
        key = _key(holder, name)
        if number == len(path) - 1:
            if isinstance(holder, MutableMapping | MutableSequence):
                return holder, key
            break
        holder = holder[key]  # type: ignore[index]
    raise ChangedError(f"there is no {'.'.join(map(str, path))} any more")


def _key(holder: object, name: str | int) -> Any:
    if isinstance(holder, Mapping) and name not in holder:
        for key in holder:
            if str(key) == name:
                return key
    return name


def _checked(row: Row, thing: object) -> object:
    if thing is ABSENT or thing is None:
        return ABSENT
    if isinstance(thing, torch.Tensor) and (thing.shape, thing.dtype) == row.form:
        return thing
    raise ChangedError(f"{row.key} has another shape or type than before")


def _form(thing: object) -> tuple[torch.Size, torch.dtype] | None:
    return (thing.shape, thing.dtype) if isinstance(thing, torch.Tensor) else None


def _nothing() -> object:
    return ABSENT
