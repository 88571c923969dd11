"""Once a rank is told to leave, nothing that its GPU does behind an aborted sum is sealed, and what was whole stays."""

import threading
from collections.abc import Iterator

import pytest
import torch

from holdfast.checkpoint.arena import Arena, SnapshotName
from holdfast.client.snapshot.rank_snapshots import RankSnapshots
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from tests.client.fake_streams import FakeEvent
from tests.client.test_side_stream import Gpu, _kinds, gpus

__all__ = ["_kinds", "gpus"]  # fixtures


@pytest.fixture(autouse=True)
def _armed() -> Iterator[None]:
    SEAL_FENCE.armed = True
    yield
    SEAL_FENCE.lower()
    SEAL_FENCE.armed = False


def run_ahead(gpu: Gpu, good: int, until: int) -> FakeEvent:
    """Make `good` steps; then queue more behind a sum that does not end, with wrong values; return that sum."""
    for step in range(1, good + 1):
        gpu.train(step)
        assert gpu.save(step)
    gpu.side.drain()
    sum_ = FakeEvent()
    gpu.streams.wait(gpu.streams.main, sum_)
    for step in range(good + 1, until + 1):
        gpu.train(step + 1000)
        gpu.save(step)
    while gpu.streams.pump():
        pass
    return sum_


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("slots", "ahead"), [(2, 1), (3, 2), (4, 3)])
def test_what_is_queued_behind_an_aborted_sum_is_never_sealed(
    gpus: list[Gpu], seed: int, slots: int, ahead: int
) -> None:
    gpu = Gpu(seed, slots=slots)
    gpus.append(gpu)
    aborted = run_ahead(gpu, good=5, until=5 + ahead)
    assert gpu.reader.list_sealed()[0].step == 5
    SEAL_FENCE.raise_fence()
    aborted.done = True
    gpu.train(2000)
    gpu.save(9)  # by a script that has not left its function yet
    while gpu.streams.pump():
        gpu.check()
    sealed = [one.step for one in gpu.reader.list_sealed()]
    assert sealed[0] == 5 and max(sealed) == 5


def test_the_newest_whole_snapshot_is_not_given_up_for_queued_ones(gpus: list[Gpu]) -> None:
    """They may never be sealed. So a script that is far ahead waits, instead of writing over it."""
    gpu = Gpu(0, slots=2)
    gpus.append(gpu)
    aborted = run_ahead(gpu, good=3, until=4)
    waiting = threading.Thread(target=gpu.save, args=(5,))
    done = threading.Event()

    def sync(event: FakeEvent) -> None:
        done.set()
        while not event.done:
            gpu.streams.pump()

    gpu.streams.sync = sync  # type: ignore[method-assign]
    waiting.start()
    assert done.wait(60), "it waits for the snapshot before it"
    assert gpu.reader.list_sealed()[0].step == 3
    SEAL_FENCE.raise_fence()
    aborted.done = True
    waiting.join(60)
    gpu.side._turns.clear()
    assert [one.step for one in gpu.reader.list_sealed()] == [3]


def test_a_snapshot_whose_copies_have_begun_is_whole(gpus: list[Gpu]) -> None:
    gpu = Gpu(1, slots=4)
    gpus.append(gpu)
    for step in (1, 2):
        gpu.train(step)
        assert gpu.save(step)
    gpu.side._turns[-1].result()
    while not gpu.streams.is_passed(gpu.side._turns[-1].result().free):
        gpu.streams.pump()
    SEAL_FENCE.raise_fence()
    while gpu.streams.pump():
        gpu.check()
    assert gpu.reader.list_sealed()[0].step == 2


def test_the_next_generation_seals_again(gpus: list[Gpu]) -> None:
    SEAL_FENCE.raise_fence()
    between, after = Gpu(0), None
    gpus.append(between)
    SEAL_FENCE.lower()
    after = Gpu(0)
    gpus.append(after)
    for gpu in gpus:
        gpu.train(1)
        assert gpu.save(1)
        gpu.side.drain()
    assert [len(gpu.reader.list_sealed()) for gpu in gpus] == [0, 1], "one that began behind the fence stays there"


def test_copies_by_the_processor_stop_at_the_fence_too(gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0)
    gpus.append(gpu)
    snapshots = RankSnapshots(gpu.layout, Arena.open(f"/proc/self/fd/{gpu._fd}"), "")
    things = gpu.things(1)
    name = SnapshotName(step=1, generation=1)
    assert snapshots.take_snapshot(name, things, b"") is not None
    copies = snapshots._copier.copy_moves

    def blocked(moves: object) -> None:  # until the abort lets the copy of a tensor end
        copies(moves)  # type: ignore[arg-type]
        SEAL_FENCE.raise_fence()

    monkeypatch.setattr(snapshots._copier, "copy_moves", blocked)
    torch.manual_seed(0)
    assert snapshots.take_snapshot(SnapshotName(step=2, generation=1), things, b"") is None
    assert [one.step for one in gpu.reader.list_sealed()] == [1]
