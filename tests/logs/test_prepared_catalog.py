"""Rows prepared beforehand are those of the TOML files, and are ignored when they are not."""

from pathlib import Path

import pytest

from holdfast.core.log_analysis.failure_catalog import CatalogRow
from holdfast.logs import catalog_files, prepared_catalog
from tests.prepared_rows import render_rows

SOURCES = {"one.toml": b"a", "two.toml": b"b"}
ROWS = (
    CatalogRow(klass="gpu_oom", pattern="(?i)out of memory|Größe 7 zählt", samples=("out of memory", "x"), source="us"),
    CatalogRow(klass="gpu_oom", pattern=r"\d+", needle=("Xid 7", "Xid"), source="us"),
    CatalogRow(klass="host_oom_kill", code=-9, source="us"),
)


def test_the_file_in_the_package_is_of_today() -> None:
    written = (catalog_files.WORDS / prepared_catalog.NAME).read_bytes()
    assert written == render_rows(), "rows have changed: python -m tests.prepared_rows"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / prepared_catalog.NAME).write_bytes(prepared_catalog.format_prepared(SOURCES, ROWS))
    found = prepared_catalog.read_prepared(tmp_path, SOURCES)
    assert found == [prepared_catalog.prepare_row(row) for row in ROWS]
    assert [one.row for one in found] == list(ROWS)
    assert [tuple(part.literals for part in one.alternatives) for one in found] == [
        (("out of memory",), ("größe  zählt",)),
        (("xid ", "xid"),),
        (),
    ]


@pytest.mark.parametrize(
    "sources", [{"one.toml": b"a", "two.toml": b"B"}, {"one.toml": b"a"}, {**SOURCES, "three.toml": b""}]
)
def test_rows_made_from_other_files_are_ignored(tmp_path: Path, sources: dict[str, bytes]) -> None:
    (tmp_path / prepared_catalog.NAME).write_bytes(prepared_catalog.format_prepared(SOURCES, ROWS))
    assert prepared_catalog.read_prepared(tmp_path, sources) is None


@pytest.mark.parametrize("keep", [0, 5, -40, -2])
def test_a_file_that_is_cut_is_ignored(tmp_path: Path, keep: int) -> None:
    assert prepared_catalog.read_prepared(tmp_path, SOURCES) is None, "there is none"
    (tmp_path / prepared_catalog.NAME).write_bytes(prepared_catalog.format_prepared(SOURCES, ROWS)[:keep])
    assert prepared_catalog.read_prepared(tmp_path, SOURCES) is None


def test_the_catalog_is_the_same_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = catalog_files.load_failures()
    monkeypatch.setattr(prepared_catalog, "NAME", "nowhere.json")
    catalog_files.load_built_in.cache_clear()
    live = catalog_files.load_failures()
    catalog_files.load_built_in.cache_clear()
    assert live is not prepared and live.rows == prepared.rows
    assert [(part.row, part.needles, part.anchored) for part in live.known] == [
        (part.row, part.needles, part.anchored) for part in prepared.known
    ]
