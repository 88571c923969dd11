"""The ETTR of the sliding hour, as every door shows it: status, report and metrics, in JSON and in words."""

import re
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group

from holdfast.cli.commands.report_command import render_report
from holdfast.cli.commands.status_command import render_status
from holdfast.cli.terminal.quantity_text import hour_ettr_of
from holdfast.core.record.job_report import Report
from holdfast.core.record.ledger import Ledger
from tests.controller.conftest import HEADERS, Desk, Open
from tests.core.test_ledger import START, entries

# Two hours, of which it stood still from 4500 s on for a quarter of the last one.
STOOD = (
    "4510 progress 451 at 4500 from 1 since 5",
    "4510 alarm crash n0 rank 0 code -9 since 4505",
    "4600 outcome 3 ok",
    "5399 outcome 4 ok",
    "5401 progress 452 at 5400",
)
NOW = 7200.0
HOUR = re.compile(r"[\d.]+ % of the last hour")


def aged_ledger(*lines: str) -> Ledger:
    """The account of a job that began two hours ago and has not ended."""
    ledger, shift_s = Ledger(), time.time() - NOW
    dated = entries(*(f"{float(line.split(' ', 1)[0]) + shift_s!r} {_shifted(line, shift_s)}" for line in lines))
    for entry in dated:
        ledger.add(entry)
    return ledger


def _shifted(line: str, shift_s: float) -> str:
    """The line without its time; instants in it are moved as well."""
    words = line.split()[1:]
    return " ".join(
        repr(float(word) + shift_s) if before in ("at", "since") else word
        for before, word in zip(["", *words], words, strict=False)
    )


def printed(group: Group) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(group)
    return captured.get()


@pytest.mark.parametrize(
    ("lines", "ettr", "said"),
    [
        ((*START, *STOOD), 0.75, "75.0 % of the last hour"),
        (("3600 begin nnodes 1", "3601 outcome 1 ok nodes n0", "3603 ready n0", "3604 outcome 2 ok"), None, ""),
    ],
)
async def test_the_last_hour_is_shown_everywhere(
    desk_of: Open, lines: tuple[str, ...], ettr: float | None, said: str
) -> None:
    async with desk_of() as desk:
        desk.controller.ledger = aged_ledger(*lines)
        status = await (await desk.client.get("/api/v1/status", headers=HEADERS)).json()
        report = await (await desk.client.get("/api/v1/report", headers=HEADERS)).json()
        sample = await metric(desk, "holdfast_last_hour_ettr_ratio")
    shown = (status["hour_ettr"], report["hour_ettr"], sample)
    assert shown == (None, None, None) if ettr is None else shown == pytest.approx((ettr, ettr, ettr), abs=0.01)
    texts = printed(render_status(status)), printed(render_report(msgspec.convert(report, Report)))
    told = [HOUR.search(text) for text in texts]
    assert all(one is not None and one[0] == said for one in told) if said else told == [None, None]


async def metric(desk: Desk, name: str) -> float | None:
    answer = await desk.client.get("/metrics", headers=HEADERS)
    families = text_string_to_metric_families(await answer.text())
    return next((family.samples[0].value for family in families if family.name == name), None)


async def test_where_the_resumed_step_is_not_known_the_last_hour_is_a_bound(desk_of: Open) -> None:
    counted = tuple(line.replace("progress 452", "progress 1") + " counted" * ("progress" in line) for line in STOOD)
    async with desk_of() as desk:
        desk.controller.ledger = aged_ledger(*START, *counted)
        status = await (await desk.client.get("/api/v1/status", headers=HEADERS)).json()
    assert status["at_most"] and hour_ettr_of(0.75, status["at_most"]) in printed(render_status(status))
