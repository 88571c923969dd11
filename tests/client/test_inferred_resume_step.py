"""What a rank goes on from, known without a word of its script."""

import mmap
import time
from pathlib import Path

import pytest

from holdfast.agent.rank.node_beat import show_first_step
from holdfast.wire.rank_memory.slot_reader import clear_slot, read_slot
from tests.client.conftest import Zygote

pytestmark = pytest.mark.e2e

Arena = tuple[str, mmap.mmap]

TRAIN = """
import os, sys, torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.{optimizer}(net.parameters())
def train(steps):
    for _ in range(steps):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
{then}
os._exit(0)  # what counts is in the slot by then
"""
SAVE = "train(7)\ntorch.save([net.state_dict(), optimizer.state_dict()], 'state.pt')"
WEIGHTS = "net.load_state_dict(torch.load('state.pt')[0])\n"
ALL = WEIGHTS + "optimizer.load_state_dict(torch.load('state.pt')[1])\n"


def origin(
    zygote: Zygote, arena: Arena, script: str, *, generation: int = 2, began_at: float = 0.0, made_up: bool = False
) -> int:
    (zygote.folder / "trains.py").write_text(script)
    clear_slot(arena[1], 1)  # as an agent does before it starts a rank
    ended = zygote.run(
        "trains.py",
        HOLDFAST_SLOT=f"{arena[0]}:1",
        HOLDFAST_GENERATION=str(generation),
        HOLDFAST_BEGAN=str(began_at or time.time()),
        HOLDFAST_MADE_UP=str(int(made_up)),
        RANK="0",
    )
    assert ended.code == 0, ended.err
    now = read_slot(arena[1], 1)
    assert now and now.counted and now.first_step == 1
    return now.origin


@pytest.fixture
def saved(warm: Zygote, arena: Arena) -> None:
    (warm.folder / "state.pt").unlink(missing_ok=True)
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=SAVE), generation=1) == 0


@pytest.mark.usefixtures("saved")
def test_a_restored_optimizer_tells_its_step(warm: Zygote, arena: Arena) -> None:
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=ALL + "train(2)")) == 7
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=ALL + "train(2)"), generation=1) == 7


@pytest.mark.usefixtures("saved")
def test_a_script_that_reads_nothing_starts_at_the_beginning(warm: Zygote, arena: Arena) -> None:
    for optimizer in ("AdamW", "SGD"):
        then = "import json, logging.config\nopen('log', 'a').write('anew')\ntrain(2)"
        assert origin(warm, arena, TRAIN.format(optimizer=optimizer, then=then)) == 0


@pytest.mark.usefixtures("saved")
def test_what_is_read_may_have_been_gone_on_from(warm: Zygote, arena: Arena) -> None:
    for optimizer in ("AdamW", "SGD"):  # the weights alone: how far they are only the script knows
        assert origin(warm, arena, TRAIN.format(optimizer=optimizer, then=WEIGHTS + "train(2)")) == -1
    later = time.time() + 1000.0
    script = TRAIN.format(optimizer="SGD", then=WEIGHTS + "train(2)")
    assert origin(warm, arena, script, began_at=later) == 0, "it was there before the job was"


ASK = "from torch.distributed.checkpoint.state_dict import get_state_dict\nget_state_dict(net, optimizer)\n"


def test_a_state_that_torch_made_and_a_job_goes_on_from_is_no_step_either(warm: Zygote, arena: Arena) -> None:
    def resumed(before: str, made_up: bool) -> tuple[int, bool]:
        at = origin(warm, arena, TRAIN.format(optimizer="AdamW", then=before + ALL + "train(2)"), made_up=made_up)
        now = read_slot(arena[1], 1)
        assert now
        return at, now.made_up

    (warm.folder / "state.pt").unlink(missing_ok=True)
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=ASK + SAVE), generation=1) == 0
    first = read_slot(arena[1], 1)
    assert first and first.made_up
    assert resumed("", made_up=True) == resumed(ASK, made_up=True) == (7, True)


def test_a_state_that_torch_made_for_a_save_is_no_step(warm: Zygote, arena: Arena) -> None:
    """FSDP2 scripts ask for the state before they train, to fill it from a checkpoint if there is one."""
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=f"{ASK}train(3)")) == 0
    assert origin(warm, arena, TRAIN.format(optimizer="SGD", then=f"{ASK}train(3)")) == 0
    origin(warm, arena, TRAIN.format(optimizer="AdamW", then=SAVE))
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=f"{ASK}{ALL}train(3)")) == 7


