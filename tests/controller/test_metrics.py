"""Metrics for Prometheus: their names and their number, and that its own tools take them."""

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from holdfast.controller.metrics import CAUSES, METRICS, OTHER_CAUSES, limit_causes, render_metrics
from holdfast.core.record.job_account import UNSETTLED
from holdfast.model.observation import LinkTraffic
from holdfast.model.stored_checkpoint_report import MissedCheckpoint
from tests.controller.conftest import HEADERS, TOKEN, Desk, Open
from tests.test_docs import ROOT

PATIENCE_S = 60.0


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here (Debian: apt-get install prometheus)")
    return found


def tell_traffic(desk: Desk, nodes: int, ports: int = 10) -> None:
    """Every machine has some RDMA ports, and tells of each."""
    signs = {"np_cnp_sent": 5.0, "out_of_sequence": 1.0}
    for node in range(nodes):
        links = tuple(
            LinkTraffic(link=f"mlx5_{n}", rdma=True, in_bytes_s=1.0, out_bytes_s=2.0, signs=signs) for n in range(ports)
        )
        desk.controller.detectors.network.on_traffic(desk.controller.clock(), f"n{node}", links)


def series(desk: Desk) -> list[str]:
    lines = render_metrics(desk.controller).decode().splitlines()
    return [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]


async def test_the_number_of_series_does_not_grow_with_ranks(desk_of: Open) -> None:
    """A machine has eight ranks: two machines are 16 ranks, and 2,048 are 16,384."""
    async with desk_of() as desk:
        await desk.train()
        counts = {}
        for nodes in (2, 2048):
            tell_traffic(desk, nodes)
            counts[nodes] = len(series(desk))
        said = (ROOT / "docs/METRICS.md").read_text()
        assert f"have {counts[2]} series" in said and f"have {counts[2048]}." in said, counts
        assert counts[2048] < counts[2]
        assert not any("mlx5_" in one for one in series(desk)), "each link has series only if there are few"
        assert 'holdfast_network_bytes_per_second{direction="out"}' in series(desk)


def test_causes_are_bounded_and_none_of_them_falls() -> None:
    lost = {UNSETTLED: 7.0} | {f"cause {n}": 1.0 for n in range(CAUSES + 9)}
    few, many = limit_causes(dict(list(lost.items())[:4])), limit_causes(lost)
    assert few == {"cause 0": 1.0, "cause 1": 1.0, "cause 2": 1.0}
    assert len(many) == CAUSES + 1 and many[OTHER_CAUSES] == 9.0
    assert all(many[cause] >= seconds for cause, seconds in few.items())


async def busy_desk(desk: Desk) -> None:
    await desk.train()
    tell_traffic(desk, 2)
    missed = MissedCheckpoint(step=2, why="step 2 was not written")
    desk.built.controller.registry.storage.on_told(7.0, 2, 1, missed)


@pytest.mark.e2e
async def test_promtool_finds_no_fault_with_the_names(desk_of: Open) -> None:
    tool("promtool")
    async with desk_of() as desk:
        await busy_desk(desk)
        text = render_metrics(desk.controller)
    assert lint(text) == (0, "")
    assert lint(b"x_milliseconds 1\n")[0] != 0, "it would find one"


def lint(text: bytes) -> tuple[int, str]:
    argv = ["promtool", "check", "metrics"]
    done = subprocess.run(argv, input=text, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    return done.returncode, done.stdout.decode()


async def test_every_metric_is_in_the_table_and_has_its_kind(desk_of: Open) -> None:
    async with desk_of() as desk:
        await busy_desk(desk)
        shown = {one.partition("{")[0] for one in series(desk)}
    assert shown <= METRICS.keys()
    lacking = {"holdfast_copied_step", "holdfast_last_hour_ettr_ratio", "holdfast_steps_per_second"}
    lacking |= {"holdfast_tokens_per_second", "holdfast_mfu_ratio", "holdfast_restart_seconds_total"}
    lacking |= {"holdfast_tensor_active_ratio", "holdfast_copy_age_steps", "holdfast_copies_in_gaps"}
    assert METRICS.keys() - shown <= lacking, "what is not known has no sample"
    assert all((row.kind == "counter") is name.endswith("_total") for name, row in METRICS.items())


CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: holdfast
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


@pytest.mark.e2e
async def test_a_real_prometheus_reads_them(desk_of: Open, tmp_path: Path, unused_tcp_port: int) -> None:
    prometheus = tool("prometheus")
    async with desk_of() as desk:
        await busy_desk(desk)
        (tmp_path / "config.yaml").write_text(CONFIG.format(token=TOKEN, port=desk.client.port))
        argv = [prometheus, f"--config.file={tmp_path}/config.yaml", f"--storage.tsdb.path={tmp_path}/series"]
        argv += [f"--web.listen-address=127.0.0.1:{unused_tcp_port}", "--log.level=error"]
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        try:
            found = await ask_patiently(process, unused_tcp_port, "{__name__=~'holdfast_.*'}")
            await check_dashboard(process, unused_tcp_port, desk)
        finally:
            process.kill()
            await process.wait()
        assert (await desk.client.get("/metrics", headers=HEADERS)).status == 200
        assert len(found) == len(series(desk))
        step = [one["value"][1] for one in found if one["metric"]["__name__"] == "holdfast_step"]
        assert step == [str(desk.controller.reached_step)]


async def check_dashboard(process: asyncio.subprocess.Process, port: int, desk: Desk) -> None:
    """What the dashboard asks has an answer where it asks for what is known, and none elsewhere."""
    board = dashboard_queries(f"127.0.0.1:{desk.client.port}")
    known = [query for query in board if is_known(query, {one.partition("{")[0] for one in series(desk)})]
    assert len(known) > len(board) / 2
    for query in known:  # rates and increases need a second scrape
        assert await ask_patiently(process, port, query), query
    async with ClientSession() as session:
        for query in set(board) - set(known):
            assert await ask(session, port, query) == [], f"{query}: what is not known is not shown"


def dashboard_queries(instance: str) -> list[str]:
    """What the dashboard asks, as Grafana would fill it in."""
    board = json.loads((ROOT / "deploy/grafana/holdfast.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [query.replace("$job", "holdfast").replace("$instance", instance) for query in found]


def is_known(query: str, shown: set[str]) -> bool:
    return set(re.findall(r"holdfast_\w+", query)) <= shown


async def ask_patiently(process: asyncio.subprocess.Process, port: int, query: str) -> list[dict[str, Any]]:
    async with asyncio.timeout(PATIENCE_S), ClientSession() as session:
        while not (found := await ask(session, port, query)):
            assert process.returncode is None
            await asyncio.sleep(0.2)
    return found


async def ask(session: ClientSession, port: int, query: str) -> list[dict[str, Any]]:
    try:
        async with session.get(f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}") as answer:
            told = json.loads(await answer.text())
    except (OSError, ValueError):  # it starts
        return []
    assert told["status"] == "success", told
    found: list[dict[str, Any]] = told["data"]["result"]
    return found
