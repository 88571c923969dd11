"""The wheel, built as it is shipped: whoever installs it has the types, and what the package reads."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_a_wheel_has_types_and_all_that_the_package_reads(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("holdfast-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    package = ROOT / "holdfast"
    there = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    read = {name for name in there if "__pycache__" not in name}
    assert "holdfast/py.typed" in inside
    assert read <= inside, sorted(read - inside)
    assert not [name for name in inside if name.startswith("tests/")]
