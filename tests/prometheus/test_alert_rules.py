"""Alert rules and the dashboard: their metrics exist, and rules fire when they should in recordings of real runs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.controller.metrics import METRICS
from tests.prometheus.record_run import HERE, RULES
from tests.test_docs import ROOT

TARGET = 'instance="c:1",job="holdfast"'


def labels_of(text: str) -> set[str]:
    """Labels by which series are chosen or grouped."""
    chosen = re.findall(r"(\w+)=~?\"|(\w+)!~?\"", text)
    grouped = re.findall(r"(?:by|on|without) \(([\w, ]+)\)", text)
    return {name for pair in chosen for name in pair if name} | {n for group in grouped for n in group.split(", ")}


def test_metrics_of_rules_and_dashboard_exist() -> None:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    board = json.loads((ROOT / "deploy/grafana/holdfast.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown += [one["expr"] for one in board["annotations"]["list"]]
    asked = [one["query"] for one in board["templating"]["list"]]
    used = {name for text in (*rules, *shown, *asked) for name in re.findall(r"holdfast_\w+", text)}
    assert used and used - METRICS.keys() == set()
    known = {"instance", "job", *(label for row in METRICS.values() for label in row.labels)}
    assert {label for text in (*rules, *shown) for label in labels_of(text)} <= known
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_are_written_up() -> None:
    names = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    written = set(re.findall(r"^\| `(Holdfast\w+)` \|", (ROOT / "docs/METRICS.md").read_text(), re.M))
    assert written == names


def test_every_alert_names_its_entry_of_the_runbook() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    page = (ROOT / "docs/RUNBOOK.md").read_text().partition("\n## Alerts from Prometheus\n")[2]
    parts = re.split(r"^### (Holdfast\w+)$", re.split(r"^## ", page, maxsplit=1, flags=re.M)[0], flags=re.M)
    entries = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert entries.keys() == {rule["alert"] for rule in rules}
    for name, entry in entries.items():
        assert all(f"**{who}**" in entry for who in ("You see", "Holdfast", "You")), name
    named = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules}
    assert named == {name: f"docs/RUNBOOK.md#{name.lower()}" for name in entries}


def notation(values: list[float | None]) -> str:
    """A series as promtool reads it; one that a scrape lacks is stale, as in Prometheus."""
    return " ".join("stale" if value is None else repr(value) for value in values)


def input_series(name: str) -> tuple[float, list[dict[str, str]]]:
    recorded = json.loads((HERE / f"{name}.json").read_text())
    found = {series.replace("{}", "{" + TARGET + "}"): values for series, values in recorded["series"].items()}
    found = {re.sub(r"\{(?!instance)", "{" + TARGET + ",", series): values for series, values in found.items()}
    rows = zip(*found.values(), strict=True)
    found["up{" + TARGET + "}"] = [float(any(value is not None for value in row)) for row in rows]
    return recorded["every_s"], [{"series": series, "values": notation(values)} for series, values in found.items()]


def fired(
    name: str, series: list[dict[str, str]], every_s: float, times: list[int], folder: Path
) -> dict[int, set[str]]:
    """Which alerts fire at each of these seconds, by promtool's own words."""
    asks = [
        {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{at}s", "exp_samples": []}
        for at in times
    ]
    test = {"interval": f"{every_s:.0f}s", "input_series": series, "promql_expr_test": asks}
    made: dict[str, Any] = {"rule_files": [str(RULES)], "evaluation_interval": f"{every_s:.0f}s", "tests": [test]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(made))
    argv = ["promtool", "test", "rules", str(path)]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    found: dict[int, set[str]] = {at: set() for at in times}
    for at, said in re.findall(r"time: (\S+),\s+exp:.*?got:\"?(.*?)(?=\n\s*expr:|\Z)", done.stdout, re.S):
        found[_seconds(at)] = set(re.findall(r'alertname=\\?"(\w+)', said))
    assert done.returncode == (1 if any(found.values()) else 0), done.stdout
    return found


RECORDED = {
    # Five ranks were killed up to 192 s, storage was full from 213 s on, and a host was cut off at 228 s. One of three
    # standbys had taken a seat at 130 s.
    "faults": {
        150: set(),
        300: {"HoldfastIncidentsFrequent"},
        480: {"HoldfastIncidentsFrequent", "HoldfastNodesMissing"},
        600: {"HoldfastIncidentsFrequent", "HoldfastNodesMissing", "HoldfastStorageFailing"},
    },
    # A person held the job from 52 s to 380 s; from 390 s on it stood.
    "stands": {
        300: set(),
        360: {"HoldfastWaitsForPerson"},
        600: {"HoldfastTimeLost"},
        960: {"HoldfastTimeLost"},
        1020: {"HoldfastTimeLost", "HoldfastNoStep"},
    },
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", list(RECORDED))
def test_rules_fire_when_they_should(name: str, tmp_path: Path) -> None:
    require_promtool()
    every_s, series = input_series(name)
    assert fired(name, series, every_s, list(RECORDED[name]), tmp_path) == RECORDED[name]


@pytest.mark.e2e
def test_rules_about_the_controller(tmp_path: Path) -> None:
    """Of these there is no recording: no fault takes a controller away for minutes."""
    require_promtool()
    down = [{"series": "up{" + TARGET + "}", "values": "1x10 0x30"}]
    late = [{"series": "holdfast_loop_lag_seconds{" + TARGET + "}", "values": "0.1x10 2x30"}]
    assert fired("down", down, 15.0, [255, 330], tmp_path) == {255: set(), 330: {"HoldfastControllerDown"}}
    assert fired("late", late, 15.0, [400, 510], tmp_path) == {400: set(), 510: {"HoldfastControllerLags"}}


def steps(*values: float, end: float) -> str:
    """A series of one scrape every 15 s: these values, and then the last for good."""
    return " ".join(map(repr, values)) + f" {end!r}x400"


# Of each rule: series for which it fires, seconds when it does, and when it no longer does. Each is mended at 900 s.
CLEARS: dict[str, tuple[dict[str, str], int, int]] = {
    "HoldfastControllerDown": ({"up{T}": steps(*[0.0] * 60, end=1.0)}, 600, 915),
    "HoldfastNoStep": (
        {"holdfast_step_timestamp_seconds{T}": steps(*[0.0] * 60, *(15.0 * n for n in range(60, 120)), end=1800.0)},
        700,
        915,
    ),
    "HoldfastWaitsForPerson": ({"holdfast_held{T}": steps(*[1.0] * 60, end=0.0)}, 600, 915),
    "HoldfastNodesMissing": (
        {
            'holdfast_nodes{T,role="active"}': steps(*[3.0] * 60, end=4.0),
            'holdfast_nodes_wanted{T,role="active"}': steps(end=4.0),
        },
        600,
        915,
    ),
    "HoldfastStorageFailing": ({"holdfast_storage_failing{T}": steps(*[1.0] * 60, end=0.0)}, 600, 915),
    # These two look back: an hour, and half an hour.
    "HoldfastIncidentsFrequent": (
        {'holdfast_incidents_total{T,kind="crash"}': steps(*(n // 8 for n in range(61)), end=7.0)},
        900,
        900 + 3660,
    ),
    "HoldfastTimeLost": (
        {'holdfast_spent_seconds_total{T,use="stop"}': steps(*(15.0 * n for n in range(61)), end=900.0)},
        900,
        900 + 1860,
    ),
    "HoldfastControllerLags": ({"holdfast_loop_lag_seconds{T}": steps(*[2.0] * 60, end=0.1)}, 600, 915),
}


@pytest.mark.e2e
def test_every_alert_clears_when_what_it_tells_of_is_over(tmp_path: Path) -> None:
    require_promtool()
    rules = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    assert CLEARS.keys() == rules
    for alert, (values, fires, cleared) in CLEARS.items():
        series = [{"series": name.replace("T", TARGET), "values": text} for name, text in values.items()]
        assert fired(alert, series, 15.0, [fires, cleared], tmp_path) == {fires: {alert}, cleared: set()}, alert


def require_promtool() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: apt-get install prometheus)")


def _seconds(text: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))
