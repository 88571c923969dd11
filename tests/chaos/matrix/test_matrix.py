"""Cells on a real job: what happens most, in one job of DDP; results are kept, and cells that passed are left out."""

from pathlib import Path

import pytest

from holdfast.chaos.matrix import cells, faults_page
from holdfast.chaos.matrix.__main__ import CellResult, choose_together, main, read_results
from holdfast.chaos.matrix.cells import QUICK, MatrixCell, all_cells, choose_cells
from holdfast.chaos.matrix.expectations import CellOutcome, load_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_the_cells_that_happen_most_are_as_expected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "chaos.jsonl"
    asked = ["run", "--cells", "quick", "--results", str(results), "--folder", str(tmp_path)]
    code = main(asked)
    said = capfd.readouterr().out
    assert code == 0, said
    found = read_results(results)
    assert {one.cell for one in found} == {cell.name for cell in QUICK}
    assert all(one.ok and one.commit and one.came.compared for one in found), said
    assert main(asked) == 0
    assert "0 cells" in capfd.readouterr().out, "what has been played is not played again"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "cells",
    [
        ["rank.slow/pp/idle", "snapshot.flip/pp/restoring", "loss.nan/pp/idle"],
        ["release.late/fsdp/idle", "rank.kill/fsdp/updating"],
        ["storage.hang/ddp/idle"],
        ["disk.full/ddp/idle", "disk.readonly/ddp/saving"],
        ["link.cut/ddp/idle"],
    ],
    ids=["processes", "releases", "storage", "disks", "hosts"],
)
def test_some_of_every_stage(tmp_path: Path, capfd: pytest.CaptureFixture[str], cells: list[str]) -> None:
    """What stages do that others do not; `make chaos` plays all cells."""
    asked = ["run", "--cells", *cells, "--results", str(tmp_path / "chaos.jsonl"), "--folder", str(tmp_path)]
    assert main(asked) == 0, capfd.readouterr().out


def test_no_fault_strikes_a_job_twice() -> None:
    rows, left, jobs = load_rows(), [cell for cell in all_cells() if cell.how == "ddp"], []
    while left:
        jobs.append(choose_together(left, rows))
        left = [cell for cell in left if cell not in jobs[-1]]
    assert sorted(cell for job in jobs for cell in job) == sorted(cell for cell in all_cells() if cell.how == "ddp")
    assert all(len({cell.strike for cell in job}) == len(job) for job in jobs)
    mixed = choose_cells(
        ["bits.all_reduce.mantissa/ddp", "node.kill/ddp/idle", "rank.kill/ddp/idle", "rank.segv/ddp/idle"]
    )
    played = [cell.strike for cell in choose_together([*mixed, MatrixCell("rank.kill", "ddp", "saving")], rows)]
    assert played == ["rank.kill", "node.kill", "rank.segv", "bits.all_reduce.mantissa"]
    blind = choose_cells(["bits.all_reduce.mantissa/fsdp", "bits.weights.mantissa/fsdp", "rank.kill/fsdp/idle"])
    played = [cell.strike for cell in choose_together(blind, rows)]
    assert played == ["rank.kill", "bits.all_reduce.mantissa"], "of a second one nobody could tell what it has spoilt"


def test_an_unknown_cell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--cells", "rank.vex"]) == 2
    assert "rank.kill/ddp/idle" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["-1", "0", "nan", "soon"])
def test_minutes_are_a_number_above_zero(minutes: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", f"--minutes={minutes}"])
    assert ended.value.code == 2


def test_results_that_are_none_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.chaos.matrix.__main__.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    broken, empty = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl"
    broken.write_text('{"cell": "rank.kill/ddp/idle"}\n')
    empty.touch()
    for what, path, words in (
        ("table", tmp_path / "typo.jsonl", "typo.jsonl cannot be read: No such file"),
        ("table", tmp_path, "cannot be read: Is a directory"),
        ("table", broken, "line 1 of"),
        ("table", empty, "holds no results; play some cells first"),
        ("run", tmp_path, "Is a directory"),
        ("run", broken, "line 1 of"),
    ):
        assert main([what, "--results", str(path)]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said
    assert list((tmp_path / "docs").iterdir()) == [], "no page was written"


def test_the_table_shows_what_came() -> None:
    def line(cell: str, *wrong: str, skipped: str = "") -> CellResult:
        came = CellOutcome(skipped=skipped)
        return CellResult(cell=cell, commit="abc", at="today", ok=not wrong, wrong=wrong, came=came, took_s=1.0)

    lines = [line("rank.kill/ddp/idle"), line("rank.kill/fsdp/saving", "2 restarts, not 1")]
    page = faults_page.render_page(load_rows(), [*lines, line("clock.jump/ddp/idle", skipped="nobody may")])
    text = " ".join(page.split())  # its lines are wrapped
    assert "1 of 2 cells" in text and ": clock.jump/ddp/idle." in text
    assert "| `rank.kill` | + | . | . | . | . | - |" in page
    assert "| `clock.jump` | s |  |  |  | . |" in page
    assert "| `link.cut` | . | . | . | . |" in page, "a link may be cut at any moment"
    assert "| rank.kill/fsdp/saving | abc | today | 2 restarts, not 1 |" in page
    blind = [row.why for row in load_rows() if row.oracle == "blind"]
    assert blind and all(f"**blind**: {why}" in page for why in blind)
    assert "link.cut" not in faults_page._left_out_text()
    assert f"`release.late`: {cells._UPDATE}" in text
