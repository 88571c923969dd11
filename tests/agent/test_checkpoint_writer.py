"""What a node tells of the checkpoints at a storage that it publishes to."""

from functools import partial
from pathlib import Path

import pytest

from holdfast.checkpoint import retention, stored_checkpoints
from holdfast.checkpoint.checkpoint_reader import read_metadata
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.model.restore_sources import Restore
from holdfast.model.state_doubt import Doubt
from holdfast.wire.rank_keeper_messages import CheckpointPolicy, step_metadata_path
from tests.agent.test_keeper import IMAGE_BYTES, Bench, launch, snapshot, until, want
from tests.agent.test_keeper import bench as bench


def has_listed(bench: Bench, count: int) -> bool:
    return len(bench.listed) == count


async def test_what_is_published_is_listed_after_each_change(bench: Bench, tmp_path: Path) -> None:
    """Whole listings: of what retention has left, and of what is in doubt."""
    (tmp_path / "metadata").write_bytes(b"blob")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=2, keep=2)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage, str(tmp_path / "metadata")))
    for number, step in enumerate((2, 4, 6), start=1):
        snapshot(arena, step)
        await until(partial(has_listed, bench, number))
    assert [[one.step for one in listing.checkpoints] for listing in bench.listed] == [[2], [4, 2], [6, 4]]
    newest = bench.listed[-1]
    [last, _] = stored_checkpoints.find_checkpoints(storage.url)
    told = newest.checkpoints[0]
    assert (newest.base, newest.generation, f"{newest.base}/{told.name}") == (storage.url, 1, last.url)
    assert (told.at, told.bytes, told.generation, told.run) == (last.at, IMAGE_BYTES, 1, last.author.run)
    bench.keeper.report_checkpoints()
    assert bench.listed[3:] == [newest], "for a controller that may not have heard of it"

    doubt = Doubt(generation=1, not_after=4)
    bench.keeper.begin_launch(launch(2, Restore(step=4, doubts=(doubt,))))
    bench.keeper.report_checkpoints()
    assert len(bench.listed) == 4, "this node may have lost rank 0 since"
    await bench.arena(want(2, storage, str(tmp_path / "metadata")))
    await until(lambda: len(bench.listed) == 5)
    assert bench.listed[-1].generation == 2
    assert [(one.step, one.doubted, bool(one.why)) for one in bench.listed[-1].checkpoints] == [
        (6, True, True),
        (4, False, False),
    ]


async def test_metadata_of_a_step_comes_before_that_of_its_layout(bench: Bench, tmp_path: Path) -> None:
    """The lengths of values differ from step to step. What is published needs that of earlier steps no more."""
    path, storage = tmp_path / "metadata", CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=2)
    given = {path: b"any", **{Path(step_metadata_path(str(path), step)): b"of %d" % step for step in (1, 4, 6)}}
    for file, content in given.items():
        file.write_bytes(content)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage, str(path)))
    for number, step in enumerate((2, 4), start=1):
        snapshot(arena, step)
        await until(partial(has_listed, bench, number))
    told = {one.step: read_metadata(one.url) for one in stored_checkpoints.find_checkpoints(storage.url)}
    assert told == {2: b"any", 4: b"of 4"}
    assert sorted(file.name for file in given if file.exists()) == ["metadata", "metadata-4", "metadata-6"]


async def test_a_checkpoint_is_listed_although_old_ones_cannot_be_removed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> tuple[str, ...]:
        raise StorageError("not yours to remove")

    monkeypatch.setattr(retention, "retain_checkpoints", refuse)
    (tmp_path / "metadata").write_bytes(b"blob")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=2, keep=1)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage, str(tmp_path / "metadata")))
    for number, step in enumerate((2, 4), start=1):
        snapshot(arena, step)
        await until(partial(has_listed, bench, number))
    assert [one.step for one in bench.listed[-1].checkpoints] == [4, 2]
