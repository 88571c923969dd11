"""Checks of snapshots of a state that captured CUDA graphs change; `checkpoint_cuda.py` runs them."""

import contextlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.snapshot.cuda_graph_replays import GraphWatch
from tests.client.fake_keeper import FakeKeeper
from tests.gpu.counted_state import BUSY, Counted, Counting, Found, looked_at, snapshots_of

SAVES = 200
WARM = 3  # steps that torch wants before a capture
STEPS, KILLED = 14, 9


class CountedGraph:
    """A whole step in a graph; each number is that of the step, which warm-up makes the first few of."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.model = Counted(size).cuda()
        self.optimizer = Counting(self.model.parameters(), lr=1.0)
        self.graph = torch.cuda.CUDAGraph()
        self.takes_s = 0.0  # a capture, beside what is captured

    def step(self) -> None:
        self.model().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.step()
            time.sleep(self.takes_s)

    def train(self, step: int, *, mixed: bool) -> None:
        if step % 5 == 0:
            torch.cuda._sleep(BUSY)
        if step <= WARM:
            return  # warm-up was that
        if mixed and step % 3 == 0:
            self.step()
        else:
            self.graph.replay()


def captured_steps(keeper: FakeKeeper) -> Found:
    """Graphs that are captured after the Checkpointer is made and before, alone and between other steps."""
    found: Found = {}
    for early in (False, True):
        for mixed in (False, True):
            job = CountedGraph((1 << 20) + 64 * len(found))  # memory of its own
            if early:
                job.capture()
            ckpt = Checkpointer(model=job.model, optimizer=job.optimizer)
            if not early:
                job.capture()
            name = f"captured {'before' if early else 'after'}{', mixed' if mixed else ''}"
            found[name] = looked_at(
                ckpt, keeper.arena(), lambda step, job=job, mixed=mixed: job.train(step, mixed=mixed), SAVES, WARM  # type: ignore[misc]
            )  # fmt: skip
            side = snapshots_of(ckpt).side
            assert side and not side._hold, f"{name}: training was held up"
    return found


def captured_optimizer(keeper: FakeKeeper) -> Found:
    """The optimizer alone is captured: copies run beside the passes before its replay, and nobody waits on the host."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 5):
        graph.replay()
        assert ckpt.save(step)
    ckpt.wait()
    graph.replay()
    torch.cuda._sleep(40 * BUSY)  # the GPU is away, with a replay behind it
    graph.replay()
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    began = time.perf_counter()
    assert ckpt.save(6)
    saved = time.perf_counter()
    for _ in range(3):
        graph.replay()
    replayed = time.perf_counter()
    assert 6 not in [one.step for one in keeper.arena().list_sealed()], "the GPU was not away for long enough"
    ckpt.wait()
    sealed = keeper.arena().list_sealed()[0]
    assert sealed.step == 6
    image = snapshots_of(ckpt).images[sealed.slot]
    keys = [f"model.{name}" for name, _ in model.named_parameters()]
    where = {item.spec.key: index for index, item in enumerate(image.layout.items)}
    same = [torch.equal(image.payloads[where[key]], one.cpu()) for key, one in zip(keys, wanted, strict=True)]
    assert all(same), f"{same.count(False)} of {len(same)} parameters are of another step"
    counts = {float(image.payloads[index]) for key, index in where.items() if key.endswith(".step")}
    assert counts == {7.0}, f"the optimizer had made 7 steps, not {counts}"
    return {"save, ms": 1e3 * (saved - began), "3 replays, ms": 1e3 * (replayed - saved), "parameters": len(same)}


