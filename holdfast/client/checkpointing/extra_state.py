"""The extra state of a rank: random number generators and the objects that the script passes as `extra`."""

import ctypes
import random
import struct
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.snapshot_metadata_record import GeneratorStates, ImageMetadata, pack_metadata
from holdfast.checkpoint.state_image import StateError, bytes_of, decode_value, encode_value

_ROOM_BYTES = 64 << 10
_LEAST_BYTES = 256 << 10  # loaders tell less before their first batch than after
_MT19937_BYTES = 4 * 624 + 4  # its words, and which comes next

NumpyState = tuple[str, bytes, int, int, float]


class ExtraAccess(NamedTuple):
    """How to read and how to restore the state of one object."""

    take: Callable[[], Any]
    give: Callable[[Any], object]


class ExtraState:
    """The script's own objects and values by name, and the global random number generators."""

    def __init__(self, extra: MutableMapping[str, Any]) -> None:
        self._extra = extra
        self.made = -1  # steps of the optimizer before the state that was restored last; -1: not known
        for name in extra:
            _check_readable(name, self._access_to(name).take())

    def pack_extras(self, step: int, absent: list[str], made: int = -1) -> bytes:
        """Return all extra state as bytes."""
        extra = encode_value({name: self._access_to(name).take() for name in self._extra}) if self._extra else b""
        # Generators are no matter of torch.save, which looks at every single number.
        return pack_metadata(
            ImageMetadata(step=step, made=made, absent=absent, generators=read_generators(), extra=extra)
        )

    def restore(self, told: ImageMetadata, *, here: bool) -> None:
        """Restore the script's extras from `told`, the metadata that a rank saved with its state. With `here`, also
        restore the random number generators."""
        self.made = told.made
        states = decode_value(told.extra) if told.extra else {}
        for name, state in states.items() if isinstance(states, dict) else ():
            if name in self._extra:
                self._access_to(name).give(state)
        if here and told.generators:
            set_generators(told.generators)

    def _access_to(self, name: str) -> ExtraAccess:
        thing = self._extra[name]
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            return ExtraAccess(thing.state_dict, thing.load_state_dict)
        if isinstance(thing, torch.Generator):
            return ExtraAccess(thing.get_state, thing.set_state)
        if isinstance(thing, random.Random):
            return ExtraAccess(thing.getstate, lambda state: thing.setstate(_to_tuples(state)))
        if hasattr(thing, "bit_generator"):
            return ExtraAccess(
                lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state)
            )
        return ExtraAccess(lambda: self._extra[name], lambda state: self._extra.__setitem__(name, state))


def extras_room(content: bytes) -> int:
    """Return how many bytes to reserve for packed extras: at least twice their present size."""
    return max(_LEAST_BYTES, -(-2 * len(content) // _ROOM_BYTES) * _ROOM_BYTES)


def _check_readable(name: str, state: object) -> None:
    try:
        decode_value(encode_value(state))
    except (torch.serialization.pickle.PickleError, TypeError, AttributeError):
        kind = type(state).__name__
        raise StateError(
            f"extra[{name!r}] gives a {kind}, which cannot be saved: only plain values, tensors and arrays can"
        ) from None


def read_generators() -> GeneratorStates:
    version, words, gauss = random.getstate()
    numpy = sys.modules.get("numpy")
    return GeneratorStates(
        python=(version, struct.pack(f"={len(words)}I", *words), gauss),  # three times faster than an array's bytes
        torch=bytes(bytes_of(torch.default_generator.get_state())),
        numpy=_numpy_state(numpy) if numpy else None,
        cuda=bytes(bytes_of(torch.cuda.get_rng_state())) if torch.cuda.is_initialized() else b"",
    )


class _NumpySeen(NamedTuple):
    """A state of numpy's generator, and the raw memory it was read from. Equal memory means an equal state."""

    memory: bytes
    state: NumpyState


_seen: dict[
    int, _NumpySeen
] = {}  # by address; most scripts never draw from it, and to ask takes longer than all the others


def _numpy_state(numpy: Any) -> NumpyState:
    source = getattr(numpy.random.get_state, "__self__", None)
    bits = getattr(source, "_bit_generator", None)
    if type(bits).__name__ != "MT19937":
        return _ask_numpy(numpy)
    address: int = bits.ctypes.state_address  # type: ignore[union-attr]
    memory = ctypes.string_at(address, _MT19937_BYTES)
    known = _seen.get(address)
    if known and known.memory == memory and not known.state[3]:  # to hand out a kept number leaves no trace there
        return known.state
    state = _ask_numpy(numpy)
    if state[1] + state[2].to_bytes(4, sys.byteorder) == memory:  # it is laid out as we think
        _seen[address] = _NumpySeen(memory, state)
    return state


def _ask_numpy(numpy: Any) -> NumpyState:
    kind, key, at, has_gauss, cached = numpy.random.get_state()
    return str(kind), key.tobytes(), int(at), int(has_gauss), float(cached)


def set_generators(found: GeneratorStates) -> None:
    version, words, gauss = found.python
    random.setstate((version, struct.unpack(f"={len(words) // 4}I", words), gauss))
    torch.set_rng_state(_byte_tensor(found.torch))
    if found.numpy:
        import numpy

        kind, key, at, has_gauss, cached = found.numpy
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype="uint32"), at, has_gauss, cached))
    if found.cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(found.cuda))


def _byte_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _to_tuples(state: Any) -> Any:
    return tuple(map(_to_tuples, state)) if isinstance(state, list | tuple) else state
