"""Work of ranks on its way from a copy to the user's tree, while they run."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.releases.output_return import OutputReturn, files_being_written
from holdfast.wire.releases import release_tree_sync
from holdfast.wire.releases.release_tree_sync import GatheredFiles
from tests.wire.test_release_tree_sync import CODE, copied
from tests.wire.test_tree_archive import plant

LONG_AGO = 10**9


class Place:
    """A user's tree, a copy that ranks run from, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.root = plant(folder / "proj", CODE)
        self.at, self.index = copied(folder, self.root)
        self.homecoming = OutputReturn(folder / "releases", SystemClock())
        self.now = 0.0

    def look(self, after_s: float = 3.0) -> GatheredFiles:
        self.now += after_s
        return self.homecoming.look_at(self.at, self.now)[1]

    def replace(self, name: str, text: str) -> None:
        """As careful scripts save."""
        (self.at / "saving").write_text(text)
        os.replace(self.at / "saving", self.at / name)

    def home(self) -> dict[str, str]:
        """What there is that is not of the release."""
        found = {str(path.relative_to(self.root)): path for path in self.root.rglob("*") if path.is_file()}
        return {name: path.read_text() for name, path in found.items() if name not in CODE}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_has_settled_comes_home(place: Place) -> None:
    place.replace("ckpt.pt", "1")
    plant(place.at, {"out/2/state": "s", "lib/__pycache__/model.pyc": ""})
    assert place.look() == GatheredFiles() and place.home() == {}, "seen once: it may be half of it"
    with (place.at / "ckpt.pt").open("a") as file:
        file.write("+")
    assert place.look().moved == ("out/2/state",)
    assert place.look().moved == ("ckpt.pt",)
    assert place.home() == {"ckpt.pt": "1+", "out/2/state": "s"}
    assert not (place.at / "ckpt.pt").is_symlink() and not (place.at / "out").is_symlink(), "ranks keep what they have"
    place.replace("ckpt.pt", "2")
    assert (place.look(), place.home()["ckpt.pt"]) == (GatheredFiles(), "1+")
    assert place.look().moved == ("ckpt.pt",) and place.home()["ckpt.pt"] == "2"
    assert place.look() == GatheredFiles()
    assert release_tree_sync.gather_files(place.at)[1] == GatheredFiles(), "at the end there is nothing left to do"
    assert os.readlink(place.at / "ckpt.pt") == str(place.root / "ckpt.pt")
    assert os.readlink(place.at / "out") == str(place.root / "out"), "what is removed from it is removed at home"
    assert place.home() == {"ckpt.pt": "2", "out/2/state": "s"}


def test_nothing_that_is_being_written(place: Place) -> None:
    with (place.at / "big.pt").open("wb") as file:
        file.write(b"half")
        file.flush()
        assert str(place.at / "big.pt") in files_being_written(str(place.at))
        for _ in range(3):
            assert place.look() == GatheredFiles(), "a slow disk: nothing new for long, and not whole"
    with (place.at / "big.pt").open("rb"):
        assert place.look().moved == ("big.pt",), "who reads it does no harm"


def test_what_is_replaced_all_the_time(place: Place) -> None:
    """It never settles, and each one is whole."""
    for count in range(5):
        place.replace("ckpt.pt", str(count))
        (place.at / f"keeps-inode-{count}").touch()
        place.look()
    assert "ckpt.pt" in place.home()


def test_what_is_newer_at_home_stays(place: Place) -> None:
    (place.at / "lib" / "notes").write_text("of a rank")
    os.utime(place.at / "lib" / "notes", (LONG_AGO, LONG_AGO))
    (place.root / "lib" / "notes").write_text("of the user")
    place.look()
    gathered = place.look()
    name = f"lib/notes.of-{place.at.name}"
    assert place.home() == {"lib/notes": "of the user", name: "of a rank"}
    assert (gathered.moved, gathered.both) == ((name,), (name,))
    said = release_tree_sync.describe_gathered(place.index, gathered)
    assert "; lib/notes " in said and said.endswith(f" {os.path.basename(name)}"), "the user's, and where the rank's is"
    assert place.look() == GatheredFiles(), "told once"


def test_a_file_of_ours_is_replaced_whatever_time_it_bears(place: Place) -> None:
    """Of what is copied from elsewhere, the time of its origin may be kept."""
    place.replace("best.pt", "1")
    place.look()
    place.look()
    (place.at / "saving").write_text("2")
    os.utime(place.at / "saving", (LONG_AGO, LONG_AGO))
    os.replace(place.at / "saving", place.at / "best.pt")
    place.look()
    assert place.look().moved == ("best.pt",) and place.home() == {"best.pt": "2"}


def test_what_a_script_removes_goes_at_home(place: Place) -> None:
    for name in ("step-1.pt", "step-2.pt", "last.pt", "mine.pt"):
        place.replace(name, name)
    place.look()
    place.look()
    assert {*place.home()} == {"step-1.pt", "step-2.pt", "last.pt", "mine.pt"}
    (place.at / "step-1.pt").unlink()
    os.replace(place.at / "last.pt", place.at / "before-last.pt")
    (place.at / "mine.pt").unlink()
    (place.root / "mine.pt").write_text("the user has it now")
    place.look()
    assert "last.pt" in place.home(), "its new name is not at home yet"
    place.look()
    place.look()
    assert {*place.home()} == {"step-2.pt", "before-last.pt", "mine.pt"}
    (place.at / "lib" / "model.py").unlink()
    (place.at / "step-2.pt").unlink()
    for _ in range(3):
        place.look()
    assert "step-2.pt" in place.home(), "who clears away old files is no script that does not need them"


async def test_what_a_script_removes_last(place: Place) -> None:
    place.replace("ckpt.tmp", "1")
    place.replace("other.pt", "2")
    place.look()
    place.look()
    os.replace(place.at / "ckpt.tmp", place.at / "ckpt.pt")
    release_tree_sync.gather_files(place.at)
    await place.homecoming.close()
    assert place.home() == {"ckpt.pt": "1", "other.pt": "2"}


def test_links_of_scripts(place: Place) -> None:
    plant(place.at, {"run/1/x": "1", "run/2/x": "2"})
    (place.at / "latest").symlink_to("run/1")
    place.look()
    place.look()
    assert os.readlink(place.root / "latest") == "run/1"
    (place.at / "saving").symlink_to("run/2")
    os.replace(place.at / "saving", place.at / "latest")
    place.look()
    place.look()
    assert os.readlink(place.root / "latest") == "run/2"


def test_to_another_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, to: Path, *, follow_symlinks: bool) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    place.replace("ckpt.pt", "1")
    place.look()
    assert place.look().moved == ("ckpt.pt",) and place.home() == {"ckpt.pt": "1"}
    assert place.look() == GatheredFiles(), "once"
    assert not os.path.samefile(place.root / "ckpt.pt", place.at / "ckpt.pt")
    inode = (place.root / "ckpt.pt").stat().st_ino
    assert release_tree_sync.gather_files(place.at)[1] == GatheredFiles() and (place.at / "ckpt.pt").is_symlink()
    assert (place.root / "ckpt.pt").stat().st_ino == inode, "it is not copied again"
