"""Releases are read before anybody runs them; nothing of them is executed for that."""

import os
import sys
from pathlib import Path

import pytest

from holdfast.agent.releases import import_check_runner
from holdfast.agent.releases.import_check_runner import check_release
from holdfast.model.code_release import Release
from holdfast.wire.releases.staged_release import StagedRelease, staged_environment
from holdfast.wire.run_and_node_specs import EntryPoint
from tests.wire.test_tree_archive import plant


async def checked(root: Path, files: dict[str, str], module: str = "", deadline_s: float = 60.0) -> tuple[str, bool]:
    plant(root / "staged", files)
    (root / "user").mkdir(exist_ok=True)
    entry = EntryPoint(argv=(module or "train.py",), module=bool(module), python=sys.executable, cwd=str(root / "user"))
    script = "" if module else "train.py"
    release = Release(number=2, digest="d", root=str(root / "user"), script=script)
    staged = StagedRelease(root=str(root / "user"), at=str(root / "staged"))
    env = staged_environment(dict(os.environ), entry, release, staged)
    return await check_release(entry, release, staged, env, deadline_s)


GOOD = {
    "train.py": """
import os, torch.distributed, json as j
import lib.model
from lib import model, layers
from lib.model import Net, helper as h, SIZE, made_later
from lib.layers import anything
from lib.open import whatever
from plain import deep
try:
    import flash_attn_of_nobody
except ImportError:
    flash_attn_of_nobody = None
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nobody.has import this
def log():
    import wandb_of_nobody
if os.environ.get("NEVER"):
    import nobody_has_this_either
import contextlib
with contextlib.suppress(ImportError):
    from lib import nothing_of_the_kind
""",
    "lib/__init__.py": "",
    "lib/model.py": "from .layers import x\nclass Net: ...\ndef helper(): global made_later\nSIZE: int = 3\n",
    "lib/layers.py": "from math import *\n",
    "lib/open.py": "def __getattr__(name): return 1\n",
    "plain/deep/inner.py": "",
    "{{template}}/broken.py": "def (:\n",
    "not-a-module.py": "def (:\n",
}


async def test_a_good_release_passes(tmp_path: Path) -> None:
    assert await checked(tmp_path, GOOD) == ("", False)
    assert not list((tmp_path / "staged").rglob("__pycache__")), "and nothing was written"


