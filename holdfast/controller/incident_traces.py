"""Sends every closed incident as a trace to an OpenTelemetry collector, if the environment names one."""

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping

import msgspec

from holdfast.core.record.incident_spans import IncidentSpan, trace_incident
from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.logs.secret_masking import Masker, make_secret_masker
from holdfast.model.incident_record import Record
from holdfast.model.journal_entry import Entry

_WAITING = 64  # incidents; the rest are counted and not sent
_LAST_S = 3.0  # that the end of a job waits for what is under way
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_log = logging.getLogger("holdfast.controller")

Send = Callable[[list[IncidentSpan], int], str]  # of incident number so and so; returns why it was not taken, or ""


def is_collector_named(environ: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's environment variables name a collector and do not switch traces off."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environ.get(name) for name in _ENDPOINTS)


class IncidentTraces:
    """Passes incidents to a thread of its own. Only this thread waits for the collector, never the job."""

    def __init__(self, run_id: str, environ: Mapping[str, str]) -> None:
        self._run_id, self._environ = run_id, environ
        self._is_wanted = is_collector_named(environ)
        self._waiting: queue.Queue[Record | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def on_entry(self, entry: Entry) -> None:
        if entry.decision.closed is None or not self._is_wanted:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="incident-traces", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(entry.decision.closed)
        except queue.Full:
            _log.warning("the trace of incident %d is lost: %d wait already", entry.decision.closed.number, _WAITING)

    def finish_up(self, wait_s: float = _LAST_S) -> None:
        """When the job has ended, wait until all traces are sent, for a short time at most."""
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=wait_s)
        except queue.Full:
            return
        self._thread.join(wait_s)

    def _send_all(self) -> None:
        send, mask = _make_sender(self._run_id, self._environ), make_secret_masker()
        while (record := self._waiting.get()) is not None:
            why = send([_clean_span(span, mask) for span in trace_incident(record)], record.number)
            if why:
                _log.warning("the trace of incident %d is lost: %s", record.number, why)


def _make_sender(run_id: str, environ: Mapping[str, str]) -> Send:
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _HTTP)
    why = f"holdfast speaks {_HTTP} to collectors, not {protocol}"
    if protocol == _HTTP:
        try:
            return _make_otlp_sender(run_id, environ)
        except ModuleNotFoundError as e:
            why = f"a collector is named in the environment, but there is no {e.name}: pip install 'holdfast[otel]'"
        except ValueError as e:
            why = f"a variable of OpenTelemetry cannot be read: {e}"
    return lambda spans, number: why


def _make_otlp_sender(run_id: str, environ: Mapping[str, str]) -> Send:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours = {"holdfast.run_id": run_id} | ({} if named else {"service.name": "holdfast"})
    resource, exporter = Resource.create(ours), OTLPSpanExporter()

    def identify_span(number: int, place: int) -> SpanContext:
        ids = _make_id(16, run_id, number), _make_id(8, run_id, number, place)
        return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def send(spans: list[IncidentSpan], number: int) -> str:
        made = [
            ReadableSpan(
                name=span.name,
                context=identify_span(number, place),
                parent=identify_span(number, 0) if place else None,
                resource=resource,
                attributes={f"holdfast.{name}": value for name, value in span.attributes.items()},
                start_time=round(span.start_at * 1e9),
                end_time=round(span.end_at * 1e9),
                status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(),
            )
            for place, span in enumerate(spans)
        ]
        return "" if exporter.export(made) is SpanExportResult.SUCCESS else "the collector did not take it"

    return send


def _make_id(size: int, *parts: str | int) -> int:
    """Return an id that depends only on the parts, so that the collector sees a trace that is sent twice as one."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:size], "big") or 1


def _clean_span(span: IncidentSpan, mask: Masker) -> IncidentSpan:
    """Return a span without secrets and without anything that a terminal would obey."""
    return msgspec.convert(mask.mask_tree(strip_tree(msgspec.to_builtins(span))), IncidentSpan)
