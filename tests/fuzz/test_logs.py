"""Logs of ranks, kernels and language models, whatever their bytes: read to the end, and judged."""

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.agent.rank import last_words, log_rotation
from holdfast.config import ConfigError
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.logs import catalog_files, model_answer, model_request, opinion_process, past_cases
from holdfast.logs.failure_likeness import find_telling_lines, measure_likeness, read_words
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs
from holdfast.logs.log_digest import digest_log
from holdfast.logs.secret_masking import Masker
from tests.fuzz.making import hostile, mutated, narrow

_LOG = b"""[rank3]:[2026-01-02 03:04:05,678] step 12 loss 2.5
Traceback (most recent call last):
  File "/w/train.py", line 88, in main
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
{"log": "RuntimeError: x", "time": "2026-01-02T03:04:05Z", "rank": 3, "level": "error"}
E0102 03:04:05.678901 123 api.py:12] exitcode : -9 (pid: 7)
[Jan  2 03:04:05] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus
Jan 31 23:59:60 host kernel: [  123.456] Out of memory: Killed process 7 (python)
"""
_LINES = st.sampled_from(_LOG.splitlines())


@pytest.fixture(scope="module")
def known() -> FailureCatalog:
    return catalog_files.load_built_in()


_JUMBLED = st.lists(st.one_of(mutated(_LINES), _LINES), max_size=8).map(b"\n".join)


@given(log=st.one_of(hostile(st.just(_LOG)), _JUMBLED), code=st.sampled_from((None, 0, -9, 137, 2**64)))
@example(log=b'{"log": "a", "rank": ' + b"9" * 5000 + b"}", code=1)
@example(log=b"[" * 9_000, code=1)
@example(log=b'{"a":' * 9_000, code=1)
@example(log=b'{"time": "2026-99-99T99:99:99Z", "msg": "RuntimeError: x"}', code=1)
@example(log=b'{"msg": "a", "rank": true, "exception": {"exception": "\\ud800"}}', code=1)
@example(log="٣:٤ rank ٥: exitcode: ٩".encode(), code=1)
@example(log=b"[rank99999999999999999999999]: RuntimeError: x", code=1)
@example(log=b"exitcode : -" + b"9" * 5000, code=1)
def test_a_log_is_judged(log: bytes, code: int | None, known: FailureCatalog) -> None:
    for kernel in (False, True):
        found = diagnose_logs(
            [RankLog(open=lambda: io.BytesIO(log), rank=0, kernel=kernel)], ProcessEnds(code=code), known
        )
        assert found.klass


@given(log=_JUMBLED)
def test_a_log_is_shortened_and_masked(log: bytes) -> None:
    digest_log([log, log], budget=4000, mask=Masker(hosts=True))
    parse_lines(list(enumerate(log.decode("utf-8", "replace").split("\n"))), 0)


@given(log=hostile(st.just(_LOG)))
def test_last_words(log: bytes, tmp_path: Path) -> None:
    for name in ("stdout.log", "stderr.log"):
        (tmp_path / name).write_bytes(log)
    assert all(line.rstrip() for line in last_words.last_words(tmp_path))
    log_rotation.rotate_file(tmp_path / "stdout.log", 10)


_ANSWER = b'<think>{</think>```json\n{"class": "user_code", "root_rank": 3, "evidence": ["a"], "confidence": 0.5}\n```'


@given(hostile(st.just(_ANSWER)))
@example(b'{"class": "a", "root_rank": ' + b"9" * 5000 + b"}")
@example(b'{"class": "a", "confidence": 1e999}')
@example(b'{"class": "a", "confidence": "\\ud800"}')
@example(b'{"class": "a", "x": ' + b"[" * 9_000)
@example(b"{" * 9_000)
def test_an_answer_of_a_model(content: bytes) -> None:
    narrow(lambda: model_answer.parse_answer(content.decode("utf-8", "replace")), model_request.NoAnswer)


@given(hostile(st.just(b'{"choices":[{"message":{"content":[{"text":"a"}]}}]}')))
@example(b'{"choices":[{"message":{"content":"\xff"}}]}')
@example(b'{"choices":' + b"[" * 9_000)
@example(b'{"choices":[{"message":{"content":[1]}}]}')
def test_a_completion(content: bytes) -> None:
    narrow(lambda: model_request._reply_text(content), model_request.NoAnswer)
    assert model_request._error_detail(content)


@given(st.one_of(st.text(max_size=12), st.sampled_from(("nan", "1e999", "-1", "9" * 5000))))
def test_when_to_ask_again(text: str) -> None:
    found = model_request._retry_seconds(text)
    assert found is None or found >= 0


_PAST = b'[{"lines":["a b"],"klass":"gpu_oom","said_by":"person","at":1.0,"times":2}]'


@given(content=hostile(st.just(_PAST)))
@example(content=b"[" * 9_000)
@example(content=b'[{"lines":["\xff"],"klass":"a","said_by":"rules","at":1e999}]')
def test_past_failures(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "past.json").write_bytes(content)
    narrow(lambda: past_cases.PastCases(tmp_path / "past.json").find_nearest(("a b",)), ConfigError)


@given(hostile(st.just(b'{"opinion":null,"id":"f0","said":["a"]}')))
@example(b'{"said":' + b"[" * 9_000)
def test_a_reply_of_the_process_that_asks(content: bytes) -> None:
    narrow(lambda: opinion_process.to_reply(content), msgspec.DecodeError)


@given(log=_JUMBLED)
def test_telling_lines(log: bytes) -> None:
    lines = find_telling_lines([log], str)
    assert len(lines) <= 24
    assert measure_likeness(read_words(lines), read_words(lines)) in (0.0, 1.0)
