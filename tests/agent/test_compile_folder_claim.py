"""Torch's folder for compiled code is this user's own, or ranks are given another: they execute what is there."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.rank.compile_folder_claim import claim_compile_folder
from tests.conftest import job_environment

NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def claimed(shared: Path, **env: str) -> dict[str, str]:
    given = {"TMPDIR": str(shared), "USER": "ann", **env}
    claim_compile_folder(given)
    return given


def test_it_is_made_before_anybody_else_makes_it(shared: Path) -> None:
    assert claimed(shared) == {"TMPDIR": str(shared), "USER": "ann"}
    assert stat.S_IMODE((shared / "torchinductor_ann").stat().st_mode) == 0o700
    assert claimed(shared)["TMPDIR"] == str(shared), "the next node finds it"


def test_one_that_torch_has_made_stays_in_use(shared: Path) -> None:
    """By a usual umask, or that of systems where everybody has a group of his own."""
    (shared / "torchinductor_ann").mkdir(mode=0o755)
    assert claimed(shared)["TMPDIR"] == str(shared)
    (shared / "elsewhere").mkdir()
    (shared / "torchinductor_bob").symlink_to(shared / "elsewhere")
    assert claimed(shared, USER="bob")["TMPDIR"] == str(shared)


def _of_another(path: Path) -> None:
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)


def _link_of_another(path: Path) -> None:
    path.symlink_to(path.parent)
    os.lchown(path, NOBODY, NOBODY)


def _link_to_another(path: Path) -> None:
    _of_another(path.with_name("his"))
    path.symlink_to(path.with_name("his"))


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_of_another, marks=as_root),
        pytest.param(_link_of_another, marks=as_root),
        pytest.param(_link_to_another, marks=as_root),
        _open_to_all,
        _to_nowhere,
        Path.touch,
    ],
)
def test_where_others_may_write_ranks_have_another(shared: Path, make: Callable[[Path], None]) -> None:
    make(shared / "torchinductor_ann")
    folder = Path(claimed(shared)["TMPDIR"])
    assert folder.parent == shared and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["USER", "LOGNAME", ""])
def test_it_is_the_folder_that_torch_chooses(shared: Path, name: str) -> None:
    env = job_environment(TMPDIR=str(shared))
    env = {key: value for key, value in env.items() if key not in ("USER", "LOGNAME", "LNAME", "USERNAME")}
    env |= {name: "a:b/c"} if name else {}
    claim_compile_folder(env)
    (made,) = shared.iterdir()
    asks = "from torch._inductor.runtime.cache_dir_utils import default_cache_dir; print(default_cache_dir())"
    assert subprocess.check_output([sys.executable, "-c", asks], env=env, text=True, timeout=100).strip() == str(made)
    assert [*shared.glob("torchinductor*")] == [made] and env["TMPDIR"] == str(shared)
