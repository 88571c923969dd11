"""The verbs of a training script: told to the slot, silent without one, and never in the way."""

import math
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.client.training.progress import RankProgress
from holdfast.wire.rank_memory.slot_reader import SlotReading, read_slot

ROOT = Path(__file__).parents[2]
Arena = tuple[str, mmap.mmap]


class Far:
    """Like a tensor whose device has not got there yet."""

    device = "cuda:0"

    def __float__(self) -> float:
        raise AssertionError("this would wait for the device")

    item = __int__ = __float__


class Near:
    """Like a tensor on the CPU."""

    device = "cpu"

    def item(self) -> float:
        return 0.25


@pytest.fixture
def progress(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> RankProgress:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    monkeypatch.setenv("HOLDFAST_GENERATION", "5")
    monkeypatch.setenv("RANK", "11")
    return RankProgress()


def told(arena: Arena) -> SlotReading:
    now = read_slot(arena[1], 2)
    assert now
    return now


def test_a_step_is_told(progress: RankProgress, arena: Arena) -> None:
    progress.step(3, loss=1.5, grad_norm=Near())
    now = told(arena)
    assert (now.generation, now.rank, now.pid) == (5, 11, os.getpid())
    assert (now.step, now.first_step, now.counted, now.loss, now.grad_norm) == (3, 3, False, 1.5, 0.25)
    progress.step(4, loss=math.nan)
    progress.step(5)
    now = told(arena)
    assert (now.step, now.loss_step, now.first_bad_step) == (5, 4, 4)


def test_work_adds_up(progress: RankProgress, arena: Arena) -> None:
    progress.note_parameters(1000)
    progress.step(3, tokens=4096, flops=2e9)
    progress.step(4, tokens=Near())
    progress.step(5)
    now = told(arena)
    assert (now.step, now.tokens, now.flops, now.parameters) == (5, 4096.25, 2e9, 1000)


@pytest.mark.parametrize("nonsense", ["words", -1, math.nan, math.inf, object(), Far()])
def test_what_is_no_amount_of_work_is_not_added(progress: RankProgress, arena: Arena, nonsense: object) -> None:
    progress.step(3, tokens=10)
    progress.step(4, tokens=nonsense, flops=nonsense)
    progress.step(5, tokens=10)
    assert (told(arena).step, told(arena).tokens, told(arena).flops) == (5, 20, 0)


def test_tokens_on_a_device_are_said_once(
    progress: RankProgress, arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.step(3, tokens=Far())
    progress.step(4, tokens=Far())
    assert capsys.readouterr().err.count("the tokens of step 3 are not counted") == 1
    assert told(arena).tokens == 0


def test_absurd_numbers_are_refused_once_and_the_last_step_stays(
    progress: RankProgress, arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.step(3, tokens=10)
    for _ in range(2):
        progress.step((1 << 63) - 2, tokens=1e308)
        progress.step(4, tokens=1e308)
    now, said = told(arena), capsys.readouterr().err
    assert (now.step, now.tokens) == (4, 10)
    assert said.count("is not reported") == 1 == said.count("the tokens of step 4 are not counted")


def test_a_tensor_elsewhere_is_not_waited_for(progress: RankProgress, arena: Arena) -> None:
    progress.step(3, loss=Far())
    progress.step(Far())  # type: ignore[arg-type]
    assert told(arena).loss is None


@pytest.mark.parametrize("nonsense", ["words", object(), [1], 1 << 70, -3, math.nan, None, Far()])
def test_nothing_raises(progress: RankProgress, arena: Arena, nonsense: object) -> None:
    progress.step(nonsense)  # type: ignore[arg-type]
    progress.step(7, loss=nonsense, grad_norm=nonsense)
    progress.step(8)
    assert told(arena).step == 8
    assert progress.attach(nonsense) is nonsense
    with progress.phase(nonsense):  # type: ignore[arg-type]
        pass


def test_phases_nest(progress: RankProgress, arena: Arena) -> None:
    progress.phase("train")
    with progress.phase("eval"):
        assert told(arena).phase == "eval"
        with progress.phase("a name that is much too long for it"):
            assert told(arena).phase == "a name that is much too ..."  # it may have been cut in a word
    assert told(arena).phase == "train"
    with pytest.raises(KeyError), progress.phase("eval"):
        raise KeyError
    assert told(arena).phase == "train"


def test_a_told_step_supersedes_the_count_for_good(progress: RankProgress, arena: Arena) -> None:
    assert progress.find_slot()
    progress.count_steps(1)
    assert told(arena).step == -1  # the script may be about to tell its own
    progress.count_steps(2)
    assert (told(arena).step, told(arena).counted, told(arena).first_step) == (2, True, 1)
    progress.step(100)
    progress.count_steps(3)
    assert (told(arena).step, told(arena).counted, told(arena).first_step) == (100, False, 100)


def test_children_of_the_rank_say_nothing(progress: RankProgress, arena: Arena) -> None:
    progress.step(1)
    child = os.fork()
    if child == 0:
        progress.step(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    # One that inherits the environment only, like a spawned data loader.
    code = "import holdfast; holdfast.step(3); holdfast.phase('x')"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    assert (told(arena).step, told(arena).pid, told(arena).phase) == (1, os.getpid(), "")


def stepped(progress: RankProgress, *steps: int) -> int:
    """A child of the rank that makes these steps, lives until it is told to end, and then has a code; its pid."""
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        for step in steps:
            progress.step(step)
        os.write(says, b".")
        signal.pause()
    assert os.read(said, 1) == b"."
    os.close(said)
    os.close(says)
    return child


def test_the_first_child_that_steps_speaks_for_a_rank_that_does_not(progress: RankProgress, arena: Arena) -> None:
    assert progress.find_slot()
    first = stepped(progress, 1, 2)
    try:
        assert (told(arena).step, told(arena).pid, told(arena).claimed) == (2, first, True)
        second = stepped(progress, 7)
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)
        progress.step(9)  # the rank itself, while another makes its steps
        progress.on_group()
        progress.phase("eval")
        progress.on_returned()
        now = told(arena)
        assert (now.step, now.pid, now.rank, now.phase, now.ending) == (2, first, 11, "", "")
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    progress.on_returned()
    now = told(arena)
    assert (now.step, now.pid, now.ending) == (2, os.getpid(), "returned")  # what the child told is not lost
    progress.record_failure("ValueError: no")
    assert (told(arena).failure, told(arena).step) == ("ValueError: no", 2)


def test_a_failure_is_told_whoever_makes_the_steps(progress: RankProgress, arena: Arena) -> None:
    assert progress.find_slot()
    child = stepped(progress, 4)
    try:
        progress.record_failure("ProcessRaisedException")
        assert (told(arena).failed, told(arena).step) == (True, 4)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_counting_goes_on_where_a_child_has_ended(progress: RankProgress, arena: Arena) -> None:
    assert progress.find_slot()
    for _ in range(2):
        child = os.fork()
        if child == 0:
            for step in range(1, 6):
                progress.count_steps(step)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert (told(arena).step, told(arena).counted, told(arena).first_step) == (10, True, 1)


def test_a_child_takes_the_ranks_place_under_the_ranks_number(
    progress: RankProgress, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts that start processes of their own give them numbers of their own."""
    assert progress.find_slot()
    monkeypatch.setenv("RANK", "3")
    code = "import holdfast; holdfast.phase('x'); holdfast.step(5, loss=1.0)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    assert (told(arena).step, told(arena).rank, told(arena).loss) == (5, 11, 1.0)


def test_the_next_generation_takes_the_slot(progress: RankProgress, arena: Arena) -> None:
    progress.step(1)
    code = "import holdfast; holdfast.step(0)"
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOLDFAST_GENERATION": "6"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    assert (told(arena).generation, told(arena).step) == (6, 0)


@pytest.mark.parametrize("place", [None, "", "nonsense", "/nowhere:0", "/nowhere", "/dev/null:x", "/dev/null:0"])
def test_without_an_agent_there_is_nothing(place: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_SLOT", raising=False)
    if place is not None:
        monkeypatch.setenv("HOLDFAST_SLOT", place)
    progress = RankProgress()
    progress.step(1, loss=2.0)
    with progress.phase("eval"):
        pass
    model = object()
    assert progress.attach(model) is model
    assert progress.find_slot() is None


def test_an_index_outside_the_arena_is_no_agent(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:400")
    progress = RankProgress()
    progress.step(1)
    assert progress.find_slot() is None


def test_the_import_is_light() -> None:
    heavy = {"torch", "aiohttp", "msgspec", "typing", "asyncio"}
    code = f"import sys, holdfast; print({heavy} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    # -S: an editable install may bring imports of its own.
    said = subprocess.run([sys.executable, "-S", "-c", code], env=env, check=True, timeout=60, capture_output=True)
    assert said.stdout == b"set()\n"


def test_the_verbs() -> None:
    verbs = "Checkpointer ElasticPipeline GlobalBatch Here Microbatch"
    verbs += " attach batches phase replayable skip step survive watch"
    assert set(holdfast.__all__) == set(verbs.split())
    assert holdfast.__version__
    assert all(getattr(holdfast, name).__doc__ for name in holdfast.__all__)
