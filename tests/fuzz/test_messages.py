"""Messages and small files, whatever their bytes: a value or a DecodeError, and what was encoded comes back."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.cli.launch import stoppable_wait
from holdfast.cli.launch.stoppable_wait import WaitNote
from holdfast.model.node_errands import Done
from holdfast.wire import (
    replay_environment,
    skip_ease_environment,
)
from tests.fuzz.codecs import CODECS, PACK, TEXT, Codec
from tests.fuzz.making import INTS, JSON, PLAIN, hostile, mutated, narrow, values

NOT_UTF8 = {PACK: b"\x82\xa4type\xa6notice\xa4node\xa2\xff\xff", TEXT: b'{"type":"denied","why":"\xff"}'}
TOO_DEEP = {PACK: b"\x81\xa1x" + b"\x91" * 9_000, TEXT: b'{"x":' + b"[" * 9_000}


def _values(codec: Codec) -> st.SearchStrategy[Any]:
    return values(codec[1], JSON if codec[2] is TEXT else PLAIN)


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


@given(content=hostile(values(WaitNote, JSON).map(TEXT)), pid=INTS)
@example(content=b'{"pid":7,"stopped":9223372036854775807}', pid=7)
@example(content=b'{"pid":7,"stopped":-1}', pid=7)
@example(content=b'{"pid":18446744073709551615}', pid=7)
@example(content=b"[" * 9_000, pid=7)
def test_the_note_of_a_wait(content: bytes, pid: int, tmp_path: Path) -> None:
    """A disk may have damaged it: the supervisor ends with it only if it is the controller's and names an exit code."""
    (tmp_path / "waiting.json").write_bytes(content)
    for asked in {pid, 7}:
        note = stoppable_wait.read_note(tmp_path, asked)
        assert note is None or (note.pid == asked and 0 <= note.stopped < 256)


@given(code=st.integers(0, 255), other=INTS.filter(lambda pid: pid != os.getpid()))
def test_the_note_of_a_wait_is_its_controllers_alone(code: int, other: int, tmp_path: Path) -> None:
    stoppable_wait.note_stop(tmp_path, code)
    assert stoppable_wait.read_note(tmp_path, os.getpid()) == WaitNote(pid=os.getpid(), stopped=code)
    assert stoppable_wait.read_note(tmp_path, other) is None


@pytest.mark.parametrize("name", FILES)
@given(content=hostile(values(Done, JSON).map(TEXT)))
@example(content=b"\xff")
@example(content=b"1e999")
@example(content=b"9" * 5000)
def test_what_an_agent_left_behind(name: str, content: bytes, tmp_path: Path) -> None:
    """A disk may have damaged it: the next agent starts all the same."""
    (tmp_path / name).write_bytes(content)
    FILES[name](tmp_path / name)
