"""Knowledge as data: each row matches its own sample and no other row's."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.config import ConfigError, Settings, load
from holdfast.core.detect import health, lines
from holdfast.core.detect.user_log_rules import Rule, RuleLimits
from holdfast.core.incident.first_cause import ECHOES
from holdfast.logs import catalog_files
from holdfast.logs.regex_safety import BAD_PATTERN, EXPLOSIVE, NESTED
from holdfast.model.detector_alarm import Stance

CATALOG = catalog_files.load_failures()
LINE = """
[[row]]
klass = "storage_io_error"
group = "data_storage"
action = "retry"
needle = "weka"
pattern = "weka: (?P<of>\\\\S+) is gone"
say = "has lost {of}"
sample = "weka: /w is gone"
source = "ours"
"""
GAUGE = """
[[row]]
gauge = "queue.depth"
above = 1.0
klass = ""
group = "unknown"
action = "retry"
say = "has a long queue"
sample = [2.0]
source = "ours"
"""
GROUPS = {"infrastructure", "framework", "script", "data_storage", "external", "preemption", "unknown"}
ACTIONS = {"evict_and_restart", "retry", "rollback_or_fix_code", "fix_config", "wait_external", "run_diagnostics"}


def test_the_echoes_are_known_classes() -> None:
    assert {row.klass for row in CATALOG.rows} >= ECHOES.keys()


def refused(kind: str, text: str, tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        catalog_files.check_catalogs(load(None, [(f"{kind}.catalog", str(path))]))
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    "row", [*catalog_files.load_lines().rows, *catalog_files.load_health()], ids=lambda row: row.say
)
def test_rows_for_machines_are_complete(row: lines.LineRow | health.GaugeRow) -> None:
    assert row.group in GROUPS
    assert row.action in ACTIONS
    assert row.say and row.source
    assert not row.hard or row.stance is Stance.ACT


def test_the_settings_as_they_are() -> None:
    catalog_files.check_catalogs(Settings())


def test_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(LINE)
    assert catalog_files.load_lines(str(path)).rows[-1].say == "has lost {of}"
    path.write_text(GAUGE.replace("queue.depth", "disk.free"))
    rows = {row.gauge: row for row in catalog_files.load_health(str(path))}
    assert (rows["disk.free"].above, len(rows)) == (1.0, len(catalog_files.load_health()))


def test_files_that_are_refused(tmp_path: Path) -> None:
    assert BAD_PATTERN in refused("lines", LINE.replace("weka: (", "weka: (("), tmp_path)
    assert refused("lines", LINE + LINE, tmp_path).count("'has lost {of}'") == 3
    assert "'has lost {of}'" in refused("lines", LINE.replace("is gone", "is there", 1), tmp_path)
    assert "'has lost {of}'" in refused("lines", LINE + 'rank = true\nstance = "act"\n', tmp_path)
    assert "unknown field" in refused("lines", LINE + "regex = 1\n", tmp_path)
    assert NESTED in refused("lines", LINE.replace("\\\\S+)", "(?:\\\\S+ ?)+)"), tmp_path)
    assert "{of}" in refused("lines", LINE.replace("{of}", "{who}"), tmp_path)
    assert f" {tmp_path / 'mine.toml'} " in refused("lines", "[[row", tmp_path)
    assert "`klass`" in refused("health", '[[row]]\ngauge = "x"\n', tmp_path)
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOENT)):
        catalog_files.load_lines(str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        catalog_files.load_lines("mine.toml")
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        catalog_files.load_health(str(tmp_path / "mine.toml"))


def test_a_rule_that_may_take_for_ever() -> None:
    """Rules are looked for in the agent's loop."""
    rule = Rule(name="loss", kind="loss", pattern=r"loss=((\d+)+)$")
    with pytest.raises(ConfigError, match=f"'loss' {EXPLOSIVE}"):
        catalog_files.check_catalogs(Settings(rules=RuleLimits(rule=(rule,))))


def test_two_meanings_of_one_gauge(tmp_path: Path) -> None:
    assert "queue.depth" in refused("health", GAUGE + GAUGE, tmp_path)
    assert "above" in refused("health", GAUGE + "below = 0.0\n", tmp_path)
    assert "queue.depth" in refused("health", GAUGE.replace("[2.0]", "[0.0]"), tmp_path)


def test_what_is_ours_is_not_read_before_every_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It takes half a second, in which nothing can start yet."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    for name in ("_built_in_with", "_read_ours", "load_classes"):
        monkeypatch.setattr(catalog_files, name, lambda *_: pytest.fail("our own catalog was read"))
    catalog_files.load_built_in.cache_clear()
    catalog_files.check_catalogs(Settings())
