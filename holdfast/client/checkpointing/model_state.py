"""The state of a model and its optimizers: which items it has, which ranks hold each, and where each is in memory."""

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

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

from holdfast.checkpoint.image_layout import BIG_BYTES, ImageLayout, Path, Ranks
from holdfast.checkpoint.memory_copy import prefer_large_pages
from holdfast.checkpoint.state_image import FlatState, StateImage, TensorHolders, bare_local
from holdfast.client.checkpointing.optimizer_shapes import Kept, allocate_state, foresee_state, shadow_optimizer
from holdfast.client.snapshot.state_item_locations import (
    ABSENT,
    ChangedError,
    CurrentItems,
    Spot,
    StateLocations,
    Way,
    descend_path,
    load_image,
)

MODEL, OPTIMIZER, STATE, GROUPS = "model", "optimizer", "state", "param_groups"


class TensorPlace(NamedTuple):
    """The dict and the name under which a module keeps a tensor."""

    holder: dict[str, Any]
    name: str
    trained: bool  # a parameter, not a buffer

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self.holder[self.name]
        return found


class OptimizerEntry(NamedTuple):
    """The optimizer and the parameter of an item of optimizer state."""

    optimizer: Optimizer
    parameter: torch.Tensor


class ModelState:
    """The state of a model and its optimizers, under names that DDP, FSDP2 and torch.compile do not change."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], rank: int, group: Ranks) -> None:
        self._model = model
        self._optimizers = optimizers
        self._rank = rank
        self._group = group  # who have what does not know better
        self._wrapped = dict(_ddp_tensors(model))
        meshes = {tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)}
        self._around = tuple(sorted({rank for mesh in meshes for rank in _mesh_ranks(mesh)}))
        self._places: dict[str, TensorPlace] = {}
        self._empty: dict[str, torch.Tensor] = {}  # without memory, by which places are found
        self._kin: dict[str, OptimizerEntry] = {}
        self._room: dict[torch.Tensor, int] = {}  # how many things are laid out for a parameter
        self._blanks: dict[torch.Tensor, Kept] = {}
        self._names: list[Any] = []  # for every group of parameters their names
        self._rows: StateLocations
        self._owns: list[Any] = []  # what the optimizers keep, for each parameter
        self._sizes: list[int] = []
        self._paths: list[Path] = []
        self._fresh: dict[str, Any] = {}
        self._odd: dict[str, Any] = {}  # what only the model itself can take
        self._hooks: list[Any] = []
        self._is_moved = True  # what the optimizers keep is elsewhere than before
        self._is_static = True  # everything is where it was; else modules make it for every state dict
        self._count = self._count_parameters()

    def build_state(self) -> dict[str, Any] | None:
        """Return the state dict, with BlankTensors for future optimizer state; None if this cannot be predicted."""
        state: dict[str, Any] = {MODEL: get_model_state_dict(self._model)}
        self._places = dict(_find_places(self._model, state[MODEL]))
        self._empty = {name: tensor for name, tensor in state[MODEL].items() if _is_empty(tensor)}
        shadows = [made for optimizer in self._optimizers if (made := self._shadow_of(optimizer))]
        if len(shadows) < len(self._optimizers):
            return None
        if not shadows:
            return state
        state[OPTIMIZER] = get_optimizer_state_dict(self._model, shadows)
        kin = {
            id(kept): OptimizerEntry(optimizer, parameter)
            for optimizer, made in zip(self._optimizers, shadows, strict=True)
            for parameter, kept in made.state.items()
        }
        self._kin = {name: kin[id(kept)] for name, kept in state[OPTIMIZER][STATE].items()}
        self._room = {self._kin[name].parameter: len(kept) for name, kept in state[OPTIMIZER][STATE].items()}
        self._names = [group["params"] for group in state[OPTIMIZER][GROUPS]]
        return state

    def loadable_state(self) -> dict[str, Any]:
        """Return a state dict for torch to load into. All its tensors have memory, with arbitrary values."""
        for optimizer in self._optimizers:
            kept = foresee_state(optimizer)
            if kept is None:
                get_optimizer_state_dict(self._model, optimizer)  # torch makes a step with gradients of zero
            for parameter, own in (kept or {}).items():
                optimizer.state[parameter] = allocate_state(parameter, own) | optimizer.state[parameter]
        return self.build_state() or {}

    def holders_of(self, path: Path) -> TensorHolders:
        """Return the ranks that hold an item that is not a DTensor."""
        tensor, trained = None, False
        if path[0] == MODEL and (place := self._places.get(str(path[1]))):
            tensor, trained = place.tensor, place.trained
        elif path[:2] == (OPTIMIZER, STATE):
            tensor, trained = self._kin[str(path[2])].parameter, True
        if isinstance(tensor, DTensor):  # and what this is about is a count beside it
            ranks = _mesh_ranks(tensor.device_mesh)
            return TensorHolders(ranks, ranks)
        ranks = self._wrapped.get(tensor, ()) if tensor is not None else next(iter(self._wrapped.values()), ())
        if ranks:
            # DDP spreads buffers from the first of its ranks before every forward pass, so only the first's matter.
            return TensorHolders(ranks, ranks, trained)
        if tensor is not None and not trained and tensor.nbytes < BIG_BYTES and self._group == (self._rank,):
            return TensorHolders(
                self._group, self._group
            )  # statistics of this rank's own batches; what is larger is a table
        return (
            TensorHolders(self._around, self._around, False)
            if self._around
            else TensorHolders(self._group, self._group, trained)
        )

    def bind_layout(self, layout: ImageLayout, found: FlatState) -> None:
        """Use this layout for all later reads of the state."""
        self._count = self._count_parameters()
        self._paths = [item.spec.path for item in layout.items]
        self._is_static = True
        self._rows = StateLocations(layout, found, self._way_to)
        self._owns, self._is_moved = [], True

    def read(self) -> CurrentItems:
        """Return the present tensor or value of every item. Raises ChangedError if the state has changed its form."""
        if self._count_parameters() != self._count or self._has_grown():
            raise ChangedError("the optimizer has other parameters, or keeps more for them than before")
        if self._is_moved:
            self._rows.set_spots(self._find_spot)
            self._is_moved = False
        if not self._is_static:
            self._fresh = get_model_state_dict(self._model)
        try:
            return self._rows.read()
        except ChangedError:
            self._fresh = get_model_state_dict(self._model)  # FSDP puts what it has gathered back in its place
            return self._rows.read()
        finally:
            self._fresh = {}

    def restore_image(self, image: StateImage, absent: Collection[str]) -> None:
        """Restore the state from an image, in place where possible."""
        self._make_room(absent)
        load_image(image, absent, self._target_tensor, self.put_value)
        self.finish_load(absent)

    def put_value(self, path: Path, value: object) -> None:
        """Set the value at this path."""
        if path[1:2] != (GROUPS,) or path[-1] != "params":
            holder, key = self._find_holder(path)
            holder[key] = value

    def finish_load(self, absent: Collection[str]) -> None:
        """Complete a restore after all items were copied. Removes optimizer state that the restored state lacks."""
        for path in self._paths:
            if path[:2] == (OPTIMIZER, STATE) and ".".join(map(str, path)) in absent:
                optimizer, parameter = self._kin[str(path[2])]
                own = optimizer.state.get(parameter, {})  # asking in another way would make one
                if own.pop(path[3], None) is not None and not own:
                    del optimizer.state[parameter]
        if self._odd:
            set_model_state_dict(self._model, self._odd, options=StateDictOptions(strict=False))
            self._odd = {}

    def _target_tensor(self, path: Path) -> torch.Tensor:
        if path[0] == MODEL and path[1] in self._places:
            return self._places[str(path[1])].tensor
        if path[0] == MODEL and path[1] in self._empty:
            return self._empty[str(path[1])]
        found = _get_or_absent(*self._find_holder(path))
        if not isinstance(found, torch.Tensor):
            raise ChangedError(f"there is nothing to restore {'.'.join(map(str, path))} into")
        return found

    @property
    def is_followed(self) -> bool:
        """Return whether this state has optimizers, which announce each of their steps beforehand."""
        return bool(self._optimizers)

    def guarded_items(self) -> list[bool]:
        """Return for each item whether only optimizer steps change it. Buffers may change in every forward pass."""
        return [
            path[:2] == (OPTIMIZER, STATE)
            or (path[0] == MODEL and str(path[1]) in self._places and self._places[str(path[1])].trained)
            for path in self._paths
        ]

    def before_step(self, call: Callable[..., None]) -> None:
        """Call `call` before every step of the optimizers, in place of any earlier callback."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [optimizer.register_step_pre_hook(call) for optimizer in self._optimizers]

    def _way_to(self, path: Path) -> Way:
        if path[0] == MODEL:
            name = str(path[1])
            if place := self._places.get(name):
                return lambda: place.holder[place.name]
            if name in self._empty:
                return lambda: self._empty[name]
            self._is_static = False
            return lambda: _get_or_absent(*descend_path(self._fresh, path[1:]))
        if path[1] == STATE and len(path) == 4:
            (optimizer, parameter), kept = self._kin[str(path[2])], path[3]
            return lambda: optimizer.state.get(parameter, {}).get(kept, ABSENT)
        if path[-1] == "params":
            names = self._names[int(path[2])]
            return lambda: names
        if path[1] == GROUPS and len(path) == 4:
            optimizer, number = self._group_at(int(path[2]))
            return lambda: optimizer.param_groups[number].get(str(path[3]), ABSENT)
        return lambda: _get_or_absent(*self._find_holder(path))

    def _group_at(self, number: int) -> tuple[Optimizer, int]:
        """Return the optimizer of a parameter group, and the group's number within that optimizer."""
        for optimizer in self._optimizers:
            if number < len(optimizer.param_groups):
                return optimizer, number
            number -= len(optimizer.param_groups)
        raise ChangedError("there are fewer groups of parameters than before")

    def _find_holder(self, path: Path) -> tuple[Any, Any]:
        """Return the container that holds an item, and its key there. Not for a module's parameters and buffers."""
        if path[0] == MODEL:
            if path[1] not in self._odd:
                self._odd[str(path[1])] = get_model_state_dict(self._model)[str(path[1])]
            return descend_path(self._odd, path[1:])
        if path[1] == GROUPS:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            return descend_path(groups[int(path[2])], path[3:])
        optimizer, parameter = self._kin[str(path[2])]
        return descend_path(optimizer.state[parameter], path[3:])

    def _make_room(self, absent: Collection[str]) -> None:
        """Create the tensors that optimizers have not made yet. The order is the one in which optimizers make them."""
        gone = {path[2:] for path in self._paths if ".".join(map(str, path)) in absent}
        names = {kin.parameter: name for name, kin in self._kin.items()}
        for optimizer in self._optimizers:
            for parameter in (tensor for group in optimizer.param_groups for tensor in group["params"]):
                kept, name = self._blanks.get(parameter, {}), names.get(parameter)
                wanted = {key: blank for key, blank in kept.items() if (name, key) not in gone}
                if wanted:
                    optimizer.state[parameter] = (
                        allocate_state(parameter, wanted, _make_untouched) | optimizer.state[parameter]
                    )

    def _shadow_of(self, optimizer: Optimizer) -> Optimizer | None:
        """Return a shadow with the optimizer's present and future state; None if nothing is known of its state."""
        kept = foresee_state(optimizer)
        if kept is None and not optimizer.state:
            return None
        self._blanks.update(kept or {})
        return shadow_optimizer(optimizer, kept or {})

    def _has_grown(self) -> bool:
        owns = [own for optimizer in self._optimizers for own in optimizer.state.values()]
        sizes = [*map(len, owns)]
        if sizes == self._sizes and len(owns) == len(self._owns) and all(map(is_, owns, self._owns)):
            return False
        self._owns, self._sizes, self._is_moved = owns, sizes, True
        kept = (own for optimizer in self._optimizers for own in optimizer.state.items())
        return any(len(own) > self._room.get(parameter, -1) for parameter, own in kept)

    def _find_spot(self, path: Path) -> Spot | None:
        """Return the dict and key that hold a tensor; None if they are unknown or the tensor does not exist."""
        if path[0] == MODEL and (place := self._places.get(str(path[1]))):
            return place.holder, place.name
        if path[:2] == (OPTIMIZER, STATE) and len(path) == 4:
            optimizer, parameter = self._kin[str(path[2])]
            own = optimizer.state.get(parameter, {})
            return (own, path[3]) if path[3] in own else None
        return None

    def _count_parameters(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]


