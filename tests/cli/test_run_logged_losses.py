"""Scripts that import nothing of ours: a loss that they only log is seen; it is acted on when it is not a number, and
told when it leaps."""

from pathlib import Path

import pytest

from holdfast.core.detect.loss_spikes import SpikeRule
from holdfast.model.detector_alarm import Kind, Stance
from tests.cli.conftest import Start

pytestmark = pytest.mark.e2e

# It logs NaN at step 12 of its first generation, and goes on; nobody but its logger hears of it.
LOGGING = """
import os, sys, time, torch
from tensorboardX import SummaryWriter
folder = sys.argv[1]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters())
board = SummaryWriter()
step = 0
while not os.path.exists(f"{folder}/finish"):
    step += 1
    time.sleep(0.02)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    board.add_scalar("train/loss", float("nan") if first and step >= 12 else 2.0, step)
"""
SPIKED = LOGGING.replace(
    'float("nan") if first and step >= 12 else 2.0', "200.0 if step == 40 else 2.0 + step % 7 / 100"
)
WRITER = """
class SummaryWriter:
    def add_scalar(self, tag, scalar_value, global_step=None):
        pass
"""

# Megatron's line, which leaves a loss out that is not a number.
MEGATRON = """
import os, sys, time
folder = sys.argv[1]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
step = 0
while not os.path.exists(f"{folder}/finish"):
    step += 1
    time.sleep(0.05)
    loss = "" if first and step >= 12 else f" lm loss: {2.0 + 1 / step:.6E} |"
    norm = "nan" if first and step >= 12 else "0.512"
    print(f" [2026-01-19 10:49:15] iteration {step:8d}/    5000 | consumed samples: {step:12d} |"
          f" elapsed time per iteration (ms): 50.0 | learning rate: 3.000000E-05 | global batch size:     1 |"
          f"{loss} loss scale: 1.0 | grad norm: {norm} | number of skipped iterations:   0 |"
          f" number of nan iterations:   0 |", flush=True)
"""
LEAPING = MEGATRON.replace('"" if first and step >= 12 else', '" lm loss: 2.000000E+02 |" if step == 40 else')
LEAPING = LEAPING.replace('"nan" if first and step >= 12 else', '"88.1" if step == 40 else')


@pytest.fixture
def board(tmp_path: Path) -> None:
    """A small tensorboardX, where scripts find it."""
    (tmp_path / "tensorboardX").mkdir()
    (tmp_path / "tensorboardX/__init__.py").write_text("from tensorboardX.writer import SummaryWriter\n")
    (tmp_path / "tensorboardX/writer.py").write_text(WRITER)


@pytest.mark.usefixtures("board")
def test_a_loss_that_only_a_logger_gets_is_acted_on(start: Start) -> None:
    job = start("--nproc-per-node", "2", script=LOGGING, zygote=True)
    job.says("loss: read from SummaryWriter.add_scalar('train/loss')")
    job.says("a loss of nan since step 12")
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.evicted) == ("loss", ())
    assert sum("loss: read from" in line for line in job.sentences()) == 1


@pytest.mark.usefixtures("board")
def test_a_spike_that_only_a_logger_gets_is_told(start: Start) -> None:
    job = start(script=SPIKED, zygote=True)
    job.says("stands out at step 40")
    at = job.status()["step"]
    job.until(lambda: job.status()["step"] > at + 20, "more steps")
    job.finish()
    job.ends(0)
    assert job.report().incidents == (), "it is told and not acted on, as nobody has asked for more"
    [alarm] = job.alarms(Kind.LOSS)
    assert (alarm.stance, alarm.ranks, alarm.generation) == (Stance.NOTIFY, (0,), 1)
    assert alarm.evidence == (SpikeRule.LOSS_TIMES, SpikeRule.LOSS_SCORE) and "200" in alarm.reason


def test_a_spike_that_only_megatrons_line_tells_is_told(start: Start) -> None:
    job = start(script=LEAPING)
    job.says("stands out at step 40")
    job.finish()
    job.ends(0)
    assert job.report().incidents == ()
    rules = {rule for alarm in job.alarms(Kind.LOSS) for rule in alarm.evidence}
    assert {SpikeRule.LOSS_TIMES, SpikeRule.NORM_TIMES} <= rules
    assert {alarm.stance for alarm in job.alarms(Kind.LOSS)} == {Stance.NOTIFY}


def test_a_loss_that_only_megatrons_line_tells_is_acted_on(start: Start) -> None:
    job = start(script=MEGATRON)
    job.says("loss: read from Megatron's lines ('lm loss')")
    job.says("a loss of nan since step 12")
    job.until(lambda: (job.rank_dir(0, generation=2) / "pid").exists(), "a second generation")
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.evicted) == ("loss", ())
    assert sum("loss: read from" in line for line in job.sentences()) == 1
    job.check_replay()
