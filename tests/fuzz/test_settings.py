"""What people write: settings, catalogs and scenarios. Whatever it is, it is taken or refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import config
from holdfast.chaos import scenario
from holdfast.cli import main
from holdfast.cli.run_flags import flag_values
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.config import ConfigError, Settings, WordLimits
from holdfast.logs import catalog_files, user_rows
from tests.conftest import leaves
from tests.fuzz.making import hostile, mutated, narrow

_SETTINGS = b"""
[recovery]
attempts = 3
[silence]
beat_s = 1.0
silence_s = 5
[model]
url = "http://localhost:80/v1"
name = "m"
[snapshot]
memory = "50%"
[hook]
url = "https://example.com/x"
"""
_ROWS = b"""
[[row]]
klass = "user_code"
pattern = "abc.*def"
sample = "abc def"
weight = 5
[[row]]
gauge = "gpu.ecc"
limit = 1.5
"""
_SCENARIO = b"""
seed = 7
patience_s = 9.5
[[fault]]
kind = "rank.kill"
rank = 1
after_s = 2.5
[job]
run = ["train.py"]
"""
_TEXTS = st.one_of(
    st.sampled_from(
        ("", "nan", "inf", "-1", "1e999", "9" * 5000, "[", "http://[", "http://[::1", "\ud800", "50%", "\0")
    ),
    st.text(max_size=12),
)
_VALUES = st.one_of(_TEXTS, st.integers().map(str), st.floats().map(str))


_BLOCKED = b'[{"host": "h", "id": "4f", "gpus": ["GPU-1"], "reason": "bad", "at": 1.5, "until": 9e9, "more": {}}]'


@given(content=hostile(st.just(_BLOCKED)))
@example(content=_BLOCKED.replace(b"9e9", b"9e307"))
@example(content=b"[" * 9_000)
def test_a_list_of_blocked_hosts(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "blocked.json").write_bytes(content)
    assert main(["blocked", "--list", str(tmp_path / "blocked.json")]) in (0, 2)


@given(content=hostile(st.just(_SETTINGS)))
@example(content=b"a = " + b"[" * 9_000)
@example(content=b"a = " + b"9" * 5000)
@example(content=b"[recovery]\nattempts = " + b"9" * 400)
@example(content=b'[model]\nurl = "http://["\nname = "m"')
@example(content=b'[hook]\nurl = "http://[x]:99999999/"')
@example(content=b"[silence]\nbeat_s = 1979-05-27")
def test_a_file_of_settings(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    narrow(lambda: config.load(str(tmp_path / "c.toml"), ()), ConfigError)


@given(st.lists(st.tuples(st.sampled_from(list(leaves(Settings))), _VALUES), max_size=3))
@example([("model.url", "http://["), ("model.name", "m")])
@example([("hook.url", "http://[")])
@example([("recovery.attempts", "9" * 5000)])
@example([("snapshot.memory", "9" * 5000)])
@example([("snapshot.memory", "1e999")])
@example([("recovery.stop_grace_s", "\ud800")])
def test_settings_of_the_command_line(given: list[tuple[str, str]]) -> None:
    narrow(lambda: config.load(None, given), ConfigError)


@given(st.lists(st.one_of(st.text(max_size=12), st.just("a.b=c"), st.just("=")), max_size=3))
def test_words_after_set(texts: list[str]) -> None:
    def both() -> Any:
        return config.load(None, flag_values.parse_settings(texts))

    narrow(both, ConfigError, UsageError)


@given(content=hostile(st.just(_SCENARIO)))
@example(content=b"seed = " + b"[" * 9_000)
@example(content=b'[[fault]]\nkind = "rank.kill"\nat_step = ' + b"9" * 5000)
@example(content=b"seed = " + b"9" * 400)
def test_a_scenario(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(content)
    found = narrow(lambda: scenario.read_scenario(tmp_path / "s.toml"), scenario.BadScenario)
    if isinstance(found, scenario.Scenario):
        scenario.fault_lines(found)


CATALOGS: dict[str, Callable[[Path], object]] = {
    "own": user_rows.read_user_rows,
    "words": lambda path: catalog_files.load_failures(WordLimits(catalog=str(path))),
    "lines": lambda path: catalog_files.load_lines(str(path)),
    "health": lambda path: catalog_files.load_health(str(path)),
}


@pytest.mark.parametrize("name", CATALOGS)
@given(content=st.one_of(hostile(st.just(_ROWS)), mutated(st.just(_ROWS[:85]))))
@example(content=b"row = " + b"[" * 9_000)
@example(content=b"row = 1")
@example(content=b"row = [1]")
@example(content=b"[[row]]\nweight = " + b"9" * 5000)
@example(content=b'[[row]]\nklass = "user_code"\npattern = "("\nsample = "a"')
@example(content=b'[[row]]\nklass = "user_code"\npattern = "' + b"(" * 5000 + b'"\nsample = "a"')
@example(content=b'[[row]]\nklass = "user_code"\npattern = "a{99999999999}"\nsample = "a"')
def test_a_catalog(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "words.toml").write_bytes(content)
    narrow(lambda: CATALOGS[name](tmp_path / "words.toml"), ConfigError)


@given(st.text(max_size=30))
@example("(" * 5000)
@example("a{99999999999}")
@example("(?P<a>x)(?P<a>y)")
@example("(?<=a*)b")
def test_a_pattern(pattern: str) -> None:
    from holdfast.logs.regex_safety import find_pattern_fault

    assert isinstance(find_pattern_fault(pattern), str)
