"""A model and its optimizers as a state: what is in it, who else has it, and where to find each thing at every step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.checkpoint.layout import Item, Layout, Path, Ranks
from holdfast.checkpoint.state import EXTRA, Found, Held, Image, StateError, bare, local, slices
from holdfast.client.foresee import Blank, Kept, foresee

MODEL, OPTIMIZER = "model", "optimizer"  # the two parts of the state dict, as one would write it by hand
ABSENT = object()  # an optimizer keeps nothing for parameters that never had a gradient


class ChangedError(Exception):
    """The state has another form than the one that was laid out."""


class Place(NamedTuple):
    """Where a module keeps a tensor."""

    holder: dict[str, Any]
    name: str
    trained: bool  # a parameter


class Kin(NamedTuple):
    """Whose state it is."""

    optimizer: Optimizer
    parameter: torch.Tensor


class Trained:
    """Names are canonical: the same with and without DDP, FSDP2 or torch.compile around the model."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], rank: int, replicas: Ranks) -> None:
        self._model = model
        self._optimizers = optimizers
        self._rank = rank
        self._replicas = replicas  # of what does not know better
        self._places: dict[str, Place] = {}
        self._kin: dict[str, Kin] = {}
        self._blanks: dict[torch.Tensor, Kept] = {}
        self._ways: list[Callable[[], object]] = []
        self._fresh: dict[str, Any] = {}
        self._layout = Layout(rank=0, world=0, items=(), image_bytes=0)

    def state(self) -> dict[str, Any] | None:
        """The state dict, with blanks where optimizers have nothing yet; None if one does not tell what it will have."""
        state = {MODEL: get_model_state_dict(self._model)}
        self._places = dict(self._found_in(state[MODEL]))
        self._wrapped = {tensor: ranks for ranks, module in self._wrappers() for tensor in _tensors(module)}
        meshes = {part.device_mesh for part in _tensors(self._model) if isinstance(part, DTensor)}
        around = {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
        self._around = tuple(sorted(around)) or (self._replicas if self._replicas != (self._rank,) else ())
        if not self._optimizers:
            return state
        shadows = [self._shadow(optimizer) for optimizer in self._optimizers]
        if not all(shadows):
            return None
        state[OPTIMIZER] = get_optimizer_state_dict(self._model, cast(list[Optimizer], shadows))
        kept = {id(kept): Kin(o, p) for o, s in zip(self._optimizers, shadows, strict=True) for p, kept in s.state.items()}
        self._kin = {name: kept[id(own)] for name, own in state[OPTIMIZER]["state"].items()}
        return state

    def settle(self) -> None:
        """Have the optimizers make their state now, as torch does before it loads: what is in it does not count."""
        get_optimizer_state_dict(self._model, self._optimizers)

    def holders(self, path: Path) -> Held:
        """Who has what is no DTensor."""
        match path:
            case ("model", str(name)):
                place = self._places.get(name)
                tensor = place.holder[place.name] if place else None
                trained = bool(place and place.trained)
            case ("optimizer", "state", str(name), *_):
                tensor, trained = self._kin[name].parameter, True
            case _:
                tensor, trained = None, False
        if isinstance(tensor, DTensor):  # then this is a count beside it
            ranks = tuple(sorted(int(rank) for rank in tensor.device_mesh.mesh.flatten()))
            return Held(ranks, ranks)
        ranks = self._wrapped.get(tensor, ()) if tensor is not None else next(iter(self._wrapped.values()), ())
        # DDP spreads buffers from the first of its ranks before every forward pass, so only those matter.
        return Held(ranks, ranks, trained) if ranks else self._loose()

    def bind(self, layout: Layout, found: Found) -> None:
        """From now on the state has this layout."""
        self._layout = layout
        self._parts = slices(layout)
        self._forms = [_form(found.objects.get(item.spec.key)) for item in layout.items]
        self._ways = [self._way(item, found) for item in layout.items]
        self._size = self._counted()

    def read(self) -> list[object]:
        """What is there now for every item: a tensor, a value, or nothing."""
        if self._counted() != self._size:
            raise ChangedError("the optimizer has other parameters than before")
        if self._fresh:
            self._fresh = get_model_state_dict(self._model)
        things = [way() for way in self._ways]
        if any(map(_differs, things, self._forms)):
            get_model_state_dict(self._model)  # FSDP puts parameters that it has gathered back in their place
            things = [way() for way in self._ways]
        for thing, form, item in zip(things, self._forms, self._layout.items, strict=True):
            if _differs(thing, form):
                raise ChangedError(f"{item.spec.key} has another shape or type than before")
        return [
            bare(thing)[part] if part is not None else bare(thing) if isinstance(thing, torch.Tensor) else thing
            for thing, part in zip(things, self._parts, strict=True)
        ]
