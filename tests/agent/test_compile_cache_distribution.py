"""What ranks have compiled on its way to hosts without ranks: through the port of a real controller."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from holdfast.agent.connection.controller_dialer import ControllerDialer
from holdfast.agent.releases.compile_cache_distribution import TorchCompileCache
from holdfast.config import ReleaseLimits, Settings
from holdfast.wire.releases.tree_archive import ArchiveError
from holdfast.wire.run_and_node_specs import CACHE_VARIABLE
from tests.agent.peers import until
from tests.agent.test_release_stager import Desk, desk
from tests.fleet.places import TEMPLATE

__all__ = ["desk"]


def node(
    desk: Desk, said: list[str], limit_mb: int = 1, has_ranks: Callable[[], bool] = lambda: False
) -> TorchCompileCache:
    spec = msgspec.structs.replace(
        TEMPLATE,
        url=f"unix:{desk.folder / 'controller.sock'}",
        compiled=str(desk.folder / "cache"),
        settings=Settings(release=ReleaseLimits(compiled_mb=limit_mb)),
    )
    return TorchCompileCache(spec, ControllerDialer(spec), has_ranks, said.append)


def fill(folder: Path) -> dict[str, bytes]:
    files = {"fxgraph/ab/fab/entry": b"graph", "cd/ccd.so": b"\x7fELF", "triton/0/k/kernel.cubin": b"cubin"}
    for name, content in {**files, "locks/ccd.lock": b"", "ef/.part.tmp": b"half"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.coming*")]


@pytest.fixture(autouse=True)
def no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor sets the variable by itself, and a test before may have compiled something."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)


async def test_what_one_host_has_compiled_comes_to_another(desk: Desk, tmp_path: Path) -> None:
    trains, waits, said = node(desk, []), node(desk, []), list[str]()
    made, ours, archives = tmp_path / "made", tmp_path / "ours", tmp_path / "archives" / "compiled"
    await waits.bring_archive(ours)
    assert not ours.exists(), "nobody has compiled anything yet"
    files = fill(made)
    trains.pack_folder(made, archives)
    assert not archives.exists(), "it may still be written"
    trains.pack_folder(made, archives)
    await waits.bring_archive(ours)
    assert content_of(ours) == files, "neither locks nor drafts"
    (ours / "cd" / "ccd.so").write_bytes(b"own")
    (made / "new").write_bytes(b"one more graph")
    for _ in range(3):
        trains.pack_folder(made, archives)
    assert len(content_of(archives)) == 1, "the older archive is gone"
    await waits.bring_archive(ours)
    assert content_of(ours) == {**files, "new": b"one more graph", "cd/ccd.so": b"own"}
    assert not left_over(tmp_path) and not said


async def test_too_much_of_it_is_not_shared(desk: Desk, tmp_path: Path) -> None:
    said: list[str] = []
    trains, made, archives = node(desk, said), tmp_path / "made", tmp_path / "archives" / "compiled"
    fill(made)
    for _ in range(2):
        trains.pack_folder(made, archives)
    assert content_of(archives)
    (made / "large").write_bytes(bytes(1 << 20))
    for _ in range(3):
        trains.pack_folder(made, archives)
    assert not content_of(archives), "nor what was there before"
    assert said == ["standbys do not get what ranks have compiled: it takes 1 MiB, and release.compiled_mb allows 1"]
    generous = node(desk, said, limit_mb=4)
    for _ in range(2):
        generous.pack_folder(made, archives)
    with pytest.raises(ArchiveError, match="above release"):
        await node(desk, said).bring_archive(tmp_path / "ours")
    assert not (tmp_path / "ours").exists() and not left_over(tmp_path)


async def test_what_is_damaged_on_its_way_is_not_used(desk: Desk, tmp_path: Path) -> None:
    trains, made, archives = node(desk, []), tmp_path / "made", tmp_path / "archives" / "compiled"
    fill(made)
    for _ in range(2):
        trains.pack_folder(made, archives)
    [archive] = [archives / name for name in content_of(archives)]
    archive.write_bytes(archive.read_bytes().replace(b"cubin", b"CUBIN", 3))
    with pytest.raises(ArchiveError, match="damaged"):
        await node(desk, []).bring_archive(tmp_path / "ours")
    assert not (tmp_path / "ours").exists() and not left_over(tmp_path)


async def test_an_archive_that_could_not_be_packed_is_packed_later(desk: Desk, tmp_path: Path) -> None:
    trains, made, archives = node(desk, []), tmp_path / "made", tmp_path / "archives" / "compiled"
    fill(made)
    archives.parent.mkdir(exist_ok=True)
    archives.write_bytes(b"a file where a folder should be")
    trains.pack_folder(made, archives)
    with pytest.raises(FileExistsError):
        trains.pack_folder(made, archives)
    archives.unlink()
    trains.pack_folder(made, archives)
    assert len(content_of(archives)) == 1


async def test_nodes_of_one_host_that_fetch_at_once_do_not_disturb_each_other(desk: Desk, tmp_path: Path) -> None:
    trains, made, archives = node(desk, []), tmp_path / "made", tmp_path / "archives" / "compiled"
    files = fill(made)
    for _ in range(2):
        trains.pack_folder(made, archives)
    for number in range(3):
        ours = tmp_path / f"ours{number}"
        await asyncio.gather(*(node(desk, []).bring_archive(ours) for _ in range(4)))
        assert content_of(ours) == files
    assert not left_over(tmp_path)


@pytest.mark.parametrize("ran", [False, True])
async def test_nothing_is_brought_where_ranks_have_run(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: bool
) -> None:
    """Between a stop and the next launch a node has no ranks, and what they have compiled."""
    monkeypatch.setattr("holdfast.agent.releases.compile_cache_distribution._LOOK_S", 0.01)
    trains, made, ours = node(desk, []), tmp_path / "made", desk.folder / "cache"
    fill(made)
    for _ in range(2):
        trains.pack_folder(made, tmp_path / "archives" / "compiled")
    looks = 0

    def has_ranks() -> bool:
        nonlocal looks
        looks += 1
        return ran and looks == 1

    sharing = asyncio.create_task(node(desk, [], has_ranks=has_ranks).run())
    await until(lambda: looks >= 20 and (ran or ours.exists()))
    sharing.cancel()
    assert ours.exists() is not ran


async def test_a_folder_of_the_user_is_left_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/scratch/mine")
    await node(desk, []).run()  # which would not return


async def test_a_controller_that_is_gone_is_no_bug(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "controller.sock").unlink()
    with pytest.raises(aiohttp.ClientError):
        await node(desk, []).bring_archive(tmp_path / "ours")
