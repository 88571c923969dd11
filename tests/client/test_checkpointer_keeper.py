"""A Checkpointer and the keeper of its node: memory that outlives the rank."""

import copy
import errno
import mmap
import os
import re
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.checkpoint import dcp, keeper_client
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.image_layout import EXTRA
from holdfast.checkpoint.keeper_client import KeeperClient, KeeperError
from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing import checkpointer
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.training.progress import RankProgress
from holdfast.wire import rank_keeper_messages
from holdfast.wire.rank_memory.slot_reader import read_slot
from tests.client.fake_keeper import FakeKeeper
from tests.client.job import Job, same


def test_a_slot_that_is_read_is_not_waited_for(keeper: FakeKeeper) -> None:
    job = Job(0).train(1, 2)
    arena = keeper.arena()
    for sealed in arena.list_sealed():
        assert arena.pin(sealed.slot, sealed.seq)
    assert job.ckpt.save(3) is False and job.ckpt.skipped == 1
    arena.unpin(arena.list_sealed()[1].slot)
    assert job.ckpt.save(4)
    assert [sealed.step for sealed in arena.list_sealed()] == [4, 2]


def test_restored_snapshots_outlive_the_next_write(keeper: FakeKeeper) -> None:
    Job(0).train(1, 7)
    arena = keeper.arena()
    older = arena.list_sealed()[1]
    keeper.answer = rank_keeper_messages.StateGrant(source="memory", step=6, arena=keeper._path(0), slot=older.slot)
    again = Job(1)
    assert again.ckpt.restore() == 6
    assert [sealed.step for sealed in arena.list_sealed()] == [6], "step 7 was abandoned"
    again.train(7, 7)
    assert [sealed.step for sealed in arena.list_sealed()] == [7, 6]


