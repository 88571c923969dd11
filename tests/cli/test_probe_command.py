"""`holdfast probe` by hand: lines, a table, JSON, golden rows, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.commands.probe_command import main
from holdfast.core.diagnose.probe_assessment import assess_probes
from holdfast.logs import golden_probe_digests
from holdfast.model.probe_findings import Finding
from tests.agent.probes import faults
from tests.agent.test_site_test import SICK


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("only", "count"), [("clock,disk", 2), pytest.param("clock,disk,gemm", 4, marks=pytest.mark.slow)]
)
def test_a_line_for_each_finding_and_a_table(tmp_path: Path, only: str, count: int) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "probe", "--only", only, "--budget", "5"]
    ran = subprocess.run([*command, "--where", str(tmp_path)], capture_output=True, text=True, timeout=170, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].split()[:2] == ["clock:", "ok,"]
    assert count == 2 or lines[2].split()[:5] == ["gemm", "cpu", "float32", "256:", "ok,"]
    assert lines[count].split() == "level probe on form verdict value bits took".split()
    assert re.findall(r"\d+", lines[-1])[:2] == [str(count), "0"], "findings, and how many failed"


@pytest.mark.e2e
@pytest.mark.slow
def test_what_failed_is_told_with_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in faults.spoil(tmp_path, faults.ALWAYS).items():
        monkeypatch.setenv(name, value)
    assert main(["--only", "gemm", "--json", "--budget", "5"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and "gemm" in told["reason"]
    assert [f["ok"] for f in told["findings"]] == [False, False]


@pytest.mark.e2e
def test_a_test_of_ones_own_is_a_finding_like_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--only", "clock", "--budget", "5", "--where", str(tmp_path)]
    assert main([*flags, "--json", "--command", f"echo $HOLDFAST_PROBE_LEVEL > {tmp_path}/level; {SICK}"]) == 1
    assert (tmp_path / "level").read_text().strip() == "1", "it runs by hand at any level"
    told = json.loads(capsys.readouterr().out)
    assert [(f["probe"], f["ok"]) for f in told["findings"]] == [("clock", True), ("command", False)]
    assert not told["ok"] and "gpu 3: targeted stress: FAIL" in told["reason"]
    assert main([*flags, "--command", "sleep 1000", "--command-s", "0.5"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "command", "FAILED"] in [row[:3] for row in rows]


@pytest.mark.slow
@pytest.mark.e2e
def test_golden_rows_are_what_the_judge_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--golden", "--only", "gemm_bits", "--budget", "5"]) == 0
    rows = golden_probe_digests.load_golden(capsys.readouterr().out)
    assert len(rows) == 2
    assert main(["--only", "gemm_bits", "--json", "--budget", "5"]) == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out)["findings"], list[Finding])
    assert not assess_probes({"n": found}, rows).bad
    spoiled = [msgspec.structs.replace(f, digest="0") for f in found]
    bad = assess_probes({"n": spoiled}, rows).bad
    assert bad.keys() == {"n"} and "golden" in bad["n"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "nothing"],
        ["--level", "4"],
        ["--repeats", "0"],
        ["--budget", "-1"],
        ["--where", "/nowhere/at/all"],
        ["--command-s", "0"],
    ],
)
def test_a_wrong_command_line_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert capsys.readouterr().err.startswith("holdfast probe: ")


def test_our_golden_rows_can_be_read() -> None:
    assert all(len(digest) == 32 for digest in golden_probe_digests.load_golden().values())
    row = 'probe = "a"\ndevice = "b"\ntorch = "c"\nform = "d"\ndigest = "e"\nsource = "f"\n'
    with pytest.raises(ValueError, match=r"golden\.toml"):
        golden_probe_digests.load_golden(f"[[row]]\n{row}[[row]]\n{row}")