KEPT = """
import holdfast
ckpt = holdfast.Checkpointer(model=net, optimizer=optimizer, path=sys.argv[0] + "-{name}", every=1)
done = ckpt.restore()
"""
TOLD = (
    "for step in range(done + 1, done + 5):\n    train(1)\n    ckpt.save(step)\n    holdfast.step(step)\nckpt.close()"
)
COUNTED = "for epoch in range(done + 1, done + 3):\n    train(3)\n    ckpt.save(epoch)\nckpt.close()"
EPOCHS = COUNTED.replace("ckpt.save(epoch)", "holdfast.step(epoch)\n    ckpt.save(epoch)")


@pytest.mark.parametrize(
    ("saved", "made"),
    [
        pytest.param(TOLD, 4, id="told"),
        pytest.param(COUNTED, 6, id="counted", marks=pytest.mark.slow),
        pytest.param(EPOCHS, -1, id="epochs", marks=pytest.mark.slow),
    ],
)
def test_a_state_that_a_checkpointer_restored_tells_how_many_steps_led_to_it(
    warm: Zygote, arena: Arena, saved: str, made: int
) -> None:
    """SGD keeps no count. A script that fails before it tells its first step, as in a save, has made the next one."""
    kept = TRAIN.format(optimizer="SGD", then=KEPT.format(name=abs(made)) + "{then}")
    (warm.folder / "trains.py").write_text(kept.format(then=saved))
    assert warm.run("trains.py", HOLDFAST_SLOT=f"{arena[0]}:1", HOLDFAST_GENERATION="1", RANK="0").code == 0
    for told in ("0", "1"):
        failing = kept.format(then="train(1)\nraise ValueError('cannot save')")
        (warm.folder / "trains.py").write_text(failing)
        clear_slot(arena[1], 1)
        failed = warm.run(
            "trains.py",
            HOLDFAST_SLOT=f"{arena[0]}:1",
            HOLDFAST_GENERATION="2",
            HOLDFAST_BEGAN=str(time.time()),
            HOLDFAST_TOLD=told,
            RANK="0",
        )
        assert failed.code == 1
        now = read_slot(arena[1], 1)
        assert now and now.origin == made
        shown = show_first_step(now, ended=True).step
        assert shown == (1 if made >= 0 or told == "0" else -1), "no number of the script's is known"


def test_what_is_read_after_the_first_step_is_no_restore(warm: Zygote, arena: Arena) -> None:
    then = "open('fresh', 'w').write('x')\ntrain(1)\nopen('fresh').read()\ntrain(1)"
    assert origin(warm, arena, TRAIN.format(optimizer="SGD", then=then)) == 0


WAYS = """
import io, mmap, os, pathlib, socket, sqlite3, sys, time, zipfile
import numpy, torch
import torch.distributed.checkpoint as dcp
from holdfast.client.training.inferred_resume_step import ReadWatch

def dials(family, address):
    with socket.socket(family) as s:
        s.settimeout(0.001)
        try:
            s.connect(address)
        except OSError:
            pass

numpy.save("a.npy", numpy.ones(3))
torch.save({"a": torch.ones(3)}, "a.pt")
dcp.save({"a": torch.ones(3)}, checkpoint_id="a.dcp", no_dist=True)
pathlib.Path("a.log").write_text("x")
sqlite3.connect("a.db").execute("create table t (x)").connection.close()
pathlib.Path("a.py").write_text("x = 1")
seen = {
    "open": lambda: open("a.log").close(),
    "open to read and write": lambda: open("a.log", "r+").close(),
    "os.open": lambda: os.close(os.open("a.log", os.O_RDONLY)),
    "pathlib": lambda: pathlib.Path("a.pt").read_bytes(),
    "torch.load": lambda: torch.load("a.pt"),
    "torch.load by mmap": lambda: torch.load("a.pt", mmap=True),
    "numpy": lambda: numpy.load("a.npy"),
    "numpy by mmap": lambda: numpy.load("a.npy", mmap_mode="r"),
    "zipfile": lambda: zipfile.ZipFile("a.pt").close(),
    "dcp": lambda: dcp.load({"a": torch.ones(3)}, checkpoint_id="a.dcp", no_dist=True),
    "sqlite": lambda: sqlite3.connect("a.db").close(),
    "the network": lambda: dials(socket.AF_INET, ("192.0.2.1", 9)),
}
unseen = {
    "appended to": lambda: open("a.log", "a").close(),
    "written": lambda: open("b.log", "w").close(),
    "missing": lambda: os.path.exists("nothing") or dials(socket.AF_UNIX, "nothing"),
    "a module": lambda: open("a.py").close(),
    "the kernel's": lambda: open("/proc/self/status").close(),
    "this machine": lambda: dials(socket.AF_INET, ("127.0.0.1", 9)),
}
reads = ReadWatch(time.time())
reads.start()
def found(way):
    reads._found = False
    way()
    return reads.found
wrong = [name for name, way in seen.items() if not found(way)]
wrong += [name for name, way in unseen.items() if found(way)]
sys.modules["safetensors"] = sys
wrong += [] if reads.found else ["what Python cannot see"]
os.write(1, repr(wrong).encode())
os._exit(0)
"""


