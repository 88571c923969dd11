"""Messages and small files, whatever their bytes: a value or a DecodeError, and what was encoded comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from holdfast.agent import probes
from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.agent.diagnostics import probe_runner
from holdfast.agent.probes.nccl_all_to_all import ExchangeRound
from holdfast.agent.probes.parallel_reference import PlayedStep
from holdfast.agent.rank import stack_tracer
from holdfast.chaos import rank_orders
from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.manifest import Author
from holdfast.client.boot import tcp_store_server
from holdfast.controller.actions import action_executor
from holdfast.controller.api import TraceBody
from holdfast.controller.order_admission import OrderBody
from holdfast.core.decoding import from_json, from_msgpack
from holdfast.core.diagnose.fleet_baseline import MeasurementHistory
from holdfast.dash.page_server import PageOrder
from holdfast.linux.preimported_fork import Program
from holdfast.model.job_and_seats import Dims
from holdfast.model.node_errands import Done, Leave
from holdfast.wire import (
    agent_messages,
    holder_messages,
    holder_zygote_messages,
    program_fork_server,
    rank_keeper_messages,
    replay_environment,
    run_and_node_specs,
    skip_ease_environment,
)
from holdfast.wire.credentials import enrolment
from tests.fuzz.making import JSON, PLAIN, hostile, mutated, narrow, values

Codec = tuple[Callable[[bytes], Any], Any, Callable[[Any], bytes]]
_PACK = msgspec.msgpack.encode
_TEXT = msgspec.json.encode


def _json(kind: Any) -> Codec:
    return (lambda content: from_json(content, kind)), kind, _TEXT


def _msgpack(kind: Any) -> Codec:
    return (lambda content: from_msgpack(content, kind)), kind, _PACK


CODECS: dict[str, Codec] = {
    "from agent": (agent_messages.decode_from_agent, agent_messages.FromAgent, _PACK),
    "from controller": (agent_messages.decode_from_controller, agent_messages.FromController, _PACK),
    "to holder": (holder_messages.to_holder, holder_messages.ToHolder, _PACK),
    "to agent": (holder_messages.to_agent, holder_messages.ToAgent, _PACK),
    "to keeper": (rank_keeper_messages.to_keeper, rank_keeper_messages.ToKeeper, _TEXT),
    "from keeper": (rank_keeper_messages.from_keeper, rank_keeper_messages.FromKeeper, _TEXT),
    "to zygote": (holder_zygote_messages.to_zygote, holder_zygote_messages.ForkRank, _PACK),
    "from zygote": (holder_zygote_messages.from_zygote, holder_zygote_messages.FromZygote, _PACK),
    "fork": _msgpack(Program),
    "forked": _msgpack(program_fork_server.ForkAnswer),
    "layout": _msgpack(ImageLayout),
    "ask": _json(peer_transport.PeerRequest),
    "reply": _json(peer_transport.PeerReply),
    "author": _json(Author),
    "run": _json(run_and_node_specs.RunSpec),
    "node": _json(run_and_node_specs.NodeSpec),
    "listening": _json(run_and_node_specs.ControllerAddress),
    "ended": _json(run_and_node_specs.RunEnd),
    "challenge": _json(enrolment.Challenge),
    "enrol": _json(enrolment.EnrolmentRequest),
    "enrolled": _json(enrolment.EnrolmentGrant),
    "order": _json(OrderBody),
    "order on the page": _json(PageOrder),
    "trace": _json(TraceBody),
    "plan": (action_executor._PLANNED, action_executor.LaunchPlan, _TEXT),
    "past": _json(dict[str, MeasurementHistory]),
    "mesh": _json(Dims),
    "leaving": _json(Leave),
    "store": _json(tcp_store_server.StoreRequest),
    "py-spy": (stack_tracer._dump, list[stack_tracer._SpyThread], _TEXT),
    "probe": (probe_runner._told, probes.ProbeLine, _TEXT),
    "team step": _json(PlayedStep),
    "team exchange": _json(ExchangeRound),
    "chaos order": _json(rank_orders.RankOrder),
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
    try:
        again = encode(decode(content))  # values may hold a NaN, which equals nothing
    except msgspec.DecodeError as e:
        if "absurd" not in str(e):  # the bounds of an alarm are not in its type
            raise
        reject()
    assert again == content


@given(
    st.one_of(
        st.binary(max_size=200),
        mutated(
            st.just(replay_environment.encode_signature(1, 2, None) + replay_environment.encode_signature(2, 3, 4))
        ),
    )
)
@example(b"1 2 " + b"9" * 5000 + b"\n")
def test_signatures_of_a_replay(content: bytes) -> None:
    list(replay_environment.decode_signatures(content))


@given(st.one_of(st.text(max_size=40), mutated(st.just(b"3-7,9:0.5@1-2")).map(lambda b: b.decode("latin-1"))))
def test_steps_to_skip(text: str) -> None:
    """They come from our own agent by the environment, which a script may change."""
    for decode in (skip_ease_environment.parse_skips, skip_ease_environment.parse_eases):
        narrow(lambda decode=decode: decode(text), ValueError)  # type: ignore[misc]


FILES: dict[str, Callable[[Path], object]] = {
    "done.jsonl": lambda path: AgentStateFiles(path.parent).read_done(),
    "stopped": lambda path: AgentStateFiles(path.parent).read_stopped(),
    "alone": lambda path: AgentStateFiles(path.parent).mark_alone(1.0),
    "leaving.json": lambda path: AgentStateFiles(path.parent).read_leave_intent(),
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
