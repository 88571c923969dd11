"""States of the script's own on a GPU: what is sealed is the state at its save, however steps are announced."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.checkpointing.optimizer_step_pre_hook import announce_steps
from holdfast.client.snapshot import side_stream
from holdfast.client.snapshot.copy_routes import DEVICE, HOST
from holdfast.client.snapshot.side_stream import SideStream
from tests.client.fake_keeper import FakeKeeper
from tests.client.fake_streams import FakeStreams

BIG_BYTES = 1 << 10  # what counts as large here
SIZES = (5, 300, 700)
STEPS = 8


class MasterWeights:
    """As Megatron's and DeepSpeed's optimizers: weights in 32 bits of its own, a step of its own, and no torch class.

    Kernels run when the GPU gets to them; torch counts a change when it is queued.
    """

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self.weights = [torch.linspace(-1, 1, size).bfloat16() for size in SIZES]
        self.masters = [weight.float() for weight in self.weights]
        self.momenta = [torch.zeros(size) for size in SIZES]
        self.is_counted = True  # no kernel of apex is
        self.seen = torch.zeros(3)  # changes in the forward pass, as a count of tokens per expert does

    def state_dict(self) -> dict[str, Any]:
        named = {"weight": self.weights, "master": self.masters, "momentum": self.momenta}
        return {f"{name}{n}": tensor for name, all_ in named.items() for n, tensor in enumerate(all_)}

    def step(self, scale: float = 1.0) -> float:
        for weight, master, momentum in zip(self.weights, self.masters, self.momenta, strict=True):
            for tensor in (momentum, master, weight) if self.is_counted else ():
                tensor.add_(0)
            weight, master, momentum = weight.data, master.data, momentum.data  # torch counts no change of these
            self.queue(partial(_update, weight, master, momentum))
        return scale

    def forward(self) -> None:
        self.seen.add_(0)
        self.queue(partial(self.seen.data.add_, 1))

    def queue(self, kernel: Callable[[], object]) -> None:
        self._streams._add(self._streams.main, kernel)


def _update(weight: torch.Tensor, master: torch.Tensor, momentum: torch.Tensor) -> None:
    momentum.mul_(0.9).add_(weight.float())
    master.sub_(momentum, alpha=1e-2)
    weight.copy_(master)


class Trained:
    """A job on a GPU that is always behind, and a reader who looks at its snapshots after every piece of work."""

    def __init__(self, keeper: FakeKeeper, seed: int, *, followed: bool, counted: bool = False) -> None:
        self.streams = streams = FakeStreams(seed)
        self.optimizer = optimizer = MasterWeights(streams)
        state = {**optimizer.state_dict(), **({"seen": optimizer.seen} if counted else {})}
        self.state = state
        self.ckpt = Checkpointer(state_dict=lambda: state, optimizer=optimizer if followed else None)
        snapshots, source = self.ckpt._snapshots, self.ckpt._source
        assert snapshots
        self.said: list[str] = []
        self.side = SideStream(
            snapshots.layout, snapshots.arena, source.guarded_items(), streams, lambda slot, end: None,  # type: ignore[arg-type]
            say=lambda text: None if text in self.said else self.said.append(text), followed=False,
        )  # fmt: skip
        snapshots.side, self.ckpt._announce_step = self.side, self.side.before_step
        source.before_step(self.side.before_step)
        self.arena: Arena = keeper.arena()
        self.images, self.wanted, self.sealed = snapshots.images, dict[int, Any](), set[int]()
        self.blocked = 0  # saves that make what is computed after them wait for copies
        streams.looks = self.look

    def save(self, step: int) -> None:
        self.optimizer.queue(lambda: self.wanted.setdefault(step, {key: t.clone() for key, t in self.state.items()}))
        waits = self._count_waits()
        assert self.ckpt.save(step)
        self.blocked += self._count_waits() > waits

    def _count_waits(self) -> int:
        return sum(isinstance(piece, tuple) for piece in self.streams.main.queue)

    def look(self) -> None:
        for sealed in self.arena.list_sealed():
            self.sealed.add(sealed.step)
            image = self.images[sealed.slot]
            for index, item in enumerate(image.layout.items):
                if item.spec.key != EXTRA:
                    assert torch.equal(image.payloads[index], self.wanted[sealed.step][item.spec.key]), item.spec.key

    def run(self, step: Callable[[int], None]) -> None:
        """Steps and saves; the GPU does some of its work between them, and all of it now and then."""
        for number in range(1, STEPS + 1):
            self.optimizer.forward()
            step(number)
            if number % 2:
                self.finish()
            self.save(number)
            self.streams.pump(self.streams.chance.choice([0, 1, 10, 60]))
        self.ckpt.close()
        self.finish()

    def finish(self) -> None:
        while self.streams.pump():
            pass


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU all tensors are on the host; here all of them count as being on the GPU."""

    def kinds_of(layout: ImageLayout, things: list[object]) -> list[str]:
        return [HOST if item.spec.key == EXTRA else DEVICE for item in layout.items]

    monkeypatch.setattr(side_stream, "kinds_of", kinds_of)
    monkeypatch.setattr(SideStream, "can_copy", lambda self, things: True)
    monkeypatch.setattr("holdfast.checkpoint.image_layout.BIG_BYTES", BIG_BYTES)
    monkeypatch.setattr("holdfast.client.snapshot.copy_routes.BIG_BYTES", BIG_BYTES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("followed", [True, False], ids=["optimizer=", "before_step()"])
def test_copies_beside_training_are_of_their_step(keeper: FakeKeeper, seed: int, followed: bool) -> None:
    job = Trained(keeper, seed, followed=followed)

    def step(number: int) -> None:
        if not followed:
            job.ckpt.before_step()
        assert job.optimizer.step(scale=2.0) == 2.0

    job.run(step)
    assert job.sealed >= {STEPS - 1, STEPS} and not job.said
    assert not job.blocked, "training goes on after every save"


@pytest.mark.parametrize("seed", range(4))
def test_without_announcements_training_waits(keeper: FakeKeeper, seed: int) -> None:
    job = Trained(keeper, seed, followed=False)
    job.run(lambda number: assert_step(job))
    assert job.sealed >= {STEPS - 1, STEPS} and job.blocked
    assert job.said == [side_stream._UNTOLD]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_announced_too_late_is_dropped(keeper: FakeKeeper, seed: int) -> None:
    job = Trained(keeper, seed, followed=False)

    def step(number: int) -> None:
        job.optimizer.step()
        job.ckpt.before_step()

    job.run(step)
    assert job.sealed == set(range(2, STEPS + 1)), "the first copy was under way while its state changed"
    assert " 8 more " in job.said[0] and "before_step()" in job.said[0]
    assert job.side._hold, "from now on training waits"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("counted", [True, False])
def test_what_is_not_announced_once_is_dropped(keeper: FakeKeeper, seed: int, counted: bool) -> None:
    job = Trained(keeper, seed, followed=False)
    job.optimizer.is_counted = counted

    def step(number: int) -> None:
        if number != 5:
            job.ckpt.before_step()
        job.optimizer.step()

    job.run(step)
    assert 4 not in job.sealed and job.sealed >= {5, STEPS - 1, STEPS}
    assert any("before_step()" in text for text in job.said)


@pytest.mark.parametrize("seed", range(4))
def test_a_small_part_that_changes_unannounced_is_copied_at_once(keeper: FakeKeeper, seed: int) -> None:
    job = Trained(keeper, seed, followed=True, counted=True)
    job.run(lambda number: assert_step(job))
    assert 1 not in job.sealed and job.sealed >= {2, STEPS - 1, STEPS}, "what is learned from the first is kept to"
    assert len(job.said) == 1 and " seen " in job.said[0]
    at_once = {item.spec.key for index, item in enumerate(job.side._layout.items) if not job.side._guarded[index]}
    assert at_once - {EXTRA} == {"seen"} and not job.side._hold


def test_a_step_stays_a_method_and_its_class_what_it_was() -> None:
    calls: list[str] = []
    optimizer = MasterWeights(FakeStreams(0))
    announced = announce_steps([optimizer, torch.optim.SGD([torch.ones(1, requires_grad=True)])])
    announced.call_before_steps(lambda: calls.append("step"))
    assert optimizer.step(3.0) == 3.0 and calls == ["step"]
    assert isinstance(optimizer.step, MethodType) and optimizer.step.__self__ is optimizer
    assert type(optimizer) is MasterWeights and MasterWeights(FakeStreams(0)).step() == 1.0
    assert calls == ["step"], "others of its class are not followed"


def test_a_torch_optimizer_beside_a_state_dict_is_followed() -> None:
    calls: list[str] = []
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    announce_steps(optimizer).call_before_steps(lambda: calls.append("step"))
    optimizer.step()
    assert calls == ["step"]


def assert_step(job: Trained) -> None:
    assert job.optimizer.step() == 1.0
