"""What a script imports up to its first step is noted, and nothing of its own tree."""

import json
import sys
from pathlib import Path

import pytest

from holdfast.client.boot.import_recorder import library_roots
from tests.client.conftest import Zygote

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


def test_nobody_asked(bare: Zygote) -> None:
    (bare.folder / "silent.py").write_text("import holdfast\nholdfast.step(1)\n")
    assert bare.run("silent.py").code == 0
    assert not (bare.folder / "imports.json").exists()


def test_libraries_of_a_base_environment_are_installed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `venv --system-site-packages`, or with pip install --user."""
    base, own = tmp_path / "base" / "site-packages", tmp_path / "project"
    monkeypatch.setattr(sys, "path", [str(own), *sys.path, str(base)])
    assert str(base) in library_roots() and str(own) not in library_roots()
