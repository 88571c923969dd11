"""What decoders are fed with: values of any struct of ours, and bytes that once were something whole."""

import enum
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

import msgspec
from hypothesis import strategies as st

_EDGES = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
INTS = st.one_of(st.integers(-2, 5), st.sampled_from(_EDGES), st.integers(-(2**63), 2**64 - 1))
_TEXTS = st.one_of(st.sampled_from(("", "a", "b", "../x", "\x00", "ü", "\U0001f600")), st.text(max_size=8))
FINITE = st.one_of(st.sampled_from((0.0, 1.0, -1.0, 1e308, 5e-324)), st.floats(allow_nan=False, allow_infinity=False))
FLOATS = st.one_of(FINITE, st.floats())
Given = dict[Any, st.SearchStrategy[Any]]
PLAIN: Given = {int: INTS, float: FLOATS, str: _TEXTS, bool: st.booleans(), bytes: st.binary(max_size=16)}
JSON: Given = {**PLAIN, float: FINITE}  # which has no other numbers
_PLACES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\n", b'"', b"[", b"{")


def values(kind: Any, given: Given = PLAIN) -> st.SearchStrategy[Any]:
    """Any value of a type that msgspec can encode; what a field is like is as `given` says."""
    if kind in given:
        return given[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        bounds = args[1]
        if bounds.pattern is not None:
            return st.from_regex(bounds.pattern).filter(lambda text: len(text) <= (bounds.max_length or len(text)))
        if bounds.max_length is not None:  # longer than any value here
            return values(args[0], given)
        low, high = args[0](bounds.ge), args[0](bounds.le)
        return values(args[0], given).map(lambda number: min(max(number, low), high) if number == number else low)
    if kind in (None, types.NoneType):
        return st.none()
    if kind in (Any, object):
        return st.one_of(st.none(), given[int], given[str])
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(arg, given) for arg in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is dict:
        return st.dictionaries(values(args[0], given), values(args[1], given), max_size=3)
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return st.lists(values(args[0], given), max_size=3).map(origin)
    if origin is tuple:
        return st.tuples(*(values(arg, given) for arg in args))
    if issubclass(kind, tuple):  # a NamedTuple
        return st.tuples(*(values(field, given) for field in typing.get_type_hints(kind).values()))
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return _structs(kind, given)


def _structs(kind: type[msgspec.Struct], given: Given) -> st.SearchStrategy[Any]:
    needed: dict[str, st.SearchStrategy[Any]] = {}
    more: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(kind):
        any_one = st.deferred(lambda of=field.type: values(of, given))  # type: ignore[misc]
        (needed if field.required else more)[field.name] = any_one
    return st.fixed_dictionaries(needed, optional=more).map(lambda fields: kind(**fields))


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Whole ones, of which something was cut off, changed, moved, put in or put behind."""
    content = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        end = min(len(content), at + draw(st.integers(1, 16)))
        match draw(st.sampled_from(("truncate", "flip", "set", "splice", "drop", "repeat", "extend"))):
            case "truncate":
                del content[at:]
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                content[at:end] = draw(st.sampled_from(_PLACES)) * (end - at)
            case "splice":
                content[at:at] = draw(st.binary(max_size=16))
            case "drop":
                del content[at:end]
            case "repeat":
                content[at:at] = content[at:end] * draw(st.sampled_from((1, 2, 2000)))
            case "extend":
                content += draw(st.binary(max_size=16))
    return bytes(content)


def hostile(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=256), mutated(valid), mutated(valid))


def narrow(decode: Callable[[], object], *errors: type[Exception]) -> object:
    """The value, or None where it was refused in one sentence; any other exception is a finding."""
    try:
        return decode()
    except errors as e:
        said = str(e).strip()
    assert said, "it was refused without a word"
    return None
