"""Messages and small files, whatever their bytes: a value or a DecodeError, and what was encoded comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.agent import probes, probing, remembering, tracer
from holdfast.chaos import orders
from holdfast.checkpoint import transport
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.manifest import Author
from holdfast.client import store
from holdfast.controller import hands
from holdfast.controller.api import TraceBody
from holdfast.controller.orders import OrderBody
from holdfast.core.decoding import from_json, from_msgpack
from holdfast.core.diagnose.baseline import Past
from holdfast.linux.python_fork import Program
from holdfast.model.errand import Done, Leave
from holdfast.model.topology import Dims
from holdfast.wire import enrolment, fork_server, holding, keeping, messages, replaying, skipping, spec, zygote
from tests.fuzz.making import JSON, PLAIN, hostile, mutated, narrow, values

Codec = tuple[Callable[[bytes], Any], Any, Callable[[Any], bytes]]
_PACK = msgspec.msgpack.encode
_TEXT = msgspec.json.encode


def _json(kind: Any) -> Codec:
    return (lambda content: from_json(content, kind)), kind, _TEXT


def _msgpack(kind: Any) -> Codec:
    return (lambda content: from_msgpack(content, kind)), kind, _PACK


CODECS: dict[str, Codec] = {
    "from agent": (messages.decode_from_agent, messages.FromAgent, _PACK),
    "from controller": (messages.decode_from_controller, messages.FromController, _PACK),
    "to holder": (holding.to_holder, holding.ToHolder, _PACK),
    "to agent": (holding.to_agent, holding.ToAgent, _PACK),
    "to keeper": (keeping.to_keeper, keeping.ToKeeper, _TEXT),
    "from keeper": (keeping.from_keeper, keeping.FromKeeper, _TEXT),
    "to zygote": (zygote.to_zygote, zygote.Fork, _PACK),
    "from zygote": (zygote.from_zygote, zygote.FromZygote, _PACK),
    "fork": _msgpack(Program),
    "forked": _msgpack(fork_server.ForkAnswer),
    "layout": _msgpack(Layout),
    "ask": _json(transport.Ask),
    "reply": _json(transport.Reply),
    "author": _json(Author),
    "run": _json(spec.RunSpec),
    "node": _json(spec.NodeSpec),
    "listening": _json(spec.Listening),
    "ended": _json(spec.Ended),
    "challenge": _json(enrolment.Challenge),
    "enrol": _json(enrolment.Enrol),
    "enrolled": _json(enrolment.Enrolled),
    "order": _json(OrderBody),
    "trace": _json(TraceBody),
    "plan": (hands._PLANNED, hands.Planned, _TEXT),
    "past": _json(dict[str, Past]),
    "mesh": _json(Dims),
    "leaving": _json(Leave),
    "store": _json(store.Question),
    "py-spy": (tracer._dump, list[tracer._SpyThread], _TEXT),
    "probe": (probing._told, probes.Told, _TEXT),
    "chaos order": _json(orders.Order),
}
NOT_UTF8 = {_PACK: b"\x82\xa4type\xa6notice\xa4node\xa2\xff\xff", _TEXT: b'{"type":"denied","why":"\xff"}'}
TOO_DEEP = {_PACK: b"\x81\xa1x" + b"\x91" * 9_000, _TEXT: b'{"x":' + b"[" * 9_000}


def _values(codec: Codec) -> st.SearchStrategy[Any]:
    return values(codec[1], JSON if codec[2] is _TEXT else PLAIN)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_any_bytes_are_a_message_or_are_refused(name: str, data: st.DataObject) -> None:
    decode, _, encode = CODECS[name]
    content = data.draw(hostile(_values(CODECS[name]).map(encode)))
    narrow(lambda: decode(content), msgspec.DecodeError)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("contents", [NOT_UTF8, TOO_DEEP], ids=["not UTF-8", "too deep"])
def test_what_msgspec_itself_does_not_refuse(name: str, contents: dict[Any, bytes]) -> None:
    decode, _, encode = CODECS[name]
    narrow(lambda: decode(contents[encode]), msgspec.DecodeError)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_what_was_encoded_comes_back(name: str, data: st.DataObject) -> None:
    decode, _, encode = CODECS[name]
    content = encode(data.draw(_values(CODECS[name])))
    assert encode(decode(content)) == content  # values may hold a NaN, which equals nothing


@given(st.one_of(st.binary(max_size=200), mutated(st.just(replaying.line_of(1, 2, None) + replaying.line_of(2, 3, 4)))))
@example(b"1 2 " + b"9" * 5000 + b"\n")
def test_signatures_of_a_replay(content: bytes) -> None:
    list(replaying.lines_in(content))


@given(st.one_of(st.text(max_size=40), mutated(st.just(b"3-7,9:0.5@1-2")).map(lambda b: b.decode("latin-1"))))
def test_steps_to_skip(text: str) -> None:
    """They come from our own agent by the environment, which a script may change."""
    for decode in (skipping.skips_of, skipping.eases_of):
        narrow(lambda decode=decode: decode(text), ValueError)  # type: ignore[misc]


FILES: dict[str, Callable[[Path], object]] = {
    "done.jsonl": remembering.recall,
    "stopped": lambda path: remembering.stopped(path.parent),
    "alone": lambda path: remembering.parted(path.parent),
    "leaving.json": lambda path: remembering.intended(path.parent),
}


@pytest.mark.parametrize("name", FILES)
@given(content=hostile(values(Done, JSON).map(_TEXT)))
@example(content=b"\xff")
@example(content=b"1e999")
@example(content=b"9" * 5000)
def test_what_an_agent_left_behind(name: str, content: bytes, tmp_path: Path) -> None:
    """A disk may have damaged it: the next agent starts all the same."""
    (tmp_path / name).write_bytes(content)
    FILES[name](tmp_path / name)
