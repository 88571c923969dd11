"""Ranks that a zygote forks for a release, and what they import."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import ENV, Ended, Zygote
from tests.wire.test_tree_archive import plant

pytestmark = pytest.mark.e2e

SHOW = "import sys, os, part, lib.deep\nprint(part.NAME, lib.deep.NAME, __file__, sys.path[0], os.getcwd(), sys.argv)\n"


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """The user's tree, and the copy of a newer release."""
    for name in ("user", "copy"):
        files = {"run/job.py": SHOW, "run/part.py": f"NAME = '{name} part'", "src/lib/deep.py": f"NAME = '{name} lib'"}
        plant(tmp_path / name, files)
    return tmp_path / "user", tmp_path / "copy"


def staged(zygote: Zygote, argv: list[str], trees: tuple[Path, Path], **more: Any) -> Ended:
    user, copy = trees
    folder = zygote.folder / "rank"
    folder.mkdir()
    fork = {"key": "k", "argv": argv, "module": False, "env": zygote.env, "cwd": str(user)}
    fork |= {"stdout": str(folder / "out"), "stderr": str(folder / "err"), "root": str(user), "staged": str(copy)}
    zygote.tell(fork | more)
    zygote.hear_of("pid")
    code = zygote.hear_of("code")["code"]
    return Ended(code, (folder / "out").read_text(), (folder / "err").read_text())


def test_a_script_and_its_modules_come_from_the_copy(tmp_path: Path, trees: tuple[Path, Path]) -> None:
    user, copy = trees
    env = ENV | {"PYTHONPATH": f"{ENV['PYTHONPATH']}:{user}/src:{user}/run"}
    zygote = Zygote(("part",), tmp_path, env)  # preloaded from the user's tree, which has changed since
    assert zygote.warm["skipped"] == []
    ended = staged(zygote, [f"{copy}/run/job.py", "a"], trees)
    zygote.close()
    assert ended.err == ""
    assert ended.out.split(" ", 4)[:4] == ["copy", "part", "copy", "lib"]
    assert ended.out.endswith(f"{copy}/run/job.py {copy}/run {user} ['{copy}/run/job.py', 'a']\n")


def test_a_module_too(tmp_path: Path, trees: tuple[Path, Path]) -> None:
    copy = trees[1]
    plant(copy, {"run/pkg/__init__.py": "", "run/pkg/train.py": "import part, sys\nprint(part.NAME, sys.path[0])\n"})
    zygote = Zygote((), tmp_path)
    ended = staged(zygote, ["pkg.train"], trees, module=True, path=f"{copy}/run")
    zygote.close()
    assert ended.out == f"copy part {copy}/run\n", ended.err


FAILING = """import inspect, part
def outer():
    part.fail()  # of the copy
print(part.__file__, inspect.getsource(part.fail).splitlines()[-1].strip(), inspect.getsourcefile(outer))
outer()
"""
FAIL = "def fail():\n    raise ValueError('no')  # of the copy\n"


@pytest.mark.parametrize("compiled", [False, True])
def test_tracebacks_name_the_file_that_the_user_edits(tmp_path: Path, trees: tuple[Path, Path], compiled: bool) -> None:
    user, copy = trees
    plant(copy, {"run/job.py": FAILING, "run/part.py": FAIL, "run/pkg/__main__.py": "import part\npart.fail()\n"})
    plant(user, {"run/job.py": "# edited\n" * 9, "run/part.py": "# edited\n" * 9})
    if compiled:
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(copy)], check=True)
    with contextlib.closing(Zygote((), tmp_path)) as zygote:
        ended = staged(zygote, [f"{copy}/run/job.py"], trees)
        shutil.rmtree(zygote.folder / "rank")
        module = staged(zygote, ["pkg"], trees, module=True, path=f"{copy}/run")
    assert f'File "{user}/run/pkg/__main__.py", line 2, in <module>' in module.err
    assert ended.out == f"{copy}/run/part.py raise ValueError('no')  # of the copy {user}/run/job.py\n"
    assert ended.err.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{user}/run/job.py", line 5, in <module>',
        "    outer()",
        f'  File "{user}/run/job.py", line 3, in outer',
        "    part.fail()  # of the copy",
        "    ^^^^^^^^^^^",
        f'  File "{user}/run/part.py", line 2, in fail',
        "    raise ValueError('no')  # of the copy",
        "    ^^^^^^^^^^^^^^^^^^^^^^",
        "ValueError: no",
    ]


FINDER = """
import sys, importlib.util
MAPPING = {"lib": %r}
class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            at = MAPPING[name]
            return importlib.util.spec_from_file_location(name, at + "/__init__.py", submodule_search_locations=[at])
sys.meta_path.append(_EditableFinder)
"""

MOVE = """
import sys
import finder
from holdfast.client.boot.release_import_paths import move_imports, find_strays
from holdfast.wire.releases.staged_release import StagedRelease
move_imports(StagedRelease(root=sys.argv[1], at=sys.argv[2]), find_strays())
import lib.deep
print(lib.deep.NAME)
"""


def test_packages_that_are_installed_in_place(tmp_path: Path, trees: tuple[Path, Path]) -> None:
    user, copy = trees
    for tree in trees:
        plant(tree, {"src/lib/__init__.py": ""})
    (tmp_path / "finder.py").write_text(FINDER.replace("%r", repr(str(user / "src/lib"))))
    env = ENV | {"PYTHONPATH": f"{ENV['PYTHONPATH']}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", MOVE, str(user), str(copy)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "copy lib\n"
