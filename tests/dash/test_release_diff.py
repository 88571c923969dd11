"""What a release changed: from archives of real trees, bounded, without values of the environment."""

from pathlib import Path

import msgspec
import pytest

from holdfast.cli.page.page_sources import RunSource
from holdfast.dash.page_source import SourceError
from holdfast.dash.release_diff import compare_releases
from holdfast.model.code_release import Release
from holdfast.wire.releases.tree_archive import ArchiveLimits, pack_files


def pack(run_dir: Path, number: int, files: dict[str, bytes], env: str = "") -> Release:
    tree = run_dir / f"tree-{number}"
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (run_dir / "releases").mkdir(exist_ok=True)
    packed = pack_files(tree, files, run_dir / "releases", ArchiveLimits())
    argv = (f"--release={number}",) if env else ()
    return Release(number=number, digest=packed.digest, script="train.py", argv=argv, env={"SECRET": env})


def test_lines_files_and_words_that_differ_are_told(tmp_path: Path) -> None:
    same = {"same.py": b"x = 1\n", "data.bin": b"\0\1"}
    one = pack(tmp_path, 1, same | {"train.py": b"a\nlr = 1\nb\n", "gone.py": b"old\n"}, env="abc")
    changed = {"train.py": b"a\nlr = 2\nb\n", "data.bin": b"\0\2", "sub/new.py": b"new\n", "big": b"x" * (1 << 17)}
    two = pack(tmp_path, 2, same | changed, env="xyz")
    found = compare_releases(RunSource(tmp_path), one, two)
    text = "\n".join(found.lines)
    assert "\n-train.py --release=1\n+train.py --release=2" in text
    assert "SECRET" in text and "abc" not in text and "xyz" not in text
    assert "train.py (changed)\n@@ -1,3 +1,3 @@\n a\n-lr = 1\n+lr = 2\n b" in text
    assert "gone.py (removed)\n@@ -1 +0,0 @@\n-old" in text and "sub/new.py (added)\n@@ -0,0 +1 @@\n+new" in text
    for path in ("data.bin (changed)", "big (added)"):
        below = found.lines[found.lines.index(path) + 1]
        assert below.startswith("  ") and " 64 KiB" in below, "no lines of it"
    assert "same.py" not in text and found.left_out == 0


def test_secrets_of_the_command_line_are_not_told(tmp_path: Path) -> None:
    one = pack(tmp_path, 1, {"train.py": b"a"})
    one, two, other = (
        msgspec.structs.replace(one, number=n, argv=("train.py", "--hub-token", f"ArgTok55aaQQ{n}", "--lr", lr))
        for n, lr in ((1, "1"), (2, "1"), (3, "2"))
    )
    assert compare_releases(RunSource(tmp_path), one, two).lines == (
        "of the command line only secrets differ, which are not shown",
    )
    assert compare_releases(RunSource(tmp_path), one, other).lines[1:] == (
        "-train.py train.py --hub-token <secret> --lr 1",
        "+train.py train.py --hub-token <secret> --lr 2",
    )


def test_what_is_long_is_cut_and_counted(tmp_path: Path) -> None:
    one = pack(tmp_path, 1, {"a.py": b""})
    long = {f"f{n:03}.py": b"line\n" * 100 for n in range(60)}
    found = compare_releases(RunSource(tmp_path), one, pack(tmp_path, 2, long))
    assert len(found.lines) == 600
    assert found.left_out == 11 + (1 + 49 * 102) - 600  # files that are not told of, and lines; a.py has one line


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    two = pack(tmp_path, 2, {"train.py": b"a"})
    with pytest.raises(SourceError, match=r"^release 1 "):
        compare_releases(RunSource(tmp_path), Release(number=1), two)
    with pytest.raises(SourceError, match=rf"/{'0' * 64}\.tar "):
        compare_releases(RunSource(tmp_path), two, Release(number=3, digest="0" * 64))
    (tmp_path / "releases" / f"{'1' * 64}.tar").write_bytes(b"no archive")
    with pytest.raises(SourceError, match="damaged"):
        compare_releases(RunSource(tmp_path), two, Release(number=3, digest="1" * 64))
    assert compare_releases(RunSource(tmp_path), two, two).lines == ("no file and no word of the command line differs",)
