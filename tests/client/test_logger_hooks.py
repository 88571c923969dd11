"""Loggers of scripts that know nothing of us: their losses get into the slot, and nothing else changes.

The real packages are used where they are installed; small packages of the same form stand for them elsewhere.
"""

import mmap
import sys
from pathlib import Path

import pytest

from holdfast.client.training.logger_hooks import CALLS
from holdfast.model.observation import StepValues
from holdfast.wire.rank_memory.slot_reader import SlotReading, read_entries, read_slot
from tests.client.conftest import Zygote

pytestmark = pytest.mark.e2e

Arena = tuple[str, mmap.mmap]

TRAIN = """
import math, os, torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters())
{setup}
for step in range(1, 5):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    {log}
optimizer.step()
os._exit(0)  # what counts is in the slot by then
"""
VALUE = "2.0 + step"

WANDB = {
    "wandb/__init__.py": """
from wandb.sdk.wandb_run import Run
def init():
    global log
    log = Run().log
""",
    "wandb/sdk/__init__.py": "",
    "wandb/sdk/wandb_run.py": """
class Run:
    def log(self, data, step=None, commit=None):
        assert set(data) == {"train/loss", "lr"} and step is None and commit, (data, step, commit)
""",
}
MLFLOW = {
    "mlflow/__init__.py": "from mlflow.tracking.fluent import log_metric, log_metrics\n",
    "mlflow/tracking/__init__.py": "",
    "mlflow/tracking/fluent.py": """
def log_metric(key, value, step=None): assert (key, step) == ("loss", 7)
def log_metrics(metrics, step=None): assert step == 8
""",
}
BOARD = {
    "tensorboardX/__init__.py": "from .writer import SummaryWriter\n",
    "tensorboardX/writer.py": """
class SummaryWriter:
    def add_scalar(self, tag, scalar_value, global_step=None): assert tag and global_step
""",
}
TRAINER = {
    "transformers/__init__.py": "",
    "transformers/trainer.py": """
class Trainer:
    def training_step(self, model, inputs): return inputs
    def log(self, logs, start_time=None): assert logs
""",
}
LIGHTNING = {
    "lightning/__init__.py": "",
    "lightning/fabric/__init__.py": "",
    "lightning/fabric/loggers/__init__.py": "",
    "lightning/fabric/loggers/csv_logs.py": """
class CSVLogger:
    def log_metrics(self, metrics, step=None): assert metrics
""",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def play(zygote: Zygote, arena: Arena, setup: str, log: str) -> SlotReading:
    (zygote.folder / "loss-source").unlink(missing_ok=True)
    (zygote.folder / "logs.py").write_text(TRAIN.format(setup=setup, log=log))
    keeper = zygote.folder / "keeper.sock"
    place = f"{arena[0]}:1"
    ended = zygote.run("logs.py", HOLDFAST_SLOT=place, HOLDFAST_GENERATION="1", RANK="6", HOLDFAST_KEEPER=str(keeper))
    assert ended.code == 0, ended.err
    now = read_slot(arena[1], 1)
    assert now
    return now


def losses(arena: Arena, now: SlotReading) -> list[tuple[int, float | None, float | None]]:
    _, entries = read_entries(arena[1], 1, now, 0)
    return [(one.step, one.loss, one.grad_norm) for one in entries if isinstance(one, StepValues)]


CASES = {
    "wandb": (WANDB, "import wandb; wandb.init()", f"wandb.log({{'train/loss': {VALUE}, 'lr': 1}}, commit=True)"),
    "mlflow.log_metric": (MLFLOW, "import mlflow", f"mlflow.log_metric('loss', value={VALUE}, step=7)"),
    "mlflow.log_metrics": (MLFLOW, "from mlflow import log_metrics", f"log_metrics({{'loss': {VALUE}}}, 8)"),
    "tensorboardX": (
        BOARD,
        "from tensorboardX import SummaryWriter as Kept; board = Kept()",
        f"board.add_scalar('Loss/train', torch.tensor({VALUE}), step); board.add_scalar('Loss/val', 9.0, step)",
    ),
    "lightning": (
        LIGHTNING,
        "from lightning.fabric.loggers.csv_logs import CSVLogger; logger = CSVLogger()",
        f"logger.log_metrics(metrics={{'train_loss_step': {VALUE}, 'epoch': 0}}, step=step)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_read_from_loggers(warm: Zygote, arena: Arena, name: str) -> None:
    files, setup, log = CASES[name]
    write(warm.folder, files)
    now = play(warm, arena, setup, log)
    assert (now.step, now.counted) == (5, True)
    assert losses(arena, now) == [(step, 2.0 + step, None) for step in range(1, 5)]
    told = (warm.folder / "loss-source").read_text()
    assert "loss" in told.lower() and told.endswith("')"), told


def test_a_trainers_loss_is_the_sum_of_its_parts_and_its_log_has_the_norm(warm: Zygote, arena: Arena) -> None:
    """The parts come before the optimizer's step, and are not filtered as the log is."""
    write(warm.folder, TRAINER)
    setup = (
        "from transformers.trainer import Trainer; trainer = Trainer(); trainer.training_step(net, torch.tensor(3.))"
    )
    log = "trainer.log({'loss': 0.0, 'grad_norm': 0.5}); [trainer.training_step(net, torch.tensor(1.5)) for _ in 'ab']"
    now = play(warm, arena, setup, log)
    assert losses(arena, now) == [(1, 3.0, 0.5), (2, 3.0, 0.5), (3, 3.0, 0.5), (4, 3.0, 0.5)]
    assert (warm.folder / "loss-source").read_text() == "Trainer.training_step()"


def test_the_scripts_own_report_wins(warm: Zygote, arena: Arena) -> None:
    write(warm.folder, WANDB)
    log = "wandb.log({'train/loss': 9.0, 'lr': 1}, commit=True); holdfast.step(step, loss=1.0)"
    now = play(warm, arena, "import holdfast, wandb; wandb.init()", log)
    assert [loss for _, loss, _ in losses(arena, now)] == [1.0] * 4
    assert not (warm.folder / "loss-source").exists()


def test_a_call_that_is_wrong_fails_as_it_would(warm: Zygote, arena: Arena) -> None:
    write(warm.folder, WANDB)
    log = """
    try:
        wandb.log()
    except TypeError as e:
        assert "data" in str(e), e
    else:
        raise SystemExit(3)
"""
    play(warm, arena, "import wandb; wandb.init()", log)


def test_the_last_loss_is_seen_when_it_is_not_finite(warm: Zygote, arena: Arena) -> None:
    write(warm.folder, BOARD)
    log = "board.add_scalar('loss', math.nan if step == 4 else 1.0, step); step == 4 and os._exit(0)"
    now = play(warm, arena, "import tensorboardX; board = tensorboardX.SummaryWriter()", log)
    assert (now.first_bad_step, now.loss_step) == (4, 4)


@pytest.mark.parametrize("module", sorted({call.module for call in CALLS}))
def test_real_packages_have_what_is_hooked(module: str) -> None:
    """A release that has renamed something would be left alone in silence; here it is told."""
    pytest.importorskip(module.partition(".")[0])
    if module.startswith("torch."):
        pytest.importorskip("tensorboard")
    found = pytest.importorskip(module)
    for call in CALLS:
        if call.module == module:
            owner = getattr(found, call.owner) if call.owner else found
            assert callable(vars(owner)[call.function]), call
    assert module in sys.modules
