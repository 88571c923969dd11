"""Ranks that are executed and not forked: their scripts cannot tell, and how they end is known."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.client.boot import executed_rank
from holdfast.wire.rank_memory.slot_reader import read_slot
from tests.client.conftest import ENV, Ended, Rank, fresh
from tests.client.test_script_runner import CHILDREN, PACKAGE, SAME

NAMES = (
    *("argv", "main", "globals", "path", "environment", "neighbour", "command line", "environ file", "files"),
    *("return", "exception", "syntax", "exit number", "exit text", "interrupt", "terminated", "excepthook", "pickle"),
)


def run(cwd: Path, *argv: str, module: bool = False, **env: str) -> Ended:
    """As an agent has it executed."""
    folder = cwd / "executed"
    folder.mkdir()
    words = (str(cwd) if module else executed_rank.SCRIPT, *argv)
    command = [sys.executable, "-u", executed_rank.__file__, *words]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        started = subprocess.Popen(
            command, stdin=-3, stdout=out, stderr=err, env=ENV | env, cwd=cwd, start_new_session=True
        )
    return Rank("", started.pid, folder).ended(started.wait(timeout=60))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_in_a_fresh_interpreter(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(SAME[name])
    (tmp_path / "neighbour.py").write_text("x = 1")
    words = ("script.py", "--lr", "é 1", "")
    assert run(tmp_path, *words, EXTRA="1") == fresh(tmp_path, *words, EXTRA="1")


@pytest.mark.parametrize("argv", [["pack"], ["pack", "failing"], ["nothing"]])
def test_the_same_with_modules(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in (("__init__", ""), ("__main__", PACKAGE), ("part", "print(__name__)")):
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    assert run(tmp_path, *argv, module=True) == fresh(tmp_path, *argv, module=True)


def test_its_children(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    said = run(tmp_path, "script.py", "spawn")
    assert said.code == 0 and said == fresh(tmp_path, "script.py", "spawn")


def test_files_of_any_name_beside_the_script(tmp_path: Path) -> None:
    for name in ("json", "pkgutil", "traceback", "msgspec", "zygote", "main"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'my {name}'")
    (tmp_path / "script.py").write_text(
        "import json, pkgutil, traceback, msgspec, zygote, main, holdfast\n"
        "print([m.NAME for m in (json, pkgutil, traceback, msgspec, zygote, main)], holdfast.step(1))"
    )
    said = run(tmp_path, "script.py")
    names = [f"my {name}" for name in ("json", "pkgutil", "traceback", "msgspec", "zygote", "main")]
    assert said.out == f"{names} None\n", said


AGAIN = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
GROUP = f"import os, holdfast, torch.distributed as dist; holdfast.step(4); {AGAIN}"


@pytest.mark.parametrize(
    ("script", "words", "ending"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3", ""),
        ("raise ValueError('no')", "ValueError: no", ""),
        ("pass", "", "returned"),
        ("import holdfast; holdfast.step(4)", "", "returned"),
        ("import holdfast; holdfast.step(4); raise KeyError(1)", "KeyError: 1", ""),
        (f"{GROUP}; dist.destroy_process_group(); os._exit(0)", "", "parted"),
        pytest.param(
            f"{GROUP}; dist.destroy_process_group(dist.new_group()); os._exit(0)", "", "", marks=pytest.mark.slow
        ),
        pytest.param(f"{GROUP}; dist.destroy_process_group(); {AGAIN}; os._exit(0)", "", "", marks=pytest.mark.slow),
    ],
)
def test_how_it_ended_is_known(
    tmp_path: Path, arena: tuple[str, mmap.mmap], script: str, words: str, ending: str
) -> None:
    (tmp_path / "script.py").write_text(script)
    run(tmp_path, "script.py", HOLDFAST_SLOT=f"{arena[0]}:0")
    now = read_slot(arena[1], 0)
    assert now and (now.failure if now.failed else "", now.ending) == (words, ending)
    assert now.step == (4 if "step" in script else -1)
