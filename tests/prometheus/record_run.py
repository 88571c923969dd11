"""Records the metrics of a real job under the faults of scenario.toml: tests/prometheus/recorded.json.

python -m tests.prometheus.record_run   (as root: its hosts have networks of their own; 35 minutes)
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
HOLD_S = 420.0


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
    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.began_at = run_dir, time.time()
        self.rows: list[dict[str, float]] = []
        self.notes: list[tuple[str, float]] = []

    def take(self) -> None:
        self.rows.append(scrape(self.run_dir))
        time.sleep(max(0.0, self.began_at + len(self.rows) * EVERY_S - time.time()))

    def note(self, what: str) -> None:
        self.notes.append((what, round(time.time() - self.began_at)))

    def struck(self) -> dict[str, float]:
        """When each kind of fault was last struck and undone, in seconds since the beginning."""
        found: dict[str, float] = {}
        path = self.run_dir / "chaos.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            if told["line"] in ("struck", "undone"):
                found[f"{told['line']} {told.get('kind') or told['fault']['kind']}"] = told["at"] - self.began_at
        return found

    def write(self) -> None:
        names = sorted({name for row in self.rows for name in row if name.partition("{")[0] in used_names()})
        shift = [name for name in names if "timestamp" in name]
        series = {
            name: [
                None if (value := row.get(name)) is None else round(value - (self.began_at if name in shift else 0), 3)
                for row in self.rows
            ]
            for name in names
        }
        made = {"every_s": EVERY_S, "struck": self.struck(), "notes": self.notes, "series": series}
        (HERE / "recorded.json").write_text(json.dumps(made, indent=1))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-record-") as folder:
        scenario = Path(folder) / "scenario.toml"
        scenario.write_text((HERE / "scenario.toml").read_text().replace("{script}", str(HERE / "trained.py")))
        env = os.environ | {"HOLDFAST_HOME": folder}
        chaos = subprocess.Popen([sys.executable, "-m", "holdfast", "chaos", "run", str(scenario)], env=env)
        while not (found := list(Path(folder).glob("chaos/*/run/*/controller.sock"))):
            assert chaos.poll() is None
            time.sleep(0.5)
        recording = Recording(found[0].parent)
        held_at = 0.0
        while chaos.poll() is None:
            recording.take()
            undone_at = recording.struck().get("undone rank.stop")
            if undone_at is not None and not held_at and time.time() > recording.began_at + undone_at + 120:
                held_at = time.time()
                order(recording, "hold", env)
            elif held_at and time.time() > held_at + HOLD_S and len(recording.notes) == 1:
                order(recording, "resume", env)
            recording.write()


def order(recording: Recording, verb: str, env: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "holdfast", verb, str(recording.run_dir)], env=env, check=True)
    recording.note(verb)


if __name__ == "__main__":
    main()