def _find_places(model: torch.nn.Module, named: dict[str, Any]) -> Iterator[tuple[str, TensorPlace]]:
    """Yield where the model keeps each tensor of a state dict. Tensors are matched by memory, as names differ."""
    holders: list[tuple[dict[str, Any], bool]] = []
    for module in model.modules():
        holders += [(module._buffers, False), (module._parameters, True)]
    places = {
        _memory_key(tensor): TensorPlace(holder, name, trained)
        for holder, trained in holders
        for name, tensor in holder.items()
        if tensor is not None
    }
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and (place := places.get(_memory_key(tensor))):
            yield name, place


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    part = bare_local(tensor)
    return (part.data_ptr(), part.dtype, part.shape, part.stride(), tensor.shape) if part.nbytes else (id(tensor),)


def _is_empty(thing: object) -> bool:
    return isinstance(thing, torch.Tensor) and not bare_local(thing).nbytes


def _ddp_tensors(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, Ranks]]:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
            yield from ((tensor, ranks) for tensor in module.parameters())
            yield from ((tensor, ranks) for tensor in module.buffers() if module.broadcast_buffers)


def _mesh_ranks(mesh: Any) -> Ranks:
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten()))


def _make_untouched(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor without values. The threads that copy into it will be the first to touch its memory."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if tensor.is_cpu:
        prefer_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _get_or_absent(holder: Any, key: Any) -> object:
    try:
        return holder[key]
    except LookupError:
        return ABSENT
