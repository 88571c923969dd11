"""Incidents as traces: what a real HTTP collector gets and decodes; nothing of it without a collector."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from holdfast.controller.incident_traces import IncidentTraces, is_collector_named
from holdfast.core.record.incident_spans import trace_incident
from holdfast.model.incident_record import Record, Remedy
from holdfast.model.journal_entry import Entry
from tests.core.test_page_view import simulated
from tests.otlp_collector import Collector, collecting, decoded, words

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def closing() -> list[Entry]:
    return [entry for entry in simulated() if entry.decision.closed]


def records() -> list[Record]:
    return [entry.decision.closed for entry in closing() if entry.decision.closed]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


def test_a_collector_gets_each_incident_as_one_trace(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OpenTelemetry: nothing is exported")
    address = f"http://127.0.0.1:{collector.server_port}"
    monkeypatch.setenv(ENDPOINT, address)
    traces = IncidentTraces("run-7", {ENDPOINT: address})
    for entry in simulated():
        traces.on_entry(entry)
    traces.finish_up(wait_s=120)
    assert [(path, kind) for path, kind, _ in collector.bodies] == [("/v1/traces", "application/x-protobuf")] * 2
    parts = [decoded(body) for _, _, body in collector.bodies]
    told = words(parts[0].resource.attributes)
    assert (told["service.name"], told["holdfast.run_id"]) == ("holdfast", "run-7")
    crash, loss = ([span for scope in part.scope_spans for span in scope.spans] for part in parts)
    assert [span.name for span in crash] == ["incident", "detect", "stop", "judge", "launch", "first step"]
    assert [span.name for span in loss][1:5] == ["detect", "silence", "stop", "judge"]
    for spans, record in zip((crash, loss), records(), strict=True):
        root, *phases = spans
        assert len({span.trace_id for span in spans}) == 1 and len({span.span_id for span in spans}) == len(spans)
        assert not root.parent_span_id and all(span.parent_span_id == root.span_id for span in phases)
        assert root.start_time_unix_nano == round(record.good_at * 1e9)
        assert root.end_time_unix_nano == pytest.approx(record.resumed_at * 1e9, abs=1000)
        for one, next_one in pairwise(phases):
            assert one.end_time_unix_nano == next_one.start_time_unix_nano
        found = words(root.attributes)
        assert found["holdfast.kind"] == record.kind and found["holdfast.verdict"] == record.verdict.remedy
        assert found["holdfast.nodes"] == list(record.evicted or record.suspects)
        (judge,) = (span for span in phases if span.name == "judge")
        assert words(judge.attributes)["holdfast.verdict"] == record.verdict.remedy
    assert crash[0].trace_id != loss[0].trace_id


HARM = "\x1b]0;owned\x07\x1b[2J\u202e"
SECRET, TOKEN = "correct-horse-battery", "hf_" + "aB3dE5fG7hJ9kL1m"


def test_a_collector_gets_no_secret_and_nothing_that_a_terminal_obeys(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OpenTelemetry: nothing is exported")
    address = f"http://127.0.0.1:{collector.server_port}"
    monkeypatch.setenv(ENDPOINT, address)
    monkeypatch.setenv("HUB_PASSWORD", SECRET)
    quoted = f"{HARM}no login with {TOKEN} and {SECRET}"
    entry = closing()[0]
    record = entry.decision.closed
    assert record
    verdict = msgspec.structs.replace(record.verdict, remedy=Remedy.GIVE_UP, reason=quoted)
    told = msgspec.structs.replace(record, cause=quoted, verdict=verdict)
    decision = msgspec.structs.replace(entry.decision, closed=told)
    traces = IncidentTraces("run-7", {ENDPOINT: address})
    traces.on_entry(msgspec.structs.replace(entry, decision=decision))
    traces.finish_up(wait_s=120)
    [(_, _, body)] = collector.bodies
    assert not [harm for harm in (SECRET, TOKEN, "\x1b]", "\x1b[", "owned", "\u202e") if harm.encode() in body]
    root = decoded(body).scope_spans[0].spans[0]
    clean = "no login with <token> and <secret>"
    found = words(root.attributes)
    assert (found["holdfast.cause"], found["holdfast.reason"], root.status.message) == (clean,) * 3
    assert found["holdfast.nodes"] == list(record.evicted or record.suspects)


def test_a_collector_that_refuses_costs_a_line_of_the_log(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OpenTelemetry: nothing is exported")
    collector.status = 400
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{collector.server_port}")
    traces = IncidentTraces("run-7", {ENDPOINT: "see above"})
    with caplog.at_level(logging.WARNING, "holdfast.controller"):
        traces.on_entry(closing()[0])
        traces.finish_up(wait_s=120)
    [told] = [record for record in caplog.records if record.name == "holdfast.controller"]
    assert told.getMessage() == "the trace of incident 1 is lost: the collector did not take it"


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({ENDPOINT: "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "speaks http/protobuf"),
        ({ENDPOINT: "http://127.0.0.1:1"}, "pip install 'holdfast[otel]'"),
    ],
)
def test_what_cannot_be_sent_is_one_line(
    environ: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    traces = IncidentTraces("run-7", environ)
    with caplog.at_level(logging.WARNING, "holdfast.controller"):
        traces.on_entry(closing()[0])
        traces.finish_up(wait_s=120)
    assert why in caplog.text and caplog.text.count("\n") == 1


def test_nothing_is_imported_or_started_without_a_collector() -> None:
    assert not is_collector_named({})
    assert is_collector_named({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})
    assert not is_collector_named({ENDPOINT: "http://x", "OTEL_SDK_DISABLED": "true"})
    assert not is_collector_named({ENDPOINT: "http://x", "OTEL_TRACES_EXPORTER": "none"})
    traces = IncidentTraces("run-7", {})
    for entry in closing():
        traces.on_entry(entry)
    assert traces._thread is None
    traces.finish_up()
    asked = "import sys, holdfast.controller.incident_traces; sys.exit(any('opentelemetry' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_an_incident_that_ends_the_job_is_a_failure_and_its_text_is_plain() -> None:
    record = records()[0]
    verdict = msgspec.structs.replace(record.verdict, remedy=Remedy.GIVE_UP, reason="nothing is left")
    root, *phases = trace_incident(msgspec.structs.replace(record, verdict=verdict, resumed_at=record.stopped_at))
    assert root.failure == "nothing is left" and not any(span.failure for span in phases)
    assert all(span.end_at >= span.start_at for span in (root, *phases))
