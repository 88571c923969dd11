"""Releases on their way to a node: from the port of a real controller to a folder that nodes share."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.connection.controller_dialer import ControllerDialer
from holdfast.agent.releases.release_stager import ReleaseStager
from holdfast.cli.launch import release_packing
from holdfast.cli.launch.release_packing import KeptOut
from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import admit_by_socket
from holdfast.controller.api import ApiEntrance, make_api
from holdfast.controller.composition import build_controller
from holdfast.model.code_release import Release
from holdfast.model.node_errands import StageHere
from holdfast.wire import unix_sockets
from holdfast.wire.releases import host_release_copies, release_tree_sync, tree_archive
from holdfast.wire.releases.release_file_selection import list_release_files
from holdfast.wire.releases.tree_archive import ArchiveLimits
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec
from tests.controller.conftest import make_ports
from tests.fleet.places import TEMPLATE
from tests.wire.test_release_file_selection import repo
from tests.wire.test_tree_archive import plant


class Desk:
    """A controller's port, a tree of code, and nodes that want it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def pack(self, root: Path, number: int = 2) -> Release:
        kept = list_release_files(root).kept
        digest = tree_archive.pack_files(root, kept, self.folder / "archives", ArchiveLimits()).digest
        return Release(number=number, digest=digest, root=str(root), script="train.py")

    def node(
        self,
        releases: str = "staged",
        door: str = "controller.sock",
        run_file: str | Path = "",
        settings: Settings | None = None,
    ) -> ReleaseStager:
        node: NodeSpec = msgspec.structs.replace(
            TEMPLATE,
            url=f"unix:{self.folder / door}",
            releases=str(self.folder / releases),
            run_file=str(run_file),
            settings=settings or TEMPLATE.settings,
            entry=EntryPoint(argv=("train.py",), python=sys.executable, zygote=False, cwd=str(self.folder)),
        )
        return ReleaseStager(node, self.folder / "node", ControllerDialer(node), SystemClock(), self.said.append)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    built = build_controller(Settings(), make_ports(tmp_path, archives=tmp_path / "archives"))
    runner = web.AppRunner(make_api(built, ApiEntrance(admit_by_socket, AuditLog(tmp_path))))
    await runner.setup()
    await web.SockSite(runner, unix_sockets.listen(tmp_path / "controller.sock")).start()
    yield Desk(tmp_path)
    await runner.cleanup()
    built.controller.journal.close()


async def test_a_release_is_fetched_and_put_in_its_place(desk: Desk, tmp_path: Path) -> None:
    release = desk.pack(repo(tmp_path / "proj"))
    node = desk.node()
    assert await node.ensure_staged(release) == ""
    at = Path(node.staged_location(release).at)
    assert at.parent == tmp_path / "staged"
    assert (at / "train.py").read_text() == (tmp_path / "proj" / "train.py").read_text()
    assert os.readlink(at / "weights.bin") == str(tmp_path / "proj" / "weights.bin"), (
        "left out, and found where it lies"
    )
    assert (at / "out" / "log.txt").exists()
    assert not (at / "lib" / "__pycache__").exists()
    left = [path for path in (tmp_path / "staged").iterdir() if "fetched" in path.name or "partial" in path.name]
    assert left == []
    (at / "train.py").write_text("touched")
    assert await node.ensure_staged(release) == ""
    assert (at / "train.py").read_text() == "touched", "what is there is not put there again"
    assert await node.ensure_staged(Release(number=1)) == ""
    assert node.staged_location(Release(number=1)).at == "", "the user's own tree, where it stands"


async def test_nodes_of_one_host_share_it(desk: Desk, tmp_path: Path) -> None:
    release = desk.pack(plant(tmp_path / "proj"))
    nodes = [desk.node() for _ in range(6)]
    assert await asyncio.gather(*(node.ensure_staged(release) for node in nodes for _ in range(2))) == [""] * 12
    assert len({node.staged_location(release).at for node in nodes}) == 1
    assert len([path for path in (tmp_path / "staged").iterdir() if path.is_dir()]) == 1
    archives = desk.node("archives")  # the controller's own host has the archive already
    assert await archives.ensure_staged(release) == ""
    assert (tmp_path / "archives" / f"{release.digest}.tar").exists()