def test_ways_to_read(warm: Zygote, tmp_path: Path) -> None:
    (tmp_path / "ways.py").write_text(WAYS)
    ended = warm.run("ways.py", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "[]"), ended.err


# As torch's own recipe for distributed checkpoints does it.
BY_STATE_DICT = """
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
held = get_optimizer_state_dict(net, optimizer)
"""
RESTORED = "set_optimizer_state_dict(net, optimizer, torch.load('held.pt'))\n"


def test_a_step_that_only_makes_state_is_none(warm: Zygote, arena: Arena) -> None:
    """Before a restore, torch has the new optimizer make a step without gradients, so that it has state to fill."""
    saved = "train(7)\n" + BY_STATE_DICT + "torch.save(held, 'held.pt')"
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=saved), generation=1) == 0
    then = BY_STATE_DICT + RESTORED + "train(2)"
    assert origin(warm, arena, TRAIN.format(optimizer="AdamW", then=then)) == 7
    now = read_slot(arena[1], 1)
    assert now and now.step == 2


def test_saving_an_optimizer_without_state_is_no_step(warm: Zygote, arena: Arena) -> None:
    then = "train(2)\noptimizer.zero_grad()\n" + BY_STATE_DICT + "optimizer.param_groups[0]['lr'] = 0.0\ntrain(1)"
    assert origin(warm, arena, TRAIN.format(optimizer="SGD", then=then), generation=1) == 0
    now = read_slot(arena[1], 1)
    assert now and now.step == 3, "a step at a rate of 0 is one all the same"


CHILD = """
import multiprocessing, os, torch
{train}
if __name__ == "__main__":
    for _ in range({children}):
        child = multiprocessing.get_context("{method}").Process(target=work)
        child.start()
        child.join()
    os._exit(child.exitcode)
"""
METHODS = pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


def in_child(method: str, then: str, children: int = 1) -> str:
    lines = TRAIN.format(optimizer="AdamW", then=then).replace("os._exit(0)  # what counts is in the slot by then", "")
    body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
    return CHILD.format(train=f"def work():\n{body}", method=method, children=children)


@METHODS
@pytest.mark.usefixtures("saved")
def test_a_child_that_restores_its_optimizer_tells_its_step(warm: Zygote, arena: Arena, method: str) -> None:
    assert origin(warm, arena, in_child(method, ALL + "train(2)")) == 7
    assert origin(warm, arena, in_child(method, ALL + "train(2)"), generation=1) == 7


@METHODS
@pytest.mark.usefixtures("saved")
def test_what_a_child_reads_is_not_seen(warm: Zygote, arena: Arena, method: str) -> None:
    assert origin(warm, arena, in_child(method, WEIGHTS + "train(2)")) == -1
    assert origin(warm, arena, in_child(method, "train(2)")) == -1
    assert origin(warm, arena, in_child(method, "train(2)"), generation=1) == 0


def test_a_child_after_another_does_not_count_what_that_one_did_twice(warm: Zygote, arena: Arena) -> None:
    (warm.folder / "both.pt").unlink(missing_ok=True)
    then = "if os.path.exists('both.pt'):\n    optimizer.load_state_dict(torch.load('both.pt'))\ntrain(2)\n"
    then += "torch.save(optimizer.state_dict(), 'both.pt')"
    assert origin(warm, arena, in_child("fork", then, children=2), generation=1) == 0
    now = read_slot(arena[1], 1)
    assert now and now.step == 4
