"""`holdfast blocked`: lists, adds and lifts, one sentence for each mistake."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.cli.run_dirs.run_directory import user_name
from holdfast.controller.access.block_list_file import BlockListFile
from holdfast.core.membership.host_blocking import BlockedHost
from tests.cli.console_transcript import assert_screens


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def blocked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["blocked", *words]) == code
    out, err = capsys.readouterr()
    assert not err if code == 0 else not out
    return out if code == 0 else err


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(blocked(capsys, "--json", *words))
    return found


def test_hosts_and_gpus_are_listed_and_lifted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert blocked(capsys) == "nobody is blocked\n"
    now = time.time()
    found = BlockedHost(
        host="h1",
        id="4f",
        gpus=("GPU-1", "GPU-2"),
        reason="lost \x1b[31mit",
        run_id="r7",
        incident=3,
        at=now,
        until=now + 60,
    )
    listed = BlockListFile(home / "blocked.json")
    listed.add_entry(found)
    assert "h2 " in blocked(capsys, "--add", "h2", "--why", "its fan is loud", "--for", "3600")
    blocked(capsys, "--add", "GPU-9", "--why", "hot")
    assert_screens("blocked", {"a host with GPUs, a host, a GPU": blocked(capsys).replace(user_name(), "USER")})
    first, second, _ = rows(capsys)
    assert (first["host"], first["gpus"], first["run_id"]) == ("h1", ["GPU-1", "GPU-2"], "r7")
    assert second["until"] - second["at"] == 3600 and second["who"] and second["reason"] == "its fan is loud"
    blocked(capsys, "--lift", "GPU-2")
    blocked(capsys, "--lift", "h2")
    assert [(e.host, e.gpus) for e in listed.read_entries()] == [("h1", ("GPU-1",)), ("", ("GPU-9",))]
    blocked(capsys, "--lift", "h1")
    assert "GPU-1" not in blocked(capsys)


def test_entries_whose_time_is_over_are_not_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BlockListFile(home / "blocked.json").add_entry(
        BlockedHost(host="h1", id="4f", reason="x", run_id="r", at=1.0, until=2.0)
    )
    assert rows(capsys) == []
    assert "h1" in blocked(capsys, "--lift", "h1", code=2)


@pytest.mark.parametrize(
    ("words", "flags"),  # those that the sentence names
    [
        (("--add", "h1"), "--add --why"),
        (("--add", "h1", "--why", " "), "--add --why"),
        (("--add", "two words", "--why", "x"), "--add"),
        (("--add", "h1", "--why", "x", "--for", "0"), "--for"),
        (("--add", "h1", "--why", "x", "--for", "nan"), "--for"),
        (("--why", "x"), "--why --for --add"),
        (("--json", "--lift", "h1"), "--json --add --lift"),
        (("--lift", "h1"), ""),
    ],
)
def test_mistakes(home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], flags: str) -> None:
    told = blocked(capsys, *words, code=2)
    assert told.startswith("holdfast blocked: ") and told.count("\n") == 1
    assert re.findall("--[a-z]+", told) == flags.split()
    assert rows(capsys) == []


def test_another_list_and_one_that_is_damaged(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = str(tmp_path / "site.json")
    blocked(capsys, "--list", site, "--add", "h1", "--why", "x")
    assert rows(capsys) == [] and [row["host"] for row in rows(capsys, "--list", site)] == ["h1"]
    Path(site).write_text("[{")
    assert site in blocked(capsys, "--list", site, code=2)
