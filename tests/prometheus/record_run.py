"""Records the metrics of real jobs under faults: tests/prometheus/faults.json and stands.json.

python -m tests.prometheus.record_run faults     (as root: its hosts have networks of their own)
python -m tests.prometheus.record_run stands
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from holdfast.wire import controller_request
from holdfast.wire.controller_request import ControllerNotRunning

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "deploy/prometheus/alerts.yaml"
EVERY_S = 15.0
HOLD_FROM_S, HOLD_UNTIL_S = 45.0, 375.0  # of the job that stands


def used_names() -> set[str]:
    """The metrics that alert rules use; others are not recorded."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return {name for rule in rules for name in re.findall(r"holdfast_\w+", rule["expr"])}


def scrape(run_dir: Path) -> dict[str, float]:
    """All samples of one scrape by series; none if no controller answers."""
    try:
        text = controller_request.fetch(run_dir, "/metrics").decode()
    except ControllerNotRunning:
        return {}
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name + "{" + ",".join(f'{key}="{value}"' for key, value in sample.labels.items()) + "}": sample.value
        for sample in samples
    }


class Recording:
    def __init__(self, name: str, run_dir: Path) -> None:
        self.name, self.run_dir, self.began_at = name, run_dir, time.time()
        self.rows: list[dict[str, float]] = []
        self.notes: list[tuple[str, float]] = []

    def take(self) -> None:
        self.rows.append(scrape(self.run_dir))
        time.sleep(max(0.0, self.began_at + len(self.rows) * EVERY_S - time.time()))

    def note(self, what: str) -> None:
        self.notes.append((what, round(time.time() - self.began_at)))

    def struck(self) -> dict[str, float]:
        """When each kind of fault was last struck, in seconds since the beginning."""
        path = self.run_dir / "chaos.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {
            line["fault"]["kind"]: round(line["at"] - self.began_at, 1) for line in told if line["line"] == "struck"
        }

    def write(self) -> None:
        used = used_names()
        names = sorted({name for row in self.rows for name in row if name.partition("{")[0] in used})
        shift = [name for name in names if "timestamp" in name]
        series = {
            name: [
                None if (value := row.get(name)) is None else round(value - (self.began_at if name in shift else 0), 3)
                for row in self.rows
            ]
            for name in names
        }
        made = {"every_s": EVERY_S, "struck": self.struck(), "notes": self.notes, "series": series}
        (HERE / f"{self.name}.json").write_text(json.dumps(made))


def main() -> None:
    [name] = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="holdfast-record-") as folder:
        scenario = Path(folder) / "scenario.toml"
        scenario.write_text((HERE / f"{name}.toml").read_text().replace("{script}", str(HERE / "trained.py")))
        env = os.environ | {"HOLDFAST_HOME": folder}
        chaos = subprocess.Popen([sys.executable, "-m", "holdfast", "chaos", "run", str(scenario)], env=env)
        while not (found := list(Path(folder).glob("chaos/*/run/**/controller.sock"))):
            assert chaos.poll() is None
            time.sleep(0.5)
        recording = Recording(name, found[0].parent)
        due = [("hold", HOLD_FROM_S), ("resume", HOLD_UNTIL_S)] if name == "stands" else []
        while chaos.poll() is None:
            recording.take()
            recording.write()
            if due and time.time() > recording.began_at + due[0][1]:
                order(recording, due.pop(0)[0], env)


def order(recording: Recording, verb: str, env: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "holdfast", verb, "--run", str(recording.run_dir)], env=env, check=True)
    recording.note(verb)


if __name__ == "__main__":
    main()