async def test_what_goes_wrong_is_said(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = desk.pack(plant(tmp_path / "proj"))
    unknown = msgspec.structs.replace(release, digest="0" * 64)
    assert "HTTP 404" in await desk.node().ensure_staged(unknown)
    evil = msgspec.structs.replace(release, digest="../../etc/passwd")
    assert evil.digest in await desk.node().ensure_staged(evil)
    assert (await desk.node(door="nobody.sock").ensure_staged(release)).startswith("release 2 ")
    os.chmod(tmp_path, 0o770)
    assert str(tmp_path) in await desk.node().ensure_staged(release)
    os.chmod(tmp_path, 0o700)
    monkeypatch.setattr(host_release_copies, "_SPARE_BYTES", 1 << 60)
    assert "MiB to spare" in (await desk.node().ensure_staged(release)).replace(f"{(1 << 60) >> 20} to", "MiB to")
    monkeypatch.undo()
    archive = tmp_path / "archives" / f"{release.digest}.tar"
    archive.write_bytes(archive.read_bytes().replace(b"print(1)", b"print(2)"))
    assert "is damaged" in await desk.node().ensure_staged(release)
    assert not [path for path in (tmp_path / "staged").iterdir() if path.is_dir()], "nothing half done is left"


async def test_a_tree_from_before_the_machine_was_started_is_made_anew(desk: Desk, tmp_path: Path) -> None:
    release = desk.pack(plant(tmp_path / "proj"))
    node = desk.node()
    assert await node.ensure_staged(release) == ""
    at = Path(node.staged_location(release).at)
    (at / "train.py").write_text("")  # it had not reached the disk
    at.with_name(f"{at.name}.mark").write_text(f"{release.digest} another boot")
    assert await desk.node().ensure_staged(release) == ""
    assert (at / "train.py").read_text() == "print(1)\n"


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


async def test_old_ones_go_and_those_in_use_stay(desk: Desk, tmp_path: Path) -> None:
    node = desk.node()
    dead = tmp_path / "staged" / f"0123.partial-{dead_pid()}"
    dead.mkdir(parents=True)
    alive = tmp_path / "staged" / f"0123.fetched-{os.getpid()}"
    alive.touch()
    releases = []
    for number in range(1, 12):
        releases.append(desk.pack(plant(tmp_path / "proj", {"train.py": f"print({number})"}), number))
        assert await (node.begin_launch(releases[0]) if number == 1 else node.ensure_staged(releases[-1])) == ""
        at = Path(node.staged_tree(releases[-1]).at)
        os.utime(at, (number, number))
    names = {path.name for path in (tmp_path / "staged").iterdir() if path.is_dir()}
    there = {release.number for release in releases if Path(node.staged_tree(release).at).name in names}
    assert there == {1, 4, 5, 6, 7, 8, 9, 10, 11}, "that which runs, the three newest, and five beside them"
    assert not dead.exists() and alive.exists()
    assert await node.ensure_staged(releases[1]) == "", "one that went can be had again"


async def test_ranks_run_in_place_while_nothing_is_edited(desk: Desk, tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": "print(1)\n", "lib/a.py": "", "ds.json": "{}"})
    release = desk.pack(root)
    node = desk.node()
    said = desk.said
    copy = node.staged_tree(release)
    assert node.staged_location(release) == copy, "as long as nobody has looked"
    assert await node.begin_launch(release) == ""
    assert (node.staged_location(release).root, node.staged_location(release).at) == (str(root), "")
    signed = msgspec.structs.replace(release, signature="by somebody")
    assert await node.begin_launch(signed) == "" and node.staged_location(signed) == copy, (
        "nobody changes what was signed"
    )
    plant(root, {"ds.json": "[]", "checkpoints/1/state": "x"})
    assert await node.begin_launch(release) == ""
    assert node.staged_location(release).at == "" and said == [], "what a script may have written is no edit"
    plant(root, {"train.py": "print(2)\n", "lib/a.py": "1"})
    assert await node.begin_launch(release) == ""
    assert node.staged_location(release) == copy
    assert (Path(copy.at) / "train.py").read_text() == "print(1)\n", "as it was"
    assert (Path(copy.at) / "ds.json").read_text() == "[]" and (Path(copy.at) / "checkpoints/1/state").exists()
    assert said == [
        "lib/a.py and 1 more file were edited after release 2 was made; "
        "ranks run release 2 unchanged, from a copy; holdfast update brings the edit"
    ]
    assert await node.begin_launch(release) == "" and len(said) == 1, "which is said once"
    other = desk.node()
    assert await other.begin_launch(release, first=False) == "" and len(said) == 1, "by one node"
    plant(root, {"train.py": "print(1)\n", "lib/a.py": ""})
    assert await node.begin_launch(release) == "" and node.staged_location(release).at == "", "the edit was undone"
    (root / "train.py").unlink()
    assert await node.begin_launch(release) == "" and node.staged_location(release) == copy
    assert said[-1].startswith("train.py ")
    shutil.rmtree(root)
    assert await node.begin_launch(release) == "" and node.staged_location(release) == copy, "a host without the tree"
    assert len(said) == 2, "has nothing to say of it"


async def test_a_node_that_is_ready_has_read_the_users_tree(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait for a standby that is seated, and thousands of files on storage of the network take seconds."""
    monkeypatch.setattr(release_tree_sync, "_RACY_NS", 0)  # these files are new
    release = desk.pack(plant(tmp_path / "proj", {"train.py": "print(1)\n", "lib/a.py": ""}))
    node, read = desk.node(), list[str]()
    assert await node.stage_all((release, Release(number=1))) == ""
    monkeypatch.setattr(release_tree_sync, "_file_digest", read.append)
    assert await node.begin_launch(release) == "" and node.staged_location(release).at == ""
    assert read == []


async def test_the_work_of_a_job_stays_in_its_own_tree(desk: Desk, tmp_path: Path) -> None:
    """Whichever folder newer code comes from."""
    home = plant(tmp_path / "proj", {"train.py": "1", "checkpoints/state": "", "data/x": "old"})
    fixed = plant(tmp_path / "fixed", {"train.py": "2", "data/y": ""})
    release = msgspec.structs.replace(desk.pack(fixed), home=str(home))
    node = desk.node()
    said = desk.said
    assert await node.begin_launch(release) == ""
    at = Path(node.staged_location(release).at)
    assert at == Path(node.staged_tree(release).at), "equal to a tree that is not the job's"
    assert (at / "checkpoints").resolve() == home / "checkpoints"
    assert (at / "data" / "x").read_text() == "old" and (at / "data" / "y").exists()
    (at / "made").write_text("new")
    await node.gather_outputs()
    assert (home / "made").read_text() == "new" and not (fixed / "made").exists()
    assert len(said) == 1 and said[0].endswith(f" {home}: made")
    await node.gather_outputs()
    assert len(said) == 1


async def test_work_in_a_copy_that_goes_is_brought_home(desk: Desk, tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": "1"})
    release = desk.pack(root)
    plant(root, {"train.py": "2"})
    node = desk.node()
    assert await node.begin_launch(release) == ""
    at = Path(node.staged_location(release).at)
    (at / "made").write_text("new")
    at.with_name(f"{at.name}.mark").write_text(f"{release.digest} another boot")
    assert await desk.node().ensure_staged(release) == ""
    assert (root / "made").read_text() == "new"


async def test_checks(desk: Desk, tmp_path: Path) -> None:
    node = desk.node()
    good = desk.pack(plant(tmp_path / "good", {"train.py": "import json\n"}))
    assert await node.stage_and_check(StageHere(id=1, release=good, check=True)) == ("", False)
    bad = desk.pack(plant(tmp_path / "bad", {"train.py": "import jason\n"}))
    assert await node.stage_and_check(StageHere(id=2, release=bad)) == ("", False), "nobody asked for a check"
    fault, refused = await node.stage_and_check(StageHere(id=3, release=bad, check=True))
    assert fault == "train.py, line 1: there is no module jason" and refused
    nowhere = msgspec.structs.replace(good, digest="0" * 64)
    fault, refused = await node.stage_and_check(StageHere(id=4, release=nowhere, check=True))
    assert "HTTP 404" in fault and not refused


async def test_a_tree_that_stands_as_it_was_needs_no_copy_before_ranks_train(tmp_path: Path) -> None:
    """To unpack some thousand files takes seconds, and the first line of a script does not wait for that."""
    root, run_dir = plant(tmp_path / "proj"), tmp_path / "run"
    (root / "train.py").write_text("print()")
    entry = EntryPoint(argv=("train.py",), python=sys.executable, cwd=str(root))
    release = release_packing.pack_first_release(entry, run_dir, KeptOut(), copied=True).release
    nodes = [Desk(tmp_path).node("run/releases") for _ in range(2)]
    for node in nodes:
        assert await node.stage_all((release,)) == "" and await node.begin_launch(release) == ""
        assert node.staged_location(release).at == ""
        assert not [path for path in (run_dir / "releases").iterdir() if path.is_dir()], "there is no copy"
    for trains in (False, True):
        nodes[0].complete(trains)
    assert await nodes[0].ensure_staged(release) == ""
    assert (Path(nodes[0].staged_tree(release).at) / "train.py").read_text() == "print()"


async def test_a_tree_that_was_edited_at_once_is_run_as_it_was(tmp_path: Path) -> None:
    root, run_dir = plant(tmp_path / "proj"), tmp_path / "run"
    (root / "train.py").write_text("print()")
    entry = EntryPoint(argv=("train.py",), python=sys.executable, cwd=str(root))
    release = release_packing.pack_first_release(entry, run_dir, KeptOut(), copied=True).release
    node = Desk(tmp_path).node("run/releases")
    assert await node.stage_all((release,)) == ""
    (root / "train.py").write_text("edited")
    assert node._choose_tree(release).startswith("train.py "), "even between two looks"
    assert (Path(node.staged_location(release).at) / "train.py").read_text() == "print()"
    assert await node.begin_launch(release) == ""
    assert node.staged_location(release).at


async def test_hosts_that_see_the_run_directory_make_copies_only_when_they_need_them(tmp_path: Path) -> None:
    """As on Slurm, where each of some thousand hosts would make one more tree on the same file system."""
    root, run_dir = plant(tmp_path / "proj"), tmp_path / "run"
    (root / "train.py").write_text("print()")
    entry = EntryPoint(argv=("train.py",), python=sys.executable, cwd=str(root))
    release = release_packing.pack_first_release(entry, run_dir, KeptOut(), copied=True).release
    nodes = [Desk(tmp_path).node(f"n{number}/releases", run_file=run_dir / "run.json") for number in range(3)]
    for node in nodes:
        assert await node.stage_all((release,)) == "" and await node.begin_launch(release) == ""
        node.complete(True)
        assert node.staged_location(release).at == "" and not node._having, "nothing was asked for, nothing is made"
    copies = [Path(node.staged_tree(release).at) for node in nodes]
    plant(root, {"train.py": "edited"})
    assert await nodes[0].begin_launch(release) == "", "nobody answers at the controller's port"
    update = release_packing.pack_update(None, release, run_dir, KeptOut())
    newer = msgspec.structs.replace(release, number=2, digest=update.digest)
    assert await nodes[1].stage_and_check(StageHere(id=1, release=newer)) == ("", False)
    assert await nodes[1]._having[release.digest] == ""
    assert [copy.is_dir() for copy in copies] == [True, True, False], "edited; to go back to; not needed yet"
    assert {(copy / "train.py").read_text() for copy in copies[:2]} == {"print()"}
