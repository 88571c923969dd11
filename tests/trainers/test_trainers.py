"""Each trainer's example through real faults: it ends in the weights of a run that nothing happened to, bit for bit.

docs/TRAINERS.md has the table of what happened.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.cli import main
from holdfast.wire import program_fork_server
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.driver import Job
from tests.conftest import ROOT, job_environment, kill_marked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, STRUCK = 30, 16  # where it is struck, an epoch has begun and is not over
WAIT_S = "0.03"  # for each example, so that a job does not end before it is struck
SOON = ("--set", "hang.least_s=1", "--set", "hang.again_s=0.3", "--set", "probe.allow=false")


class TrainerExample(NamedTuple):
    """An example, and what its trainer leaves by itself."""

    package: str
    half: Callable[[Path], None]  # make the newest of its own checkpoints as a kill may leave it
    saved: int = 10  # the step of the newest whole one, when it is struck
    args: tuple[str, ...] = ()
    sources: str = ""  # the variable that says where the sources are of a library that cannot be installed
    not_alone: str = ""  # why it cannot resume from its own checkpoints here


def halve_huggingface(out: Path) -> None:
    """A newer one than those that are whole; its weights are cut short."""
    newest = out / "checkpoint-11"
    shutil.copytree(out / "checkpoint-10", newest)
    state = newest / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 10', '"global_step": 11'))
    cut_short(newest / "model.safetensors")


def halve_accelerate(out: Path) -> None:
    """The only one, of step 10, has the place of the first; the second was being written."""
    newest = out / "checkpoints" / "checkpoint_1"
    shutil.copytree(out / "checkpoints" / "checkpoint_0", newest)
    cut_short(newest / "optimizer.bin")


def halve_lightning(out: Path) -> None:
    """Lightning saves at the end of each epoch."""
    cut_short(Path(shutil.copy(out / "step=12.ckpt", out / "step=13.ckpt")))


def halve_last(out: Path) -> None:
    """`last.ckpt` is what the script resumes from; of the same step there is another, whole one."""
    cut_short(out / "last.ckpt")


def halve_deepspeed(out: Path) -> None:
    """`latest` names the newer one, as if the kill had come after that; a part of the optimizer is cut short."""
    newest = shutil.copytree(out / "global_step10", out / "global_step11")
    (out / "latest").write_text("global_step11")
    cut_short(next(newest.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")))


def halve_torchtitan(out: Path) -> None:
    """TorchTitan itself would take the newer one, since there is a `.metadata`."""
    cut_short(shutil.copytree(out / "checkpoint/step-10", out / "checkpoint/step-11") / "__1_0.distcp")


def halve_megatron(out: Path) -> None:
    cut_short(shutil.copytree(out / "iter_0000010", out / "iter_0000011") / "__1_0.distcp")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


TRAINERS = {
    "huggingface": TrainerExample("transformers", halve_huggingface),
    "accelerate": TrainerExample("accelerate", halve_accelerate),
    "lightning": TrainerExample("lightning", halve_lightning, saved=12),
    "lightning_plugin": TrainerExample("lightning", halve_last, saved=12),
    "deepspeed": TrainerExample("deepspeed", halve_deepspeed, args=("--zero", "2", "--bf16")),
    "torchtitan": TrainerExample("torchtitan", halve_torchtitan),
    "megatron": TrainerExample("megatron", halve_megatron, args=("--bf16",)),
    "megatron_pretrain": TrainerExample(
        "megatron",
        halve_megatron,
        sources="PYTEST_HOLDFAST_MEGATRON_LM",
        not_alone="without apex and Transformer Engine, pretrain cannot load its own state of an optimizer",
    ),
}


@pytest.fixture(params=TRAINERS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    package, sources = TRAINERS[request.param].package, TRAINERS[request.param].sources
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; docs/TRAINERS.md says which of them make test-full has")
    if sources:
        if sources not in os.environ:
            pytest.skip(f"{sources} does not say where its sources are; docs/TRAINERS.md says which are meant")
        tmp_path.joinpath(package).symlink_to(Path(os.environ[sources], package).resolve(strict=True))
    return str(request.param)


Launch = Callable[..., Job]


@pytest.fixture
def launch(tmp_path: Path, warm_server: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str) -> Iterator[Launch]:
    """launch(name, place) runs the example of this trainer in a folder of its own."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    jobs: list[Job] = []

    def launch(name: str, *more: str, place: str = "work", run: str = "run") -> Job:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        script = (str(EXAMPLES / f"trainer_{name}.py"), "--steps", str(STEPS), *TRAINERS[name].args, *more)
        words = ("--run-dir", str(folder / run), *SOON, "--nproc-per-node", "2", *script)
        env = make_rank_environment(job_environment(PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}"))
        env[program_fork_server.NAMED] = str(warm_server)
        jobs.append(Job(folder, *words, env=env, name=run))
        jobs[-1].run_dir = folder / run
        jobs[-1].patience_s = 120.0  # imports of a large package, beside other tests
        return jobs[-1]

    yield launch
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            kill_marked(no_orphans)


@pytest.fixture
def calm(name: str, launch: Launch, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """The weights of a run that is left alone: once for all tests of a trainer, whichever comes first."""
    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if hasattr(request.config, "workerinput") else own) / f"calm-{name}"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            job = launch(name, place="calm")
            job.ends(0)
            assert "0 incidents" in job.sentences()[-1]
            kept.write_text(weights(job.text()))
    return kept.read_text()


def weights(text: str) -> str:
    found = re.search("weights sha256: ([0-9a-f]{64})", text)
    assert found, text
    return found[1]


def restored(job: Job) -> list[tuple[int, str]]:
    """The steps that were restored, and from where."""
    found = re.findall(r"\bstep (\d+) was restored from (\w+) in \d", job.text())
    return [(int(step), source) for step, source in found]


def trains(job: Job) -> None:
    job.until(lambda: f"step {STRUCK}\n" in job.text() or job.process.poll() is not None, "some steps")
    assert job.process.poll() is None, job.story()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_rank_is_lost(name: str, fault: signal.Signals, launch: Launch, calm: str) -> None:
    job = launch(name, "--wait-s", WAIT_S)
    trains(job)
    job.kill(job.rank(1), fault)
    job.ends(0)
    [record] = job.report().incidents
    assert record.resumed_from is not None and record.good_step - record.resumed_from <= 1, record.sentence
    assert record.resumed_from >= STRUCK - 1 and {source for _, source in restored(job)} == {"memory"}
    assert weights(job.text()) == calm
    print(record.sentence)


def test_a_stop_and_another_run(name: str, launch: Launch, calm: str) -> None:
    storage = ("--ckpt", "ckpt", "--wait-s", WAIT_S)
    job = launch(name, *storage)
    trains(job)
    assert main(["stop", "--run", str(job.run_dir)]) == 0
    job.ends(143)
    again = launch(name, *storage, run="again")
    again.ends(0)
    [(step, source)] = set(restored(again))
    assert step >= STRUCK - 1 and source == "storage", again.text()
    assert weights(again.text()) == calm
    print(f"step {step} from {source}")


def test_its_own_checkpoints_are_used_where_ours_are_gone(name: str, launch: Launch, calm: str, tmp_path: Path) -> None:
    """Another run finds no memory, there is no storage of ours, and the trainer's newest is half of a checkpoint."""
    if why := TRAINERS[name].not_alone:
        pytest.skip(why)
    job = launch(name, "--wait-s", WAIT_S)
    trains(job)
    assert main(["stop", "--now", "--run", str(job.run_dir)]) == 0
    job.ends(143)
    TRAINERS[name].half(tmp_path / "work" / "results")
    again = launch(name, run="again")
    again.ends(0)
    assert re.search(r"\bholdfast: \S*results/\S+ .*: ", again.text()) and not restored(again), again.text()
    made = [int(step) for step in re.findall(r"\] step (\d+)\n", again.text())]
    assert made == [*range(TRAINERS[name].saved + 1, STEPS + 1)]
    assert weights(again.text()) == calm


@pytest.mark.parametrize(("damaged", "goes_on"), [((), 13), (("last.ckpt", "step=12.ckpt"), 7)], ids=["whole", "cut"])
def test_lightning_alone_resumes_from_its_newest_whole_checkpoint(
    damaged: tuple[str, ...], goes_on: int, launch: Launch
) -> None:
    """The plugin, without the callback: nothing is kept but Lightning's own checkpoints, one after each epoch of six
    steps. Those of step 12 may be cut short when the rank is killed."""
    pytest.importorskip("lightning")
    calm = launch("lightning_plugin", "--own-only", place="calm")
    calm.ends(0)
    job = launch("lightning_plugin", "--own-only", "--wait-s", WAIT_S)
    job.until(lambda: "step 14\n" in job.text() or job.process.poll() is not None, "the third epoch")
    for name in damaged:
        cut_short(job.folder / "results" / name)
    job.kill(job.rank(1))
    job.ends(0)
    assert len(job.report().incidents) == 1 and not restored(job)
    left_out = re.findall(r"holdfast: \S+/(\S+) is left out: .*; \S+/(\S+), the newest whole one, is used", job.text())
    assert left_out == [(name, "step=6.ckpt") for name in damaged], job.text()
    made = [int(step) for step in re.findall(r"\] step (\d+)\n", job.text())]
    [again] = [at for at, (before, step) in enumerate(pairwise(made), 1) if step <= before]
    assert made[again:] == [*range(goes_on, STEPS + 1)]
    assert weights(job.text()) == weights(calm.text())
