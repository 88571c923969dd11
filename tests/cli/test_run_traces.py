"""A rank of a real job is killed, and a collector gets the incident as a trace."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import ROOT
from tests.otlp_collector import collecting, decoded, words


@pytest.mark.e2e
@pytest.mark.slow
def test_a_collector_gets_the_incident_of_a_real_job(start: Start) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OpenTelemetry: nothing is exported")
    found = find_spec("opentelemetry.sdk")
    assert found is not None and found.submodule_search_locations
    path = f"{ROOT}{os.pathsep}{Path(next(iter(found.submodule_search_locations))).parents[1]}"
    with collecting() as collector:
        address = f"http://127.0.0.1:{collector.server_port}"
        job = start("--nnodes", "2", OTEL_EXPORTER_OTLP_ENDPOINT=address, OWN_SERVER="1", PYTHONPATH=path)
        job.trains()
        job.kill(job.rank(1))
        job.until(lambda: collector.bodies, "the trace")
        job.finish()
        job.ends(0)
    (scope,) = decoded(collector.bodies[0][2]).scope_spans
    names = [span.name for span in scope.spans]
    assert names[0] == "incident" and {"detect", "stop", "judge", "launch", "first step"} <= set(names)
    told, (record,) = words(scope.spans[0].attributes), job.report().incidents
    assert (told["holdfast.kind"], told["holdfast.verdict"], told["holdfast.ranks"]) == ("crash", "restart", [1])
    assert scope.spans[0].end_time_unix_nano == pytest.approx(record.resumed_at * 1e9, abs=1e6)
