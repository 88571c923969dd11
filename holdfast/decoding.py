"""Decoders for input from outside the process. Any bytes give a value or a `msgspec.DecodeError`.

msgspec alone raises other errors for text that is not UTF-8, for nesting that is too deep, and for numbers that are too
large. tomllib does the same; `from_toml` raises `tomllib.TOMLDecodeError` for all of these.

The first decoding of a type makes tables that other threads see half made: msgspec 0.22 then ends the process by a
segmentation fault. So one thread at a time makes them here.
"""

import threading
import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Content = bytes | bytearray | memoryview | str
_STRAY = (UnicodeError, RecursionError, OverflowError)
_prepared: set[Any] = set()  # types whose tables are made
_preparing = threading.Lock()


def _prepare(kind: Any, make_tables: Callable[[Any], object]) -> None:
    if kind not in _prepared:
        with _preparing:
            make_tables(kind)
            _prepared.add(kind)


def from_json(content: Content, kind: type[T]) -> T:
    _prepare(kind, msgspec.json.Decoder)
    try:
        return msgspec.json.decode(content, type=kind)
    except _STRAY as e:
        raise msgspec.DecodeError(f"JSON is malformed: {e}") from None


def from_msgpack(content: Content, kind: type[T]) -> T:
    assert not isinstance(content, str)
    _prepare(kind, msgspec.msgpack.Decoder)
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except _STRAY as e:
        raise msgspec.DecodeError(f"MessagePack data is malformed: {e}") from None


def make_decoder(of: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]) -> Callable[[Content], T]:
    """Return a function that decodes as `of` does, but raises only `msgspec.DecodeError` for malformed content."""
    decode: Callable[[Any], T] = of.decode

    def decoded(content: Content) -> T:
        try:
            return decode(content)
        except _STRAY as e:
            raise msgspec.DecodeError(f"the message is malformed: {e}") from None

    return decoded


def from_toml(text: str) -> dict[str, Any]:
    """Parse TOML text; raise `tomllib.TOMLDecodeError` if it is malformed in any way."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError) as e:
        raise tomllib.TOMLDecodeError(f"it cannot be read: {e}") from None
