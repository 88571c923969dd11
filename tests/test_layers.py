"""Holds the layers: who may import whom, in no circle, who may touch the world, and where torch may be imported."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import look

ROOT = Path(__file__).parents[1]

# Import only to the left; those of one place do not import one another. A new package gets its place here.
LINE = (
    "model <- core <- decoding <- controller_interfaces config linux <- logs journal wire <- checkpoint"
    " <- client agent controller fleet sim chaos dash <- cli"
)
PURE = {"model", "core"}
WORLD = {"time", "random", "os", "io", "logging", "asyncio", "threading", "subprocess"}
WORLD |= {"datetime", "secrets", "uuid", "socket", "multiprocessing", "concurrent", "importlib"}  # by another door
OURS = {"holdfast", "msgspec"}
TORCH = (
    "client/",
    "checkpoint/state_image.py",
    "checkpoint/dcp/",
    "checkpoint/trainer_checkpoint_export/",
    "agent/probes/",
    "chaos/inrank/",
    "trainers/",
)


def allowed() -> dict[str, set[str]]:
    """For every place, the places it may import from."""
    may: dict[str, set[str]] = {"__init__": {"client"}, "__main__": {"cli"}}
    may["trainers"] = {"__init__", "core", "decoding", "client", "checkpoint", "wire", "trainers"}  # nothing imports it
    left: set[str] = set()
    for place in LINE.split(" <- "):
        may |= {name: left | {name} for name in place.split()}
        left |= set(place.split())
    may["cli"].add("__init__")
    return may


def imports(path: Path, root: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted target of every import in a file: nested, guarded and relative ones too."""
    here = ["holdfast", *path.relative_to(root).parts[:-1]]
    for line, level, names in look(path.read_text()).imports:
        start = here[: len(here) - level + 1] if level else []
        yield line, [*start, *names]


def faults(root: Path) -> Iterator[str]:
    """Every breach of the layers in the package at `root`."""
    may = allowed()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).as_posix()
        place = inside.split("/")[0].removesuffix(".py")
        if place not in may:
            yield f"{inside}: {place} has no place in the line of layers"
            continue
        for line, (top, *rest) in imports(path, root):
            to = rest[0] if rest and rest[0] in may else "__init__"
            rightward = top == "holdfast" and to not in may[place]
            torch = top == "torch" and not inside.startswith(TORCH)
            impure = place in PURE and (top in WORLD or top not in OURS | sys.stdlib_module_names)
            if rightward or torch or impure:
                yield f"{inside}:{line}: {place} may not import {'.'.join([top, *rest])}"


def arrows(root: Path) -> dict[str, set[str]]:
    """For every module of the package at `root`, by its dotted path there, the modules that it imports."""
    paths = {path.relative_to(root).with_suffix("").parts: path for path in sorted(root.rglob("*.py"))}
    modules = {parts[: len(parts) - (parts[-1] == "__init__")]: path for parts, path in paths.items()}
    found: dict[str, set[str]] = {".".join(module): set() for module in modules}
    for module, path in modules.items():
        for _, (top, *rest) in imports(path, root):
            while top == "holdfast" and rest and tuple(rest) not in modules:
                rest.pop()  # what is left of a name in a module is the module
            if top == "holdfast" and tuple(rest) in modules and tuple(rest) != module:
                found[".".join(module)].add(".".join(rest))
    return found


def room_arrows(between: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same between rooms: a room is a folder in a package, with all that lies in it, or a file beside it."""
    found: dict[str, set[str]] = {}
    for module, targets in between.items():
        room = found.setdefault(room_of(module), set())
        room |= {room_of(target) for target in targets} - {room_of(module)}
    return found


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def circle(between: Mapping[str, set[str]]) -> str:
    """One circle among the arrows, in words; empty if there is none."""
    try:
        TopologicalSorter(between).prepare()
    except CycleError as e:
        return " imports ".join(reversed(e.args[1]))
    return ""


def test_layers() -> None:
    assert not list(faults(ROOT / "holdfast"))


def test_no_circle_between_modules_or_rooms() -> None:
    found = arrows(ROOT / "holdfast")
    assert not circle(room_arrows(found))
    assert not circle(found)


def test_the_rest_starts_without_torch() -> None:
    # What no import statement shows: a package initialiser or a third library that pulls torch in.
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for place in ("agent", "controller", "fleet", "sim", "dash", "cli")
        for path in (ROOT / "holdfast" / place).rglob("*.py")
        if "probes" not in path.parts and path.name != "__main__.py"
    ]
    assert names
    load = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code = load + "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, check=True, timeout=60)


CIRCLES = (
    {"core/a.py": "from holdfast.core import b", "core/b.py": "from .a import A"},
    {"core/a.py": "if TYPE_CHECKING:\n    from .b import B", "core/b.py": "def f():\n    from . import a"},
    {"core/a/__init__.py": "import holdfast.core.b as b", "core/b.py": "from .a import name"},
)
ROOM_CIRCLE = {
    "core/x/a.py": "from ..y import b",
    "core/y/b.py": "",
    "core/y/c.py": "from holdfast.core.x.d import D",
    "core/x/d.py": "",
}


@pytest.mark.parametrize("files", CIRCLES)
def test_a_circle_is_seen(tmp_path: Path, files: dict[str, str]) -> None:
    plant(tmp_path, files)
    assert set(circle(arrows(tmp_path)).split(" imports ")) == {"core.a", "core.b"}


def test_a_circle_of_rooms_is_seen_where_no_files_form_one(tmp_path: Path) -> None:
    plant(tmp_path, ROOM_CIRCLE)
    assert not circle(arrows(tmp_path))
    assert set(circle(room_arrows(arrows(tmp_path))).split(" imports ")) == {"core.x", "core.y"}


BAD = {
    "core/a.py": "import time",
    "core/b.py": "def f():\n    from datetime import datetime",
    "core/c.py": "import numpy",
    "core/detect/d.py": "from ...agent import ranks",
    "core/e.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import holdfast.wire.beat",
    "model/f.py": "from holdfast import core",
    "model/g.py": "import holdfast",
    "wire/h.py": "from ..journal import sqlite",
    "sim/i.py": "import holdfast.chaos as chaos",
    "agent/j.py": "import torch.distributed",
    "checkpoint/k.py": "import os, torch",
    "stray/l.py": "",
    "trainers/m.py": "from holdfast.agent import ranks",
    "client/n.py": "import holdfast.trainers.lightning",
    "__init__.py": "from . import agent",
}
GOOD = {
    "core/a.py": "import math, msgspec\nfrom ..model import ids\nfrom . import plan",
    "core/detect/__init__.py": "from . import crash\nfrom .. import plan\nfrom holdfast.core.detect.crash import Crash",
    "config.py": "import tomllib, os\nfrom .core import plan",
    "agent/probes/exact_gemm.py": "import torch",
    "checkpoint/state_image.py": "from torch import Tensor\nfrom ..wire import beat",
    "client/b.py": "import torch\nfrom holdfast.checkpoint.arena import Arena",
    "cli/commands/run_command.py": "import holdfast\nfrom ..agent import ranks\nfrom holdfast.fleet import pod_table",
    "trainers/a.py": "import holdfast, torch\nfrom holdfast.client import step",
    "__init__.py": "from holdfast.client import step",
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_bad_tree_is_seen(tmp_path: Path) -> None:
    plant(tmp_path, BAD)
    assert sorted({fault.split(":")[0] for fault in faults(tmp_path)}) == sorted(BAD)


def test_a_good_tree_passes(tmp_path: Path) -> None:
    plant(tmp_path, GOOD)
    assert list(faults(tmp_path)) == []
