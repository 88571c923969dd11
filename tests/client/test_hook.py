"""Scripts that import nothing still report progress."""

import mmap

import pytest

from holdfast.wire.slot import Reading, read
from tests.client.conftest import Zygote

pytestmark = pytest.mark.e2e

Arena = tuple[str, mmap.mmap]

SCRIPT = """
import torch
nets = [torch.nn.Linear(2, 2) for _ in range(2)]
first, second = torch.optim.AdamW(nets[0].parameters()), torch.optim.SGD(nets[1].parameters())
def step(optimizer, net):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
for _ in range(3):
    step(first, nets[0])
    step(second, nets[1])
    step(second, nets[1])
"""


def after(zygote: Zygote, arena: Arena, script: str) -> Reading:
    (zygote.folder / "counted.py").write_text(script)
    ended = zygote.run("counted.py", HOLDFAST_SLOT=f"{arena[0]}:1", HOLDFAST_GENERATION="2", RANK="6")
    assert ended.code == 0, ended.err
    now = read(arena[1], 1)
    assert now
    return now


def test_steps_of_the_first_optimizer_count(warm: Zygote, arena: Arena) -> None:
    now = after(warm, arena, SCRIPT)
    assert (now.generation, now.rank, now.step, now.first_step, now.counted) == (2, 6, 3, 1, True)


def test_a_script_that_tells_is_believed(warm: Zygote, arena: Arena) -> None:
    now = after(
        warm, arena, SCRIPT + "import holdfast\nholdfast.step(50, loss=nets[0].weight.sum())\nstep(first, nets[0])"
    )
    assert (now.step, now.counted, now.first_step) == (50, False, 50)
    assert now.loss is not None


def test_a_count_is_not_shown_before_the_script_could_tell(warm: Zygote, arena: Arena) -> None:
    now = after(warm, arena, SCRIPT.replace("range(3)", "range(1)"))
    assert (now.step, now.generation) == (-1, 2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_do_not_count(warm: Zygote, arena: Arena, method: str) -> None:
    script = f"""
import multiprocessing, torch
def work():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(5):
        optimizer.step()
if __name__ == "__main__":
    work()
    child = multiprocessing.get_context("{method}").Process(target=work)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
    assert after(warm, arena, script).step == 5


def test_a_compiled_step_counts(warm: Zygote, arena: Arena) -> None:
    script = SCRIPT.replace("optimizer.step()", "torch.compile(optimizer.step, backend='eager')()")
    assert after(warm, arena, script).step == 3
