"""Where the things of a laid out state are found again at every step, and put back when it is restored."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, MutableSequence
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.layout import Layout, Path
from holdfast.checkpoint.state import EXTRA, Found, Image, bare, slices

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


def rows(layout: Layout, found: Found, way: Callable[[Path], Way]) -> list[Row]:
    """How to read a state of this layout."""
    made = []
    for item, part in zip(layout.items, slices(layout), strict=True):
        key = item.spec.key
        form = _form(found.objects.get(key)) if item.spec.dtype else None
        made.append(Row(key, way(item.spec.path) if key != EXTRA else _nothing, form, part))
    return made


def read(wanted: list[Row]) -> list[object]:
    """What is there now: for each row a tensor, a value, or nothing."""
    return [_piece(row, row.way()) for row in wanted]


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


def _piece(row: Row, thing: object) -> object:
    if not isinstance(thing, torch.Tensor):
        if row.form is None or thing is ABSENT:
            return thing
        if thing is None:
            return ABSENT
    elif row.form is not None:
        tensor = bare(thing)
        if tensor.shape == row.form[0] and tensor.dtype == row.form[1]:
            return tensor if row.part is None else tensor[row.part]
    raise ChangedError(f"{row.key} has another shape or type than before")


def _form(thing: object) -> tuple[torch.Size, torch.dtype] | None:
    return (thing.shape, thing.dtype) if isinstance(thing, torch.Tensor) else None


def _nothing() -> object:
    return ABSENT
