"""A second failure in each phase of a recovery in which ranks go on: the weights are those of a calm run."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.rungs import CALM
from tests.cli.test_run_survivors import TRAIN, TWO, calm_weights, strike, weights

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

FIRST, SECOND = 2, 1  # ranks that die, each on a node of its own

# The rank that HOLDFAST_AMID names kills itself in that phase, once: one that went on, or the heir of the first victim.
HOOKS = """
from holdfast.client.survival import torch_groups
from holdfast.client.survival.order_line import OrderLine
from holdfast.client.survival.survivor import Survivor
amid, victim = os.environ["HOLDFAST_AMID"].split()
heir = "HOLDFAST_REHEARSAL" in os.environ

def die_amid(phase):
    if amid != phase or rank != int(victim) or heir != (rank == 2):
        return
    try:
        open(f"{folder}/struck", "x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), 9)

def before(owner, name, phase):
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args: (die_amid(phase), plain(*args))[1])

def when_parked(line, plain=OrderLine._send_state):
    plain(line)
    if line._parked:
        die_amid("parked")

OrderLine._send_state = when_parked
before(torch_groups, "abort_groups", "aborting")
before(torch_groups, "await_gpus", "leaving")
before(OrderLine, "wait_for_seat", "waiting-for-the-seat")
before(Survivor, "_regroup", "making-groups")
again = lambda phase: int(os.environ["HOLDFAST_GENERATION"]) > 1 and die_amid(phase)
restore = holdfast.Checkpointer.restore
holdfast.Checkpointer.restore = lambda ckpt: (again("before-the-restore"), restore(ckpt), again("after-the-restore"))[1]
"""
PHASED = TRAIN.replace('if os.environ.get("HOLDFAST_PLAIN"):', HOOKS + 'if os.environ.get("HOLDFAST_PLAIN"):')
PHASED = PHASED.replace("        optimizer.step()\n", '        again("in-the-first-step")\n        optimizer.step()\n')
AFTER_LAUNCH = ("making groups", "before the restore", "after the restore", "in the first step")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, warm_server: Path) -> set[str]:
    return calm_weights(tmp_path_factory.mktemp("calm"), warm_server)


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        *((SECOND, phase) for phase in ("aborting", "leaving", "parked", *AFTER_LAUNCH)),
        *((FIRST, phase) for phase in ("waiting for the seat", *AFTER_LAUNCH)),
    ],
)
def test_a_second_failure_is_an_ordinary_one(start: Start, calm: set[str], victim: int, phase: str) -> None:
    job = start(*TWO, *CALM, script=PHASED, HOLDFAST_GATE="20", HOLDFAST_AMID=f"{phase.replace(' ', '-')} {victim}")
    strike(job, FIRST)
    job.ends(0)
    assert (job.folder / "struck").exists(), "nobody has died a second time"
    assert weights(job) == calm
    [record] = job.report().incidents
    assert (record.good_step, record.resumed_from) == (19, 19), "no step is lost"
    job.check_replay()
