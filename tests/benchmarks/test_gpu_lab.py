"""`make gpu-lab` says in a sentence why it cannot run, and else runs on the Python that it is given."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Python whose torch sees a GPU or does not, and which notes how it is called for the lab itself.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit {code}
echo "$PYTHONPATH|$PATH|$*"
"""


def make_lab(folder: Path, code: int) -> "subprocess.CompletedProcess[str]":
    python = folder / "python"
    python.write_text(PYTHON.format(code=code))
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "gpu-lab", f"PYTHON={python}"]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "holdfast: the GPU lab cannot run here: {python} has no torch that sees a GPU; name one that has, as in: "
         "make gpu-lab PYTHON=/opt/venv/bin/python."),
        (0, "holdfast: build/gpu-lab is not there; fill it by 'make gpu-wheels' on a machine with a network, and bring "
         "it along."),
    ],
)  # fmt: skip
def test_why_it_cannot_run(tmp_path: Path, code: int, said: str) -> None:
    told = make_lab(tmp_path, code)
    sentence, *makes_own = told.stderr.splitlines()
    assert told.returncode == 2 and sentence == said.format(python=tmp_path / "python")
    assert len(makes_own) <= 1


def test_it_runs_on_that_python_with_what_the_folder_has(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "gpu-lab"
    folder.mkdir(parents=True)
    told = make_lab(tmp_path, 0)
    assert told.returncode == 0, told.stderr
    paths, programs, called = told.stdout.splitlines()[-1].split("|")
    assert paths.split(":") == [str(tmp_path), str(folder)]
    assert (programs.split(":")[0], called) == (f"{folder}/bin", "benchmarks/nccl.py")
