"""The benchmark of last words: sealed logs are judged from their archive, and only their totals are told."""

import json
import os
import zipfile
from pathlib import Path

import pytest
from rich.table import Table

from benchmarks import words
from benchmarks._report import Findings, report
from holdfast.logs import catalog_files

LABEL = 'class = "{}"\ngroup = "framework"\naction = "fix_config"\nsource = "secret source"\n'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB\n"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Of three logs, of which the last has a label that is wrong."""
    path = tmp_path / "sealed.zip"
    with zipfile.ZipFile(path, "w") as logs:
        for name, klass in (("secret-a", "gpu_oom"), ("secret-b", "gpu_oom"), ("secret-c", "disk_full")):
            logs.writestr(f"{name}/label.toml", LABEL.format(klass))
            logs.writestr(f"{name}/log.txt", OOM)
    return path


def test_of_sealed_logs_only_totals_are_told(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(unpacked))
    table, findings = Table("what", "measured", "goal"), Findings()
    cases = words.judge_archive(archive, catalog_files.load_failures())
    words.add_score(table, findings, "sealed", cases)
    report("words", table, findings)
    said = capsys.readouterr().out
    told = json.loads(said.splitlines()[-1])
    assert (told["figures"]["sealed_logs"], told["figures"]["sealed_klass"]) == (3, 0.6667)
    assert told["goals"] == {
        "klass of sealed": False,
        "group of sealed": True,
        "action of sealed": True,
        "evict_precision of sealed": True,
    }
    assert "sealed: klass" in said and "66.7%" in said and ">= 92%" in said
    assert not any(hidden in said for hidden in ("secret", "gpu_oom", "disk_full", "OutOfMemory"))
    assert list(unpacked.iterdir()) == []


def test_logs_that_are_not_there_are_said_to_be_skipped() -> None:
    findings = Findings()
    words.add_score(Table("what", "measured", "goal"), findings, "held", [])
    assert list(findings.skipped) == ["held"] and not findings.goals


def test_sealed_logs_are_judged_only_on_request() -> None:
    assert words.parse_flags([]).sealed is None
    assert words.parse_flags(["--sealed"]).sealed == words.SEALED
    assert words.parse_flags(["--sealed", "own.zip", "--corpus", "ours"]).sealed == Path("own.zip")


@pytest.mark.e2e
def test_a_process_is_charged_with_its_own_processor_time() -> None:
    idle = words.run_python("-c", "print('done')")
    busy = words.run_python("-c", "import time\nwhile time.process_time() < 0.5: pass")
    assert idle.printed == b"done\n"
    assert idle.cpu_s < 0.5 <= busy.cpu_s <= busy.took_s * (os.cpu_count() or 1)
    assert busy.peak_bytes > 1 << 20
