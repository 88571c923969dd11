"""What rides along with a state: random number generators, and whatever else the script gives."""

import random
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.state import StateError, decode, encode

_LENGTH_BYTES = 8
_ROOM_BYTES = 64 << 10
_LEAST_BYTES = 256 << 10  # loaders tell less before their first batch than after


class Rider(NamedTuple):
    """How to take something's state, and how to give it back."""

    take: Callable[[], Any]
    give: Callable[[Any], object]


class Extras:
    """The script's own objects and values by name, and the generators that everybody uses."""

    def __init__(self, extra: MutableMapping[str, Any]) -> None:
        self._extra = extra
        for name in extra:
            _readable(name, self._rider(name).take())

    def packed(self, told: dict[str, Any]) -> bytes:
        """Everything as bytes, together with what is told."""
        content = encode(
            {**told, "rng": _generators(), "extra": {name: self._rider(name).take() for name in self._extra}}
        )
        return len(content).to_bytes(_LENGTH_BYTES, "little") + content

    def restore(self, told: dict[str, Any], *, here: bool) -> None:
        """Give everything back; the generators only to the very rank they are of."""
        for name, state in told["extra"].items():
            if name in self._extra:
                self._rider(name).give(state)
        if here:
            _set_generators(told["rng"])

    def _rider(self, name: str) -> Rider:
        thing = self._extra[name]
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            return Rider(thing.state_dict, thing.load_state_dict)
        if isinstance(thing, torch.Generator):
            return Rider(thing.get_state, thing.set_state)
        if isinstance(thing, random.Random):
            return Rider(thing.getstate, lambda state: thing.setstate(_tuples(state)))
        if hasattr(thing, "bit_generator"):
            return Rider(lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state))
        return Rider(lambda: self._extra[name], lambda state: self._extra.__setitem__(name, state))


def room(packed: bytes) -> int:
    """What packed extras may grow to."""
    return max(_LEAST_BYTES, -(-2 * len(packed) // _ROOM_BYTES) * _ROOM_BYTES)


def unpacked(content: memoryview) -> dict[str, Any]:
    size = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not 0 < size <= len(content) - _LENGTH_BYTES:
        raise StateError("there are no extras in this image")
    told = decode(content[_LENGTH_BYTES : _LENGTH_BYTES + size])
    if not isinstance(told, dict):
        raise StateError("the extras in this image are none")
    return told


def _readable(name: str, state: object) -> None:
    try:
        decode(encode(state))
    except (torch.serialization.pickle.PickleError, TypeError, AttributeError):
        kind = type(state).__name__
        raise StateError(
            f"extra[{name!r}] gives a {kind}, which is more than plain values, tensors and arrays: it cannot be saved"
        ) from None


def _generators() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    # As tensors: torch.save looks at every single number of a tuple.
    found: dict[str, Any] = {"python": (version, torch.tensor(words), gauss), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, words, *rest = numpy.random.get_state()
        found["numpy"] = (kind, torch.from_numpy(words.astype("int64")), *rest)
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_generators(found: dict[str, Any]) -> None:
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy

        kind, words, *rest = found["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state
