"""Snapshots by a GPU, with streams that work in any order: what is sealed is whole, and of one step."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.checkpoint.arena import Arena, SnapshotName
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout, arrange_image
from holdfast.checkpoint.state_image import StateImage, TensorHolders, extra_spec, flatten_state, record_sizes
from holdfast.client.snapshot import side_stream as module
from holdfast.client.snapshot.copy_routes import DEVICE, HOST, NOTHING, choose_routes, lengthen_tail
from holdfast.client.snapshot.cuda_graph_replays import GRAPH_WATCH
from holdfast.client.snapshot.side_stream import SideStream
from holdfast.client.snapshot.state_item_locations import ABSENT, CurrentItems
from tests.client.fake_streams import FakeStreams

BIG_BYTES = 1 << 10  # what counts as large here
BIG = BIG_BYTES // 4


class Gpu:
    """A training loop on a GPU that is always behind."""

    def __init__(self, seed: int, *, slots: int = 2, guarded: bool = True) -> None:
        self.streams = FakeStreams(seed)
        self.parameters = {f"w{n}": torch.zeros(BIG + n) for n in range(4)} | {"x": torch.zeros(5)}
        self.buffers = {"b0": torch.zeros(3), "b1": torch.zeros(BIG + 1)}
        self.count = torch.zeros(())  # on the host, as optimizers have it
        self.value = 0.0
        found = flatten_state(
            {**self.parameters, **self.buffers, "count": self.count, "value": 0.0}, lambda _: TensorHolders((0,), (0,))
        )
        self.layout: ImageLayout = arrange_image([*found.specs, extra_spec(512, 0, 1)], record_sizes, rank=0, world=1)
        self._fd = os.memfd_create("arena")
        make = {"layout": self.layout.digest, "image_bytes": self.layout.image_bytes, "slots": slots}
        self.arena = Arena.make(self._fd, **make)  # type: ignore[arg-type]
        self.reader = Arena.open(f"/proc/self/fd/{self._fd}")
        self.images = [StateImage(self.layout, self.reader.slot_image(slot)) for slot in range(slots)]
        for image in self.images:
            image.write_frames()
        safe = [guarded and item.spec.key in self.parameters for item in self.layout.items]
        self.said: list[str] = []
        self.side = SideStream(
            self.layout, self.arena, safe, self.streams, lambda slot, end: None, say=self.said.append  # type: ignore[arg-type]
        )  # fmt: skip
        self.absent: dict[int, set[str]] = {}  # by step
        self.newest = 0

    def close(self) -> None:
        self.side.drain()
        os.close(self._fd)

    def things(self, step: int) -> CurrentItems:
        things = [self._thing(step, item.spec.key) for item in self.layout.items]
        return CurrentItems(sum(1 << index for index, thing in enumerate(things) if thing is ABSENT), things, [])

    def save(self, step: int) -> bool:
        named = SnapshotName(step=step, generation=1)
        return self.side.queue_snapshot(named, self.things(step), step.to_bytes(8, "little")) is not None

    def train(self, step: int) -> None:
        """Queue one step: forward changes buffers, the optimizer everything else."""
        self._queue(self.buffers, step)
        self.side.before_step()
        self.streams.reached += [wait.reached for wait in self.side._waits]
        self._queue(self.parameters, step)
        self.count.fill_(step)
        self.value = float(step)

    def capture(self, *, steps: bool) -> "Graph":
        """Capture a graph, with the optimizer's step in it or without."""
        graph, self.streams.capturing = Graph(), True
        GRAPH_WATCH.on_capture(graph)
        if steps:
            self.side.before_step()  # as the optimizer's hook does
        GRAPH_WATCH.on_captured(graph)
        self.streams.capturing = False
        return graph

    def replay(self, graph: "Graph", step: int) -> None:
        """Queue one step that is all in a graph."""
        GRAPH_WATCH.on_replay(graph)
        self._queue(self.buffers, step)
        self._queue(self.parameters, step)
        self.count.fill_(step)
        self.value = float(step)

    def waits(self) -> int:
        """How often what is queued for computing waits for a copy."""
        return sum(isinstance(piece, tuple) for piece in self.streams.main.queue)

    def check(self) -> None:
        """Everything that is sealed now is whole."""
        steps = []
        for sealed in self.reader.list_sealed():
            image = self.images[sealed.slot]
            for index, item in enumerate(self.layout.items):
                if item.spec.key not in self.absent.get(sealed.step, ()):
                    assert self._seen(image, index, item.spec.key) == sealed.step, item.spec.key
            steps.append(sealed.step)
        assert steps[:1] >= [self.newest] or not self.newest, "what was sealed stays until the next is"
        self.newest = max([self.newest, *steps])

    def _seen(self, image: StateImage, index: int, key: str) -> float:
        if key == EXTRA:
            return int.from_bytes(image.payload_bytes(index)[:8], "little")
        if key == "value":
            return image.get_value(index)  # type: ignore[return-value]
        low, high = image.payloads[index].aminmax()
        return float(low) if low == high else float("nan")

    def _thing(self, step: int, key: str) -> Any:
        if key in self.absent.get(step, ()):
            return ABSENT
        return {**self.parameters, **self.buffers, "count": self.count, "value": self.value}.get(key, ABSENT)

    def _queue(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        for tensor in tensors.values():
            half = len(tensor) // 2
            for part in (tensor[:half], tensor[half:]):
                self.streams._add(self.streams.main, lambda part=part: part.fill_(step))


class Graph:
    """What stands for a CUDA graph."""


def assert_true(found: object) -> None:
    assert found


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU all tensors are on the host; which of them are not is told by their names."""

    def kinds_of(layout: ImageLayout, things: list[object]) -> list[str]:
        kinds = {"count": HOST, "value": HOST, EXTRA: HOST}
        return [
            NOTHING if thing is ABSENT and item.spec.key != EXTRA else kinds.get(item.spec.key, DEVICE)
            for item, thing in zip(layout.items, things, strict=True)
        ]

    monkeypatch.setattr(module, "kinds_of", kinds_of)
    monkeypatch.setattr("holdfast.checkpoint.image_layout.BIG_BYTES", BIG_BYTES)
    monkeypatch.setattr("holdfast.client.snapshot.copy_routes.BIG_BYTES", BIG_BYTES)
    monkeypatch.setattr(FakeStreams, "reached", [])


@pytest.fixture
def gpus() -> Iterator[list[Gpu]]:
    made: list[Gpu] = []
    yield made
    for gpu in made:
        gpu.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.parametrize("guarded", [True, False])
def test_never_torn_never_stale(gpus: list[Gpu], seed: int, guarded: bool) -> None:
    gpu = Gpu(seed, slots=2 + seed % 2, guarded=guarded)
    gpus.append(gpu)
    gpu.streams.looks = gpu.check
    for step in range(1, 12):
        gpu.train(step)
        assert gpu.save(step)
        gpu.streams.pump(gpu.streams.chance.choice([0, 0, 1, 10, 60]))
    gpu.side.drain()
    assert gpu.newest == 11
    assert len(gpu.reader.list_sealed()) == gpu.arena.slots


def test_the_processor_does_not_wait(gpus: list[Gpu]) -> None:
    gpu = Gpu(0)
    gpus.append(gpu)
    for step in range(1, 4):
        gpu.train(step)
        assert gpu.save(step)
    assert gpu.streams.synced == 0 and not gpu.reader.list_sealed(), "the GPU has done nothing yet"
    gpu.train(4)
    assert gpu.save(4)
    assert gpu.streams.synced == 1, "so far ahead it has to"


def test_the_optimizer_waits_on_the_gpu(gpus: list[Gpu]) -> None:
    gpu = Gpu(0)
    gpus.append(gpu)
    gpu.train(1)
    gpu.save(1)
    gpu.train(2)
    gpu.side._turns[-1].result()
    while gpu.streams._can(gpu.streams.main):  # all that can be done without the copies
        piece = gpu.streams.main.queue.popleft()
        if callable(piece):
            piece()
        elif not isinstance(piece, tuple):
            piece.done = True
    assert gpu.streams.main.queue, "the optimizer stands before the copies"
    assert gpu.parameters["w0"].unique().tolist() == [1]
    assert gpu.buffers["b1"].unique().tolist() == [2], "and the forward pass did not"


def test_what_does_not_fit_is_copied_on_the_gpu_first(gpus: list[Gpu]) -> None:
    gpu = Gpu(0)
    gpus.append(gpu)
    gpu.streams.looks = gpu.check
    for step in range(1, 8):
        gpu.train(step)
        gpu.save(step)
        gpu.streams.had_s, gpu.streams.took_s = 1.0, 0.4 * len(gpu.side.ways.split.direct)
        while gpu.streams.pump():
            pass
    keys = {gpu.layout.items[index].spec.key for index in gpu.side.ways.split.tail}
    assert keys == {"w2", "w3"}, "as much as does not fit"
    assert gpu.newest == 7
    assert len(gpu.side.ways.split.direct) == 2


def test_a_tail_lets_nothing_stand_still(gpus: list[Gpu]) -> None:
    gpu = Gpu(0)
    gpus.append(gpu)
    for step in range(1, 7):
        gpu.train(step)
        gpu.save(step)
        gpu.streams.had_s, gpu.streams.took_s = 1.0, 2.0
        gpu.side._turns[-1].result()
        while gpu.streams.pump():
            pass
    assert gpu.side.ways.split.tail
    gpu.train(7)
    before = len(gpu.streams.main.queue)
    gpu.save(7)
    copies = [piece for piece in list(gpu.streams.main.queue)[before:] if callable(piece)]
    assert len(copies) == 4, "of buffers alone, each in halves"


def test_memory_that_comes_late(gpus: list[Gpu]) -> None:
    """The first save does not wait until the GPU can reach its slot, and nothing is judged by such a copy."""
    gpu = Gpu(1)
    gpus.append(gpu)
    at_hand = threading.Event()
    gpu.side._reach = lambda slot, end: assert_true(at_hand.wait(30))
    gpu.streams.looks = gpu.check
    gpu.train(1)
    assert gpu.save(1)
    threading.Timer(0.05, at_hand.set).start()
    gpu.train(2)
    assert gpu.side._turns[0].result().late and not gpu.side._waits
    assert gpu.save(2)
    gpu.train(3)
    assert len(gpu.side._waits) == 1
    gpu.side.drain()
    assert gpu.newest == 2


def test_let_go_of_with_copies_on_their_way(gpus: list[Gpu]) -> None:
    gpu = Gpu(2)
    gpu.train(1)
    gpu.save(1)
    reader, streams = gpu.reader, gpu.streams
    gpu.side._turns[-1].result()
    del gpu.side
    gc.collect()
    until = time.monotonic() + 30
    while not reader.list_sealed():  # by whichever thread was the last to know it
        assert time.monotonic() < until
        time.sleep(0.01)
    assert streams.synced == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("known", [True, False], ids=["known", "captured before the Checkpointer was made"])
def test_replayed_steps_between_others(gpus: list[Gpu], seed: int, known: bool) -> None:
    """Odd batches are no replay; the copies of their snapshots are under way when the next replay comes."""
    gpu = Gpu(seed)
    gpus.append(gpu)
    graph = gpu.capture(steps=True) if known else Graph()
    gpu.streams.looks = gpu.check
    for step in range(1, 16):
        if step % 3 == 0:
            gpu.train(step)
        else:
            gpu.replay(graph, step)
        assert gpu.save(step)
        gpu.streams.pump(gpu.streams.chance.choice([0, 0, 1, 10, 60]))
    gpu.side.drain()
    assert gpu.newest == 15
    assert set(gpu.said) == (set() if known else {module._UNKNOWN}), "the user hears how it can be faster"


def test_the_next_replay_waits_and_not_the_save(gpus: list[Gpu]) -> None:
    gpu = Gpu(0)
    gpus.append(gpu)
    step, forward = gpu.capture(steps=True), gpu.capture(steps=False)
    gpu.replay(step, 1)
    assert gpu.save(1) and not gpu.waits(), "copies run beside what comes"
    GRAPH_WATCH.on_replay(forward)
    assert not gpu.waits(), "and beside a graph without a step"
    gpu.replay(step, 2)
    assert gpu.waits() == 1


def test_a_capture_that_is_not_seen(gpus: list[Gpu]) -> None:
    gpu = Gpu(3)
    gpus.append(gpu)
    gpu.train(1)
    gpu.save(1)
    gpu.streams.capturing = True
    gpu.side.before_step()
    gpu.side.drain()
    gpu.streams.looks = gpu.check
    for step in range(2, 8):  # the hook is not heard of any more
        for tensors in (gpu.buffers, gpu.parameters):
            gpu._queue(tensors, step)
        gpu.count.fill_(step)
        gpu.value = float(step)
        assert gpu.save(step)
        gpu.streams.pump(5)
    gpu.side.drain()
    assert gpu.newest == 7


@pytest.mark.parametrize("captured", [True, False])
def test_steps_that_nobody_hears_of(gpus: list[Gpu], captured: bool) -> None:
    """A capture that torch's class does not know of; or no optimizer is known."""
    gpu = Gpu(6)
    gpus.append(gpu)
    gpu.streams.capturing = captured
    if captured:
        gpu.side.before_step()
    gpu.streams.looks = gpu.check
    for step in range(1, 8):
        for tensors in (gpu.buffers, gpu.parameters):
            gpu._queue(tensors, step)
        gpu.count.fill_(step)
        gpu.value = float(step)
        assert gpu.save(step)
        gpu.streams.pump(5)
    gpu.side.drain()
    assert gpu.newest == 7


def test_state_that_comes_later(gpus: list[Gpu]) -> None:
    gpu = Gpu(4)
    gpus.append(gpu)
    gpu.streams.looks = gpu.check
    gpu.absent = {step: {"w1", "x"} for step in (1, 2, 3)} | {6: {"w0"}}
    for step in range(1, 9):
        gpu.train(step)
        gpu.save(step)
        gpu.streams.pump(20)
    gpu.side.drain()
    assert gpu.newest == 8


def test_a_slot_that_is_read_is_left_alone(gpus: list[Gpu]) -> None:
    gpu = Gpu(5)
    gpus.append(gpu)
    for step in (1, 2):
        gpu.train(step)
        gpu.save(step)
        gpu.side.drain()
    newer, older = gpu.reader.list_sealed()
    assert gpu.reader.pin(older.slot, older.seq) and gpu.reader.pin(newer.slot, newer.seq)
    gpu.train(3)
    assert not gpu.save(3)
    gpu.reader.unpin(older.slot)
    assert gpu.save(4)
    assert not gpu.reader.pin(older.slot, older.seq), "it is promised"
    assert gpu.reader.slot_seq(newer.slot) == newer.seq


def test_split() -> None:
    gpu = Gpu(0)
    keys = [item.spec.key for item in gpu.layout.items]
    kinds = [HOST if key in ("count", "value", EXTRA) else DEVICE for key in keys]
    found = choose_routes(gpu.layout, kinds, [key in gpu.parameters for key in keys], ())
    assert [keys[i] for i in found.direct] == ["w0", "w1", "w2", "w3"]
    assert [keys[i] for i in found.loose] == ["b1"] and not found.tail
    assert [keys[i] for i in found.packed] == ["x"]
    assert [keys[i] for i in found.early] == ["b0"]
    assert sorted(keys[i] for i in found.host) == ["count", EXTRA, "value"]
    assert len(found.runs) == 2 and found.stage_bytes % 64 == 0
    for index, place in found.places.items():
        assert place % 64 == gpu.layout.items[index].payload % 64
    size = sum(gpu.layout.items[index].spec.bytes for index in found.direct)
    assert {keys[i] for i in lengthen_tail(gpu.layout, found, size - 1, 1 << 30)} == {"w3"}
    assert {keys[i] for i in lengthen_tail(gpu.layout, found, 0, 1 << 30)} == {"w0", "w1", "w2", "w3"}
    assert not lengthen_tail(gpu.layout, found, 0, 0), "there is no room for more"
    gpu.close()
