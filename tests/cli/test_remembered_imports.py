"""What a script imports is known to its next run, until it changes."""

import os
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.run_dirs.remembered_imports import FOLDER, recall_imports, remember_imports
from holdfast.wire.run_and_node_specs import EntryPoint

MODULES = ("rich", "rich.table")


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("import rich\n")
    return EntryPoint(argv=("train.py", "--steps", "5"), cwd=str(tmp_path))


def files(entry: EntryPoint) -> list[Path]:
    return [*(Path(entry.cwd) / "home" / FOLDER).iterdir()]


def test_the_same_script_has_what_it_had_whatever_its_arguments(entry: EntryPoint) -> None:
    assert recall_imports(entry) == ()
    remember_imports(entry, MODULES)
    assert recall_imports(entry) == MODULES
    assert recall_imports(msgspec.structs.replace(entry, argv=("train.py",))) == MODULES
    (Path(entry.cwd) / "eval.py").write_text("import rich\n")
    assert recall_imports(msgspec.structs.replace(entry, argv=("eval.py",))) == ()
    remember_imports(entry, MODULES[:1])
    assert recall_imports(entry) == MODULES[:1] and len(files(entry)) == 1
    assert recall_imports(msgspec.structs.replace(entry, zygote=False)) == ()


def test_a_module_is_told_from_a_script_and_by_its_folder(entry: EntryPoint, tmp_path: Path) -> None:
    module = msgspec.structs.replace(entry, argv=("train.py",), module=True)
    remember_imports(module, MODULES)
    assert recall_imports(module) == MODULES and recall_imports(entry) == ()
    assert recall_imports(msgspec.structs.replace(module, cwd=str(tmp_path / "home"))) == ()


def test_it_is_forgotten_when_the_script_changes_or_ranks_cannot_be_forked_with_it(entry: EntryPoint) -> None:
    remember_imports(entry, MODULES)
    (Path(entry.cwd) / "train.py").write_text("import torch\n")
    assert recall_imports(entry) == ()
    remember_imports(entry, MODULES)
    remember_imports(entry, ())
    assert recall_imports(entry) == () and files(entry) == []


def test_what_is_not_as_it_was_written_or_may_be_another_users_counts_for_nothing(entry: EntryPoint) -> None:
    remember_imports(entry, MODULES)
    [path] = files(entry)
    whole = path.read_text()
    for text in ("", "{", whole.replace("rich.table", "os; print(1)"), whole.replace("[", "7 [")):
        path.write_text(text)
        assert recall_imports(entry) == ()
    path.write_text(whole)
    assert recall_imports(entry) == MODULES
    os.chmod(path.parent, 0o777)
    assert recall_imports(entry) == ()


def test_a_home_that_cannot_be_written_costs_nothing(entry: EntryPoint, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    remember_imports(entry, MODULES)
    assert recall_imports(entry) == ()
