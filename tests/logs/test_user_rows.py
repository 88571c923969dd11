"""The user's own rows: checked like ours, written so that they are read again as they were, and used by the engine."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from holdfast.config import ConfigError, Settings, WordLimits, load
from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog, FailureClass
from holdfast.logs import catalog_files, regex_safety, user_rows

ROW = CatalogRow(
    klass="data_corrupt",
    pattern=r"ZorbError: frame \d+ is torn",
    weight=5,
    sample='ZorbError: frame 12 is torn: "quoted" \\ and \t more, é',
    source="ours",
    hint="read it again",
)
THEIRS = CatalogRow(klass="gpu_oom", pattern=r"Zorb\w+ memory", weight=6, sample="ZorbError memory is gone", source="x")
KNOWN = FailureCatalog(
    (THEIRS,),
    tuple(FailureClass(klass=name, group="script", action="retry", title=name) for name in ("data_corrupt", "gpu_oom")),
)


def fault(**changes: object) -> str:
    return "".join(user_rows.find_faults([msgspec.structs.replace(ROW, **changes)], KNOWN))


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "words.toml"
    assert user_rows.read_user_rows(path) == ()
    odd = msgspec.structs.replace(ROW, needle=("torn", "frame"), raised="Zorb.*", role="echo", samples=("a", "b"))
    user_rows.add_rows([ROW], path)
    path.write_text("# mine\n" + path.read_text())
    user_rows.add_rows([odd], path)
    assert user_rows.read_user_rows(path) == (ROW, odd)
    assert path.read_text().startswith("# mine\n")
    assert [p.name for p in path.parent.iterdir()] == ["words.toml"]


def test_a_good_row() -> None:
    assert fault() == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"klass": "zorb"}, ": zorb"),
        ({"pattern": ""}, user_rows.INCOMPLETE),
        ({"sample": ""}, user_rows.INCOMPLETE),
        ({"sample": "nothing of the kind"}, user_rows.UNMATCHED),
        ({"samples": ("nothing of the kind",)}, user_rows.UNMATCHED),
        ({"weight": 10}, "weight 10"),
        ({"pattern": "(Z+)+"}, regex_safety.EXPLOSIVE),
        ({"pattern": r"[\w ]{4}"}, user_rows.UNUSABLE),
        ({"raised": "("}, user_rows.UNUSABLE),
        ({"pattern": r"\w+Error: "}, user_rows.MEANINGLESS),
        ({"weight": 6, "sample": "ZorbError: frame 1 is torn, Zorblax memory"}, "gpu_oom"),
        ({"weight": 7, "pattern": "ZorbError", "sample": "ZorbError"}, "gpu_oom data_corrupt: "),
    ],
)
def test_rows_that_are_refused(changes: dict[str, object], why: str) -> None:
    assert why in fault(**changes)


def test_a_row_for_an_exit_code() -> None:
    row = CatalogRow(klass="data_corrupt", code=55, source="our loader")
    assert not list(user_rows.find_faults([row], KNOWN))
    [said] = user_rows.find_faults([row, msgspec.structs.replace(row, klass="gpu_oom")], KNOWN)
    assert "'55'" in said and "data_corrupt" in said


def test_rows_of_one_file_are_held_against_each_other() -> None:
    twin = msgspec.structs.replace(ROW, klass="gpu_oom")
    [said] = user_rows.find_faults([ROW, twin], KNOWN)
    assert ROW.klass in said


def test_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert user_rows.user_rows_path(WordLimits()) == tmp_path / "words.toml"
    monkeypatch.delenv("HOLDFAST_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_rows.user_rows_path(WordLimits()) == tmp_path / "holdfast" / "words.toml"
    assert user_rows.user_rows_path(WordLimits(catalog="/x/y.toml")) == Path("/x/y.toml")


def test_the_engine_knows_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    user_rows.add_rows([ROW], user_rows.user_rows_path(WordLimits()))
    assert catalog_files.load_failures(WordLimits()).rows[-1] == ROW
    assert ROW not in catalog_files.load_failures().rows
    catalog_files.check_catalogs(Settings())


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    given = WordLimits(catalog=str(path))
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOENT)):
        catalog_files.load_failures(given)
    for text, why in (
        ("[[row", "end of document"),
        ("[[row]]\nklass = 'gpu_oom'\n", "missing required field"),
        (user_rows.format_row(msgspec.structs.replace(ROW, pattern="(a+)+")), regex_safety.EXPLOSIVE),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            catalog_files.check_catalogs(load(None, [("words.catalog", str(path))]))


def test_proposals_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    name = user_rows.propose_row(ROW, path)
    assert user_rows.propose_row(ROW, path) == name
    assert user_rows.read_user_rows(user_rows.list_proposals(path)[name]) == (ROW,)
    monkeypatch.setattr(user_rows, "_PROPOSED", 1)
    with pytest.raises(ConfigError, match="1 proposals"):
        user_rows.propose_row(THEIRS, path)
