"""Death at every operation of a commit, and the order in which a commit makes things durable."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import crashing

ROOT = Path(__file__).parents[2]
CALLS = ("open", "write", "pwrite", "ftruncate", "fsync", "rename", "mkdir")


@pytest.mark.parametrize(
    ("step", "every"),
    [
        pytest.param(2, 4, id="every fourth one"),
        pytest.param(2, 1, id="the next step", marks=pytest.mark.slow),
        pytest.param(1, 1, id="the same step again", marks=pytest.mark.slow),
    ],
)
def test_death_at_every_operation_leaves_a_whole_checkpoint(tmp_path: Path, step: int, every: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crashing", str(tmp_path), str(step), str(every)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,  # a machine may be busy
    )
    deaths = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(deaths) > 120 // every
    if every == 1:
        wanted = {"fallocate", "pwrite", "fsync", "rename", "unlink", "rmdir"}
        assert wanted <= {one["where"].split()[1] for one in deaths}
    assert [one for one in deaths if one["broken"] or not one["good"]] == []
    # Always the old one or the new one, and the old one for as long as there is no new one.
    found = {tuple(one["steps"]) for one in deaths}
    assert found == ({(1,), (2, 1), (2,)} if step == 2 else {(1,), (1, 1)})
    # Nothing of the dead writer is left once the next one has saved.
    assert {tuple(one["then"]) for one in deaths} == {(".holdfast-author.json", "step-00000003")}


class Tracks:
    """What of every file and folder would outlive a loss of power, by what has been synced."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.loose: set[str] = set()  # files with bytes, and folders with names, that have not been synced
        self.renamed: list[tuple[str, list[str]]] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = {name: getattr(os, name) for name in CALLS}

        def opened(path: str, flags: int, *args: Any, **named: Any) -> int:
            made = bool(flags & os.O_CREAT) and not os.path.exists(path)
            fd: int = real["open"](path, flags, *args, **named)
            self.paths[fd] = str(path)
            self.loose |= {os.path.dirname(path)} if made else set()
            return fd

        def changed(name: str) -> Any:
            def call(fd: int, *args: Any) -> Any:
                self.loose.add(self.paths[fd])
                return real[name](fd, *args)

            return call

        def synced(fd: int) -> None:
            real["fsync"](fd)
            self.loose.discard(self.paths[fd])

        def renamed(old: str, new: str) -> None:
            self.renamed.append((new, sorted(path for path in self.loose if path.startswith(old))))
            real["rename"](old, new)
            self.loose |= {os.path.dirname(old), os.path.dirname(new)}

        def made(path: str) -> None:
            real["mkdir"](path)
            self.loose.add(os.path.dirname(path))

        monkeypatch.setattr(os, "open", opened)
        for name in ("write", "pwrite", "ftruncate"):
            monkeypatch.setattr(os, name, changed(name))
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "mkdir", made)


def test_all_is_durable_before_it_is_published_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tmp_path / "new" / "base")
    tracks = Tracks()
    tracks.watch(monkeypatch)
    crashing.save(base, 7, 1)
    published = [loose for new, loose in tracks.renamed if new.endswith("step-00000007")]
    assert published == [[]]  # when the folder got its name, nothing in it could be lost
    assert {path for path in tracks.loose if path.startswith(str(tmp_path))} == set()
    small = {Path(new).name: loose for new, loose in tracks.renamed}
    assert small["holdfast.json"] == []  # nor could a small file be, when it got its own


def test_the_tracks_see_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracks = Tracks()
    tracks.watch(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    crashing.save(str(tmp_path), 7, 1)
    assert any(loose for _, loose in tracks.renamed)
