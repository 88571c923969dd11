"""Until when a script sets itself up, seen from its stack."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.state_dict

from holdfast.client.training.set_up_times import SetUpWatch


class Script:
    """A thread that stands in the main thread's place and stops wherever it calls `stand`."""

    def __init__(self, work: Callable[["Script"], None]) -> None:
        self._stands, self._goes_on = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=work, args=(self,), daemon=True)
        self._thread.start()
        assert self._stands.acquire(timeout=60)
        self.watch = SetUpWatch(self._thread.ident or 0)

    def stand(self) -> None:
        self._stands.release()
        self._goes_on.acquire()

    def go_on(self) -> None:
        self._goes_on.release()
        assert self._stands.acquire(timeout=60)

    def end(self) -> None:
        self._goes_on.release()
        self._thread.join(60)


def looked(script: Script) -> float:
    before = time.monotonic()
    script.watch.look()
    return before


@pytest.fixture
def _slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stands_while_imported.py").write_text(
        "import tests.client.test_set_up_times as t\nt.running[-1].stand()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


running: list[Script] = []


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running[-1].stand()
        return x


def set_itself_up(script: Script) -> None:
    running.append(script)
    __import__("stands_while_imported")
    script.stand()  # builds its data
    Net()(torch.zeros(1))


@pytest.mark.usefixtures("_slow_module")
def test_imports_then_other_set_up_then_the_loop() -> None:
    script = Script(set_itself_up)
    imported_at = looked(script)
    script.go_on()
    set_up_at = looked(script)
    script.go_on()
    script.watch.look()  # in the model
    found = script.watch.close(trained=False)
    assert imported_at <= found[0] <= set_up_at <= found[1] <= time.monotonic()
    script.end()
    assert script.watch.close(trained=False) == found


@pytest.mark.parametrize(("trained", "known"), [(True, True), (False, False)])
def test_a_loop_that_was_too_quick_to_be_seen_is_known_by_its_optimizer(trained: bool, known: bool) -> None:
    """Without an optimizer of torch's nobody knows whether the script was in its loop already."""
    script = Script(Script.stand)
    set_up_at = looked(script)
    assert script.watch.close(trained=trained)[0] == 0.0
    assert (script.watch.close(trained=trained)[1] >= set_up_at) is known
    script.watch.look()
    script.end()


@pytest.mark.parametrize("of_loop", ["backward", "batch"])
def test_what_only_a_loop_does(of_loop: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            running[-1].stand()
            return grad

    class Rows(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            running[-1].stand()
            return index

    def loop(script: Script) -> None:
        running.append(script)
        weight = torch.ones(1, requires_grad=True)
        if of_loop == "backward":
            Double.apply(weight).backward()  # type: ignore[no-untyped-call]
        else:
            next(iter(torch.utils.data.DataLoader(Rows())))

    began = Script(loop)
    began.watch.look()
    assert began.watch.close(trained=True) == (0.0, 0.0), "nothing else was seen before it"
    began.end()


def test_a_script_that_loads_its_checkpoint_sets_itself_up() -> None:
    """torch makes an empty step of the optimizer then, so that there is a state to load into. What it keeps from its
    compiler goes through the compiler's file: such as what makes an optimizer."""

    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            running[-1].stand()

    def load(script: Script) -> None:
        running.append(script)
        model = torch.nn.Linear(1, 1)
        torch.compiler.disable(script.stand)()
        torch.distributed.checkpoint.state_dict.get_state_dict(model, Slow(model.parameters(), lr=1.0))

    script = Script(load)
    script.watch.look()
    script.go_on()
    set_up_at = looked(script)
    assert script.watch.close(trained=True)[1] >= set_up_at
    script.end()
