"""How ranks are run from the copy of a release."""

import sys
from pathlib import Path

import pytest

from holdfast.model.code_release import Release
from holdfast.model.loss_response import Ease, Skip
from holdfast.wire.releases.staged_release import StagedRelease, skip_variables, staged_entry, staged_environment
from holdfast.wire.run_and_node_specs import EntryPoint


def test_paths_of_the_tree_are_moved_and_no_others(tmp_path: Path) -> None:
    root = tmp_path / "proj"
    (root / "src").mkdir(parents=True)
    (tmp_path / "alias").symlink_to(root)
    staged = StagedRelease(root=str(root), at="/staged")
    assert staged.staged_path(str(root / "src")) == "/staged/src"
    assert staged.staged_path(str(root)) == "/staged"
    assert staged.staged_path(str(tmp_path / "alias" / "src")) == "/staged/src"
    for path in (str(tmp_path), f"{root}2/src", "/usr/lib"):
        assert staged.staged_path(path) == path
    assert StagedRelease().staged_path(str(root)) == str(root), "in place nothing is moved"


def test_the_script_is_that_of_the_copy() -> None:
    entry = EntryPoint(argv=("scripts/train.py", "--lr", "1"), python="py", cwd="/proj")
    release = Release(number=2, digest="d", root="/proj", script="scripts/train.py", argv=("x", "--lr", "2"))
    assert staged_entry(entry, release, StagedRelease(root="/proj", at="/s")).argv == (
        "/s/scripts/train.py",
        "--lr",
        "2",
    )
    own = Release(number=1, digest="d", root="/proj", script="scripts/train.py")
    assert staged_entry(entry, own, StagedRelease(root="/proj", at="/s")).argv == ("/s/scripts/train.py", "--lr", "1")
    assert staged_entry(entry, Release(number=1, argv=("other",)), StagedRelease()) == entry, (
        "in place it is as it was started"
    )
    there = StagedRelease(root="/proj")
    assert staged_entry(entry, own, there).argv == ("scripts/train.py", "--lr", "1"), "by the name that the user gave"
    other = Release(number=2, digest="d", root="/proj", script="other.py", argv=("other.py", "x"))
    assert staged_entry(entry, other, there).argv == ("/proj/other.py", "x")


def test_the_environment(tmp_path: Path) -> None:
    staged = StagedRelease(root=str(tmp_path), at="/s")
    entry = EntryPoint(argv=("t.py",), python="py", cwd=str(tmp_path / "sub"))
    release = Release(number=3, digest="d", root=str(tmp_path), env={"LR": "2", "PYTHONPATH": f".:{tmp_path}/lib:/opt"})
    env = staged_environment({"LR": "1", "HOME": "/h"}, entry, release, staged)
    assert env == {"LR": "2", "HOME": "/h", "HOLDFAST_RELEASE": "3", "PYTHONPATH": "/s/sub:/s/lib:/opt"}
    module = EntryPoint(argv=("pkg.train",), module=True, python="py", cwd=str(tmp_path / "sub"))
    bare = Release(number=3, digest="d", root=str(tmp_path))
    assert staged_environment({}, module, bare, staged)["PYTHONPATH"] == "/s/sub"
    assert "PYTHONPATH" not in staged_environment({"PYTHONSAFEPATH": "1"}, module, bare, staged)
    assert staged_entry(module, bare, staged).interpreter_argv() == ("py", "-u", "-P", "-m")
    assert module.interpreter_argv() == ("py", "-u", "-m") and staged_entry(entry, bare, staged).interpreter_argv() == (
        "py",
        "-u",
    )
    assert staged_entry(module, bare, StagedRelease(root=str(tmp_path))).interpreter_argv() == ("py", "-u", "-m"), (
        "in place"
    )
    assert staged_environment({"A": "1"}, entry, Release(number=0), StagedRelease()) == {"A": "1"}
    given = {"PYTHONPATH": "src:.::/opt:../lib"}
    paths = f"{tmp_path}/sub/src:{tmp_path}/sub:{tmp_path}/sub:/opt:{tmp_path}/lib"
    assert staged_environment(given, entry, Release(number=0), StagedRelease()) == {"PYTHONPATH": paths}, (
        "in place, too"
    )


def test_packages_installed_in_place_come_from_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[1:], str(tmp_path / "src")])
    entry = EntryPoint(argv=("t.py",), python=sys.executable, cwd="/")
    release = Release(number=1, digest="d", root=str(tmp_path))
    env = staged_environment({}, entry, release, StagedRelease(root=str(tmp_path), at="/s"))
    assert env["PYTHONPATH"] == "/s/src", "and not from where this process was started"
    other = EntryPoint(argv=("t.py",), python="/opt/python", cwd="/")
    assert "PYTHONPATH" not in staged_environment({}, other, release, StagedRelease(root=str(tmp_path), at="/s"))


def test_steps_left_out() -> None:
    skips = (Skip(first=101, last=103), Skip(first=200, last=200))
    eases = (Ease(first=101, last=200, factor=0.5), Ease(first=300, last=310, factor=0.25))
    assert skip_variables(skips, eases) == {
        "HOLDFAST_SKIP": "101-103,200-200",
        "HOLDFAST_EASE": "0.5:101-200,0.25:300-310",
    }
    assert skip_variables((), ()) == {}