def test_the_node_is_told_when_the_state_is_there(
    keeper: FakeKeeper, arena: tuple[str, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memory = arena
    for generation, step in ((1, 0), (2, 3)):
        monkeypatch.setenv("HOLDFAST_SLOT", f"{path}:{generation}")
        progress = RankProgress()
        monkeypatch.setattr(checkpointer, "here", progress)
        job = Job(0)
        before, began_at = read_slot(memory, generation), time.monotonic()
        assert (before is None or before.restored_at == 0.0) and job.ckpt.restore() == step
        now = read_slot(memory, generation)
        assert now and 0.0 < now.restored_at <= time.monotonic() and now.grouped_at == 0.0
        assert began_at <= now.restoring_at < now.restored_at
        if generation == 1:
            job.train(1, 3)
            newest = keeper.arena().list_sealed()[0]
            keeper.answer = rank_keeper_messages.StateGrant(
                source="memory", step=3, arena=keeper._path(0), slot=newest.slot
            )


def test_from_a_peer(keeper: FakeKeeper) -> None:
    wanted = copy.deepcopy(dict(Job(0).train(1, 3).model.state_dict()))
    fetched = os.memfd_create("fetched")
    os.write(fetched, keeper.arena().memory[:])
    slot = keeper.arena().list_sealed()[0].slot
    keeper.make(_other(keeper.wants[0]))  # this node has nothing
    keeper.answer = rank_keeper_messages.StateGrant(source="peer", step=3, arena=f"/proc/self/fd/{fetched}", slot=slot)
    again = Job(1)
    assert again.ckpt.restore() == 3
    assert same(dict(again.model.state_dict()), wanted)
    os.close(fetched)


def _other(want: rank_keeper_messages.ArenaRequest) -> rank_keeper_messages.ArenaRequest:
    return msgspec.structs.replace(want, layout="00" * 32)


def test_what_the_keeper_hears(keeper: FakeKeeper, tmp_path: Path) -> None:
    Job(0, path=tmp_path / "x", every="2min", keep=5, keep_every=100, verified=True)
    want = keeper.wants[0]
    arena = keeper.arena()
    assert (want.rank, want.world, want.slots, arena.slots) == (0, 1, 4, 4)
    assert want.share == ((0, want.image_bytes),)
    assert want.storage == rank_keeper_messages.CheckpointPolicy(
        url=str(tmp_path / "x"), every_s=120.0, keep=5, keep_every=100
    )
    metadata = dcp.decode_metadata(Path(want.metadata_path).read_bytes())
    assert "model.first.weight" in metadata.state_dict_metadata
    assert "optimizer.state.first.weight.exp_avg" in metadata.state_dict_metadata
    assert not list((tmp_path / "x").iterdir()), "writing is the keeper's work"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_just_what_was_saved(keeper: FakeKeeper, tmp_path: Path) -> None:
    """From what the keeper writes, after values that grew and shrank in the same memory."""
    job = Job(0, path=tmp_path / "x")
    for step, calls in ((1, 2**20), (2, 2**60), (3, 0)):
        job.model.calls = calls
        job.train(step, step)
        keeper.write_checkpoint(step, folder := tmp_path / f"written-{step}")
        dcp_to_torch_save(folder, tmp_path / f"{step}.pt")
        found = torch.load(tmp_path / f"{step}.pt", weights_only=False)
        wanted = dict(job.model.state_dict())
        assert job.model.calls == calls + 1 and found["model"].keys() == wanted.keys()
        assert all(same(found["model"][name], kept) for name, kept in wanted.items())
        assert found.keys() == {"model", "optimizer", EXTRA}
        [group] = found["optimizer"]["param_groups"]
        assert group["lr"] == job.optimizers[0].param_groups[0]["lr"]


def test_a_full_disk_costs_copies_and_no_training_until_there_is_room(
    keeper: FakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(keeper_client, "_ROOM_S", 0.0)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        job = Job(0, path=tmp_path / "x").train(1, 2)
    assert keeper.arena().list_sealed()[0].step == 2, "snapshots are taken all the same"
    why = f"cannot write into {tmp_path}: No space left on device"
    [told] = [line for line in capsys.readouterr().err.splitlines() if "cannot write" in line]
    assert told == f"holdfast: rank 0 {why}; until it can, its state has no copies elsewhere"
    want = keeper.wants[0]
    layout = tmp_path / rank_keeper_messages.layout_file_name(0, want.layout)
    assert not layout.exists() and not Path(want.metadata_path).exists() and not list(tmp_path.glob(".*"))
    job.train(3, 3)
    assert layout.exists() and Path(want.metadata_path).exists() and not capsys.readouterr().err


def test_a_keeper_that_comes_back(keeper: FakeKeeper) -> None:
    keeper.hang_up = 2
    job = Job(0).train(1, 1)
    keeper.hang_up = 2
    assert Job(1).ckpt.restore() == 1
    assert job.ckpt.save(2)


def test_a_keeper_that_says_no(keeper: FakeKeeper) -> None:
    keeper.answer = refusal = rank_keeper_messages.KeeperRefusal(why="snapshots would take 3 GB of 2 GB")
    with pytest.raises(KeeperError, match=refusal.why):
        Job(0)


def test_a_keeper_that_is_gone(tmp_path: Path) -> None:
    link = KeeperClient(str(tmp_path / "nobody"), lost_s=0.3)
    with pytest.raises(KeeperError, match=re.escape(str(link.path))):
        link.request_state(rank_keeper_messages.StateRequest(rank=0, generation=0))


def test_a_snapshot_of_another_model(keeper: FakeKeeper) -> None:
    Job(0).train(1, 2)
    slot, path = keeper.arena().list_sealed()[0].slot, os.memfd_create("old")
    os.write(path, keeper.arena().memory[:])
    keeper.answer = rank_keeper_messages.StateGrant(source="memory", step=2, arena=f"/proc/self/fd/{path}", slot=slot)
    ckpt = Checkpointer(model=nn.Linear(3, 3))
    with pytest.raises(StateError, match=r"\bstep \d+\b"):
        ckpt.restore()
    os.close(path)


def test_arena_of_another_layout_is_refused(keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(0)
    monkeypatch.setattr(keeper, "make", lambda want: keeper._path(0))
    with pytest.raises(StateError, match=r"/"):
        Checkpointer(model=nn.Linear(1, 1))
    assert isinstance(keeper.arena(), Arena)


def test_where_every_state_is_in_doubt_no_step_is_begun_at(keeper: FakeKeeper, tmp_path: Path) -> None:
    keeper.answer = rank_keeper_messages.StateGrant(source="none", run="run", doubted=375)
    with pytest.raises(StateError, match=r"\b375\b"):
        Job(1).ckpt.restore()
    keeper.answer = rank_keeper_messages.StateGrant(source="none", run="run")
    assert Job(2).ckpt.restore() == 0
