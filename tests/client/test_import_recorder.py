"""What a script imports up to its first step is noted, and nothing of its own tree."""

import json
import sys
from pathlib import Path

import pytest

from holdfast.client.boot.import_recorder import library_roots
from tests.client.conftest import ENV, ROOT, Zygote

pytestmark = pytest.mark.e2e

SCRIPT = """
import sys
import own_module, colorsys, wave
import holdfast
from holdfast.logs import secret_masking
holdfast.step(1)
import plistlib
holdfast.step(2)
"""


def test_installed_modules_up_to_the_first_step(bare: Zygote, arena: tuple[str, object]) -> None:
    (bare.folder / "own_module.py").write_text("")
    (bare.folder / "importing.py").write_text(SCRIPT)
    noted = bare.folder / "imports.json"
    slot = f"{arena[0]}:1"
    ended = bare.run("importing.py", HOLDFAST_SLOT=slot, HOLDFAST_GENERATION="2", RANK="0", HOLDFAST_IMPORTS=str(noted))
    assert ended.code == 0, ended.err
    names = json.loads(noted.read_text())
    assert {"colorsys", "wave", "holdfast.logs.secret_masking"} <= set(names)
    assert not {"own_module", "plistlib", "__main__"} & set(names)
    noted.unlink()


CHANGING = """
import os, sys
import colorsys
sys.path.insert(0, "site-packages")
import setter, wave
os.environ.setdefault("CHOSEN_BY_THE_SCRIPT", "1")
import plistlib
import holdfast
holdfast.step(1)
"""


def test_what_may_depend_on_a_change_of_the_environment_is_not_noted(bare: Zygote, arena: tuple[str, object]) -> None:
    """The zygote would import it without that change; what an import itself changes is no such thing."""
    (bare.folder / "site-packages").mkdir()
    (bare.folder / "site-packages" / "setter.py").write_text("import os\nos.environ['SET_BY_AN_IMPORT'] = '1'\n")
    (bare.folder / "changing.py").write_text(CHANGING)
    noted = bare.folder / "changing.json"
    slot = f"{arena[0]}:1"
    ended = bare.run("changing.py", HOLDFAST_SLOT=slot, HOLDFAST_GENERATION="1", RANK="0", HOLDFAST_IMPORTS=str(noted))
    assert ended.code == 0, ended.err
    names = set(json.loads(noted.read_text()))
    assert {"colorsys", "setter", "wave"} <= names and "plistlib" not in names


def test_what_an_import_sets_is_set_in_ranks(tmp_path: Path) -> None:
    (tmp_path / "setter.py").write_text("import os\nos.environ['SET_BY_AN_IMPORT'] = '1'\n")
    (tmp_path / "look.py").write_text("import os; print(os.environ.get('SET_BY_AN_IMPORT'))")
    zygote = Zygote(("setter",), tmp_path, ENV | {"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    told = [zygote.run("look.py").out, zygote.run("look.py", SET_BY_AN_IMPORT="0").out]
    zygote.close()
    assert told == ["1\n", "0\n"]


def test_nobody_asked(bare: Zygote) -> None:
    (bare.folder / "silent.py").write_text("import holdfast\nholdfast.step(1)\n")
    assert bare.run("silent.py").code == 0
    assert not (bare.folder / "imports.json").exists()


def test_libraries_of_a_base_environment_are_installed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `venv --system-site-packages`, or with pip install --user."""
    base, own = tmp_path / "base" / "site-packages", tmp_path / "project"
    monkeypatch.setattr(sys, "path", [str(own), *sys.path, str(base)])
    assert str(base) in library_roots() and str(own) not in library_roots()
