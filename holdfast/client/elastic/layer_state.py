"""Layer units: a layer's weights and optimizer state, the smallest thing that moves between workers.

A packed unit is one flat tensor of bytes: a header in JSON, which says where each tensor lies, and the tensors. It
contains no code, so the worst that a bad unit from a peer or a disk can cause is an error.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import msgspec
import torch

from holdfast.decoding import from_json

MakeLayer = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
_ALIGNED = 8  # bytes at which tensors begin
_LENGTH = 8  # bytes of the header's length
HOST = torch.device("cpu")


class UnitError(Exception):
    """Raised if a packed layer does not fit the layer that reads it, or if a layer cannot be packed."""


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies in a packed unit."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


class UnitHeader(msgspec.Struct, frozen=True):
    """The header of a packed unit: everything in the unit except the content of tensors."""

    layer: int
    step: int  # the last whose update is in it
    tensors: tuple[PackedTensor, ...]
    numbers: dict[str, float | int | bool | str | None]  # of the optimizer's state, by the same names as tensors
    groups: tuple[dict[str, Any], ...]  # of the optimizer, without its parameters


class LayerUnit:
    """A layer that this worker holds."""

    def __init__(
        self, number: int, make: MakeLayer, make_optimizer: MakeOptimizer, seed: int, device: torch.device = HOST
    ) -> None:
        """Create the layer. Its random initial values depend only on seed and number, so all workers get the same."""
        self.number, self.step, self.whole, self.device = number, 0, True, device
        with keep_chance(device):
            torch.manual_seed(draw_seed(seed, number))
            made = make()
        if not isinstance(made, torch.nn.Module):
            raise TypeError(f"layer {number} is made as {type(made).__name__}, and must be an nn.Module")
        self.module = made.to(device)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.parameters) if self.parameters else None
        kinds = [parameter.dtype for parameter in self.parameters]
        self.gradient_dtype = functools.reduce(torch.promote_types, kinds) if kinds else torch.float32
        self.gradient_size = sum(parameter.numel() for parameter in self.parameters)
        self.gradient: torch.Tensor | None = None  # flat, of the step after `step`, once it is summed over all workers

    def apply(self, step: int, scale: float | None, rate: float | None) -> None:
        """Make the optimizer's step from the gradients that were summed for it, unless the unit is already at this
        step. If the optimizer is interrupted, `whole` stays False, and no worker uses the unit as a state."""
        if self.step >= step:
            return
        self.whole = False
        self.run_optimizer(scale, rate)
        self.finish_step(step)

    def run_optimizer(self, scale: float | None, rate: float | None, *, keep: bool = False) -> None:
        """Change the weights by the summed gradients; with `keep`, these stay as they are whatever the optimizer does.
        Until `finish_step`, the unit is no state that counts."""
        if self.optimizer is None or self.gradient is None:
            return
        gradient = self.gradient.clone() if keep else self.gradient
        self.give_gradients(gradient if scale is None else gradient * scale)
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.optimizer.step()

    def finish_step(self, step: int) -> None:
        """Count as the state after this step."""
        self.step, self.whole = step, True
        self.drop_gradients()

    def give_gradients(self, flat: torch.Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def take_gradients(self) -> torch.Tensor:
        """Return the gradients since the last call as one flat tensor, and clear them."""
        flat = flatten_gradients(self.parameters, [parameter.grad for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        return flat

    def drop_gradients(self) -> None:
        self.gradient = None
        for parameter in self.parameters:
            parameter.grad = None

    def sum_squares(self) -> torch.Tensor | float:
        """Return the sum of squares of the summed gradient. Workers with the same gradient get the same bits."""
        return self.gradient.double().square().sum() if self.gradient is not None else 0.0

    def pack(self) -> torch.Tensor:
        """Return the unit as bytes, in new memory."""
        numbers: dict[str, Any] = {}
        tensors: list[tuple[str, torch.Tensor]] = []
        for name, value in self.list_state():
            if isinstance(value, torch.Tensor):
                tensors.append((name, value.detach()))
            else:
                numbers[name] = value
        places, end = [], 0
        for name, tensor in tensors:
            places.append(
                PackedTensor(
                    name,
                    str(tensor.dtype).removeprefix("torch."),
                    tuple(tensor.shape),
                    end,
                )
            )
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        header = UnitHeader(self.number, self.step, tuple(places), numbers, tuple(self.list_groups()))
        head = _encode_header(header)
        packed = torch.zeros(len(head) + end, dtype=torch.uint8)
        packed[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for place, (_, tensor) in zip(places, tensors, strict=True):
            begin = len(head) + place.begin
            packed[begin : begin + tensor.nbytes] = tensor.cpu().contiguous().flatten().view(torch.uint8)
        return packed

    @torch.no_grad()
    def unpack(self, packed: torch.Tensor) -> None:
        """Take over the state of a packed unit of this layer. Raises UnitError."""
        header, begin = read_header(packed)
        if header.layer != self.number:
            raise UnitError(f"layer {header.layer} came where layer {self.number} was wanted")
        self.whole = False
        content = {place.name: _read_tensor(packed, begin, place) for place in header.tensors}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            came = content.get(f"module {name}")
            if came is None or came.shape != tensor.shape or came.dtype != tensor.dtype:
                raise UnitError(f"layer {self.number} has another {name} than the one that came")
            tensor.copy_(came)
        self._take_optimizer_state(header, content)
        self.drop_gradients()
        self.step, self.whole = header.step, True

    def _take_optimizer_state(self, header: UnitHeader, content: dict[str, torch.Tensor]) -> None:
        groups = [{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in header.groups]
        self.set_optimizer_state(content | header.numbers, groups)

    def set_optimizer_state(self, values: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer this state, by the names of `list_state`; names of the module's state are passed over."""
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        for name, value in values.items():
            kind, _, rest = name.partition(" ")
            if kind == "module":
                continue
            index, _, key = rest.partition(" ")
            parameter = self.parameters[int(index)]
            if isinstance(value, torch.Tensor) and (key != "step" or self._steps_on_device(parameter)):
                value = value.to(parameter.device)
            self.optimizer.state[parameter][key] = value
        for group, came in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(came)

    def _steps_on_device(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the optimizer keeps a parameter's number of steps on its device, not on the host."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        of = next(group for group in groups if any(one is parameter for one in group["params"]))
        return bool(of.get("capturable") or of.get("fused"))

    def list_state(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the module's and the optimizer's state."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield f"module {name}", tensor
        if self.optimizer is not None:
            for index, parameter in enumerate(self.parameters):
                for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                    yield f"optimizer {index} {key}", value

    def list_groups(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of the optimizer's groups."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            yield {key: value for key, value in group.items() if key != "params"}


def flatten_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the gradients of these parameters as one flat tensor in new memory. None stands for zeros."""
    pairs = zip(parameters, gradients, strict=True)
    parts = [torch.zeros_like(p).flatten() if gradient is None else gradient.flatten() for p, gradient in pairs]
    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


def _encode_header(header: UnitHeader) -> bytes:
    try:
        text = msgspec.json.encode(header)
    except (TypeError, ValueError) as e:
        raise UnitError(f"layer {header.layer} has optimizer state that is no number and no tensor: {e}") from None
    text += b" " * (-(len(text) + _LENGTH) % _ALIGNED)
    return len(text).to_bytes(_LENGTH, "little") + text


def read_header(packed: torch.Tensor) -> tuple[UnitHeader, int]:
    """Return the header of a packed unit, and where its tensors begin. Raises UnitError."""
    length = int.from_bytes(bytes(packed[:_LENGTH].tolist()), "little")
    if length > packed.numel() - _LENGTH:
        raise UnitError("a packed layer ends too soon")
    try:
        header = from_json(bytes(packed[_LENGTH : _LENGTH + length].numpy()), UnitHeader)
    except msgspec.DecodeError as e:
        raise UnitError(f"a packed layer cannot be read: {e}") from None
    return header, _LENGTH + length


def _read_tensor(packed: torch.Tensor, begin: int, place: PackedTensor) -> torch.Tensor:
    dtype = getattr(torch, place.dtype, None)
    if not isinstance(dtype, torch.dtype) or min((0, *place.shape)) < 0 or place.begin < 0:
        raise UnitError(f"a packed layer has a tensor that cannot be: {place.name}")
    count = 1
    for size in place.shape:
        count *= size
    at = begin + place.begin
    if at + count * dtype.itemsize > packed.numel():
        raise UnitError("a packed layer ends too soon")
    return packed[at : at + count * dtype.itemsize].clone().view(dtype).reshape(place.shape)


def digest_packed(packed: torch.Tensor) -> str:
    return blake2b(packed.numpy().data, digest_size=16).hexdigest()


def draw_seed(*of: int) -> int:
    """Return a random seed that depends on these numbers alone."""
    return int.from_bytes(blake2b(repr(of).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def keep_chance(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the host and of this device at the end of this block."""
    with torch.random.fork_rng(devices=() if device.type == "cpu" else [device.index]):
        yield


def find_shared(units: Iterable[LayerUnit]) -> str:
    """Return in words which layers share a parameter; "" if none do."""
    seen: dict[int, int] = {}
    for unit in units:
        for parameter in unit.module.parameters():
            if seen.setdefault(id(parameter), unit.number) != unit.number:
                return f"layers {seen[id(parameter)]} and {unit.number} share a parameter; make them one layer"
    return ""