BAD = {
    "syntax": ({"train.py": "import lib\n", "lib.py": "a = 1\nif a\n"}, ("lib.py, line 2", "compile")),
    "a file that nobody imports": ({"train.py": "", "other.py": "x = (\n"}, ("other.py, line 1", "compile")),
    "compiled only": ({"train.py": "def f(): pass\nreturn 1\n"}, ("train.py, line 2", "'return'")),
    "null bytes": ({"train.py": "a = 1\0\n"}, ("train.py", "compile")),
    "module": ({"train.py": "\nimport numpyy\n"}, ("train.py, line 2", "numpyy")),
    "in a class": ({"train.py": "class A:\n    import numpyy\n"}, ("train.py, line 2", "numpyy")),
    "reached": (
        {"train.py": "from lib import a\n", "lib/__init__.py": "", "lib/a.py": "\n\nimport numpyy\n"},
        ("lib/a.py, line 3", "numpyy"),
    ),
    "within": ({"train.py": "import lib.b\n", "lib/__init__.py": ""}, ("train.py, line 1", "lib.b")),
    "of a file": ({"train.py": "import lib.b\n", "lib.py": ""}, ("train.py, line 1", "lib.b")),
    "name": (
        {"train.py": "from lib.a import Nett\n", "lib/a.py": "class Net: ...\n"},
        ("train.py, line 1", "lib/a.py has no Nett"),
    ),
    "name in a function": (
        {"train.py": "def main():\n    from lib import Nett\n", "lib.py": "Net = 1\n"},
        ("train.py, line 2", "lib.py has no Nett"),
    ),
    "relative": (
        {"train.py": "from . import lib\n", "lib.py": ""},
        ("train.py, line 1", "relative"),
    ),
    "no script": ({"other.py": ""}, ("train.py", "script")),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_one_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    files, (where, what) = BAD[name]
    fault, refused = await checked(tmp_path, files)
    assert fault.startswith(where) and what in fault and "\n" not in fault
    assert refused


async def test_what_a_check_says_that_breaks_is_masked_before_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-battery")
    (tmp_path / "reader.py").write_text(f"import os, sys\nsys.exit(os.environ['HUB_TOKEN'] + ' ' + {'x' * 290!r})\n")
    monkeypatch.setattr(import_check_runner, "READER", tmp_path / "reader.py")
    fault, refused = await checked(tmp_path, GOOD)
    assert fault.startswith("the check failed to run: ") and fault.endswith("xxx") and not refused
    assert "ery " not in fault


async def test_nothing_is_executed(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')\n"
    files = {"train.py": f"{trap}import lib.a\n", "lib/__init__.py": trap, "lib/a.py": trap, "sitecustomize.py": trap}
    assert await checked(tmp_path, files) == ("", False)
    assert not (tmp_path / "sprung").exists()


async def test_who_changes_the_path_may_import_what_we_cannot_find(tmp_path: Path) -> None:
    files = {
        "train.py": "import first\nimport vendored\nfrom lib import missing\n",
        "first.py": "import sys, os\nsys.path.insert(0, os.path.dirname(__file__) + '/third')\n",
        "third/vendored.py": "",
        "lib.py": "",
    }
    fault, refused = await checked(tmp_path, files)
    assert fault == "train.py, line 3: lib.py has no missing" and refused


HACKS = [
    "import sys\nsys.path.append('x')\n",
    "import sys\nsys.path[0:0] = ['x']\n",
    "import sys\nsys.path = ['x', *sys.path]\n",
    "import sys\nsys.path += ['x']\n",
    "import sys\nsys.meta_path.insert(0, 1)\n",
    "from sys import path\npath.append('x')\n",
    "import site\nsite.addsitedir('x')\n",
]


@pytest.mark.parametrize("hack", HACKS)
async def test_ways_to_change_the_path(tmp_path: Path, hack: str) -> None:
    assert await checked(tmp_path, {"train.py": f"{hack}import vendored\n"}) == ("", False)


async def test_to_read_the_path_is_no_change(tmp_path: Path) -> None:
    fault, refused = await checked(tmp_path, {"train.py": "import sys, vendored\nprint(sys.path[0], sys.path)\n"})
    assert fault == "train.py, line 1: there is no module vendored" and refused


async def test_modules(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/train.py": "from . import model\nfrom .model import A\n",
        "pkg/model.py": "A = 1\n",
    }
    assert await checked(tmp_path, files, "pkg.train") == ("", False)
    fault, refused = await checked(tmp_path, files, "pkg.trian")
    assert "pkg.trian" in fault and refused
    fault, refused = await checked(tmp_path, files, "pkg")
    assert "__main__" in fault and refused
    plant(tmp_path / "staged", {"pkg/model.py": "B = 1\n"})
    assert await checked(tmp_path, {}, "pkg.train") == ("pkg/train.py, line 2: pkg/model.py has no A", True)


async def test_what_cannot_be_checked_is_not_the_releases_fault(tmp_path: Path) -> None:
    fault, refused = await checked(tmp_path, {"train.py": ""}, deadline_s=0.0)
    assert "within 0 s" in fault and not refused
    entry = EntryPoint(argv=("t.py",), python="/nobody/has/this/python", cwd=str(tmp_path))
    staged = StagedRelease(root="/r", at=str(tmp_path / "staged"))
    fault, refused = await check_release(
        entry, Release(number=2, digest="d", script="train.py"), staged, dict(os.environ)
    )
    assert "/nobody/has/this/python" in fault and not refused
    program = EntryPoint(argv=("./program",), cwd=str(tmp_path))
    fault, refused = await check_release(program, Release(number=2, digest="d"), staged, {})
    assert fault and refused