class CapturedTraining:
    """Dropout, AdamW(capturable=True) and a rate that is a tensor, all in one graph; data follow from the step."""

    def __init__(self) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.model = nn.Sequential(*layers, nn.BatchNorm1d(512)).cuda()
        rate = torch.tensor(1e-3, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, capturable=True)
        self.inputs = torch.zeros(32, 512, device="cuda")
        self.graph = torch.cuda.CUDAGraph()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        (self.model(self.inputs) - self.inputs).square().mean().backward()
        self.optimizer.step()

    def prepare(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.step()

    def train(self, number: int) -> None:
        made = torch.Generator("cuda").manual_seed(number)
        self.inputs.copy_(torch.randn(32, 512, device="cuda", generator=made))
        self.optimizer.param_groups[0]["lr"].mul_(0.95)
        self.graph.replay()

    def state(self) -> list[torch.Tensor]:
        kept = [tensor for own in self.optimizer.state.values() for tensor in own.values()]
        rate = self.optimizer.param_groups[0]["lr"]
        return [tensor.detach().cpu() for tensor in (*self.model.state_dict().values(), *kept, rate)]


def in_a_process(work: Callable[[], None]) -> int:
    """What a process ended with that had CUDA to itself."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_and_restored(keeper: FakeKeeper) -> Found:
    """SIGKILL with replays and copies queued; the next process captures anew, restores in place, and ends as a calm run
    does, bit for bit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(into: str, *, killed: bool = False, kept: bool = True) -> None:
            training = CapturedTraining()
            ckpt = Checkpointer(model=training.model, optimizer=training.optimizer) if kept else None
            training.prepare()
            start = ckpt.restore() if ckpt else 0
            (folder / f"{into}-start").write_text(str(start))
            for step in range(start + 1, STEPS + 1):
                training.train(step)
                if ckpt:
                    assert ckpt.save(step)
                if killed and step == KILLED:
                    torch.cuda._sleep(BUSY)
                    training.train(step + 1)
                    os.kill(os.getpid(), signal.SIGKILL)
            if ckpt:
                ckpt.close()
            torch.save(training.state(), folder / into)

        assert in_a_process(lambda: run("calm", kept=False)) == 0
        assert in_a_process(lambda: run("killed", killed=True)) == -signal.SIGKILL
        assert in_a_process(lambda: run("again")) == 0
        start = int((folder / "again-start").read_text())
        assert 0 < start <= KILLED, f"it began again at {start}"
        wanted, again = torch.load(folder / "calm"), torch.load(folder / "again")
        same = [torch.equal(one, other) for one, other in zip(wanted, again, strict=True)]
        assert all(same), f"{same.count(False)} of {len(same)} tensors differ"
        return {"killed after": KILLED, "began again after": start, "tensors compared": len(same)}


def captured_at_once(keeper: FakeKeeper) -> Found:
    """A capture right after the Checkpointer is made, while its memory is still being registered with the GPU."""
    whole: dict[str, str] = {}
    for gated in (True, False):

        def run(gated: bool = gated) -> None:
            job = CountedGraph(1 << 27)  # 7 GB: their memory takes seconds to register
            job.takes_s = 1.0
            keep = contextlib.nullcontext() if gated else mock.patch.object(GraphWatch, "between_captures", _open)
            with keep:
                ckpt = Checkpointer(model=job.model, optimizer=job.optimizer)
                for _ in range(2):
                    job.graph = torch.cuda.CUDAGraph()
                    job.capture()
                assert ckpt.save(1)
                ckpt.wait()

        whole["our threads wait" if gated else "they do not"] = "whole" if in_a_process(run) == 0 else "failed"
    # Whether a thread that does not wait comes into a capture is a matter of moments; that it may was seen.
    assert whole["our threads wait"] == "whole", f"{whole}"
    return {"capture while memory is registered": whole}


@contextlib.contextmanager
def _open(_: GraphWatch) -> Iterator[None]:
    yield


def saved_in_a_capture(keeper: FakeKeeper) -> Found:
    """A save inside of a capture is refused in a sentence, and the graph is whole."""
    job = CountedGraph()
    ckpt = Checkpointer(model=job.model, optimizer=job.optimizer)
    job.capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.step()
        assert not ckpt.save(1)
    graph.replay()
    assert ckpt.save(WARM + 1)
    ckpt.close()
    assert [one.step for one in keeper.arena().list_sealed()] == [WARM + 1]
    assert job.model.small[0].item() == WARM + 1
    return {"skipped": ckpt.skipped}


def compiled_graphs(keeper: FakeKeeper) -> Found:
    """Graphs that torch.compile makes, of the model and of the optimizer's step; what is saved is the state then."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    forward = torch.compile(model, mode="reduce-overhead")
    step = torch.compile(optimizer.step, mode="reduce-overhead")
    wanted: dict[int, list[torch.Tensor]] = {}
    looked = 0
    for number in range(1, 41):
        torch.compiler.cudagraph_mark_step_begin()
        forward(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        step()
        optimizer.zero_grad(set_to_none=True)
        wanted[number] = [parameter.detach().clone() for parameter in model.parameters()]
        if number % 5 == 0:
            torch.cuda._sleep(BUSY)
        assert ckpt.save(number)
    ckpt.close()
    for sealed in keeper.arena().list_sealed():
        image = snapshots_of(ckpt).images[sealed.slot]
        where = {item.spec.key: index for index, item in enumerate(image.layout.items)}
        for (name, _), one in zip(model.named_parameters(), wanted[sealed.step], strict=True):
            assert torch.equal(image.payloads[where[f"model.{name}"]], one.cpu()), f"step {sealed.step}: {name}"
            looked += 1
    return {"parameters looked at": looked}


CHECKS = {
    "steps in captured graphs": captured_steps,
    "a captured optimizer": captured_optimizer,
    "captured, killed, restored": killed_and_restored,
    "captured while memory is registered": captured_at_once,
    "saved inside of a capture": saved_in_a_capture,
    "compiled graphs": compiled_graphs,
}
