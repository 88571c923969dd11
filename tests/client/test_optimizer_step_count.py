"""Scripts that import nothing still report progress."""

import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.wire.rank_memory.slot_reader import SlotReading, read_slot
from tests.client.conftest import ENV, Zygote

pytestmark = pytest.mark.e2e

Arena = tuple[str, mmap.mmap]

SCRIPT = """
import os, torch
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
END = """
if __name__ == "__main__":
    os._exit(0)  # what counts is in the slot by then
"""


def after(zygote: Zygote, arena: Arena, script: str) -> SlotReading:
    (zygote.folder / "counted.py").write_text(script + END)
    ended = zygote.run("counted.py", HOLDFAST_SLOT=f"{arena[0]}:1", HOLDFAST_GENERATION="2", RANK="6")
    assert ended.code == 0, ended.err
    now = read_slot(arena[1], 1)
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


SCALED = """
import os, torch
net = torch.nn.Linear(2, 2)
optimizer, other = (torch.optim.SGD(net.parameters()) for _ in range(2))
scaler = torch.amp.GradScaler("cpu")
def step(optimizer, scale=1.0):
    optimizer.zero_grad()
    scaler.scale(scale * net(torch.ones(2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
for scale in (1.0, 1.0, float("nan"), 1.0, {last}):
    step(optimizer, scale)
    step(other, float("nan"))
"""


@pytest.mark.parametrize(("last", "made", "skipped"), [("float('inf'), float('nan')", 3, 2), ("1.0", 4, 0)])
def test_updates_that_a_scaler_skips_are_counted(
    warm: Zygote, arena: Arena, last: str, made: int, skipped: int
) -> None:
    now = after(warm, arena, SCALED.format(last=last))
    assert (now.step, now.skipped_updates) == (made, skipped)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_children_do_not_count(warm: Zygote, arena: Arena, method: str) -> None:
    script = f"""
import multiprocessing, os, torch
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
    os._exit(child.exitcode)
"""
    assert after(warm, arena, script).step == 5


@pytest.mark.slow  # the compiler alone is two seconds of imports
def test_a_compiled_step_counts(warm: Zygote, arena: Arena) -> None:
    script = SCRIPT.replace("optimizer.step()", "torch.compile(optimizer.step, backend='eager')()")
    assert after(warm, arena, script).step == 3


GROUPS = """
import os, torch.distributed as dist
{}
{}
assert dist.is_initialized()
print(dist.init_process_group.__module__, dist.get_world_size(), flush=True)
{}
os._exit(0)
"""
CALLS = [
    "dist.init_process_group('gloo')",
    "from torch.distributed import init_process_group; init_process_group(backend='gloo')",
    "from torch.distributed.device_mesh import init_device_mesh; init_device_mesh('cpu', (4,))",
]


@pytest.mark.parametrize("call", CALLS)
def test_the_process_group_is_told_of(
    warm: Zygote, arena: Arena, group: Callable[[], list[dict[str, str]]], call: str
) -> None:
    (warm.folder / "groups.py").write_text(GROUPS.format("", call, "dist.barrier()"))
    began = time.monotonic()
    envs = [env | {"HOLDFAST_SLOT": f"{arena[0]}:{env['RANK']}"} for env in group()]
    for rank in warm.forks(envs, "groups.py"):
        ended = warm.wait(rank)
        assert (ended.code, ended.out) == (0, "torch.distributed.distributed_c10d 4\n"), ended.err
    for index in range(4):
        now = read_slot(arena[1], index)
        assert now and began < now.grouped_at < time.monotonic()
        assert (now.restored_at, now.step) == (0.0, -1)


def test_a_group_that_cannot_be_made_raises_as_ever(warm: Zygote, arena: Arena) -> None:
    (warm.folder / "groups.py").write_text(GROUPS.format("", "dist.init_process_group('nonsense')", ""))
    ended = warm.run("groups.py", HOLDFAST_SLOT=f"{arena[0]}:1", RANK="0", WORLD_SIZE="1")
    assert ended.code == 1 and "nonsense" in ended.err
    now = read_slot(arena[1], 1)
    assert now and now.grouped_at == 0.0


ALONE = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "told"), [("import holdfast", True), pytest.param("", False, marks=pytest.mark.slow)]
)
def test_a_fresh_interpreter_tells_once_it_has_imported_holdfast(
    tmp_path: Path, arena: Arena, imported: str, told: bool
) -> None:
    script = tmp_path / "groups.py"
    script.write_text(GROUPS.format(imported, ALONE, "import holdfast; holdfast.step(1)"))
    env = ENV | {"HOLDFAST_SLOT": f"{arena[0]}:1"}
    subprocess.run([sys.executable, str(script)], env=env, check=True, timeout=100)
    now = read_slot(arena[1], 1)
    assert now and now.step == 1 and bool(now.grouped_at) == told


EARLY = """
import sys
print("torch._dynamo" in sys.modules, flush=True)
"""
COMPILED = """
step = torch.compile(lambda: first.step(), backend="eager")
for _ in range(4):
    nets[0](torch.ones(2)).sum().backward()
    step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", pytest.param(COMPILED, marks=pytest.mark.slow)])
def test_steps_are_counted_without_the_compiler_imported_first(tmp_path: Path, arena: Arena, more: str) -> None:
    """It takes longer to import than torch, and many scripts print something before they need it."""
    zygote = Zygote(("torch",), tmp_path)
    (tmp_path / "counted.py").write_text(EARLY + SCRIPT + more + END)
    ended = zygote.run("counted.py", HOLDFAST_SLOT=f"{arena[0]}:1", HOLDFAST_GENERATION="2", RANK="6")
    zygote.close()
    assert (ended.code, ended.out) == (0, "False\n"), ended.err
    now = read_slot(arena[1], 1)
    assert now and (now.step, now.counted) == (7 if more else 3, True)
