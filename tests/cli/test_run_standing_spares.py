"""Standing spare ranks: each rank has one while the job trains, which has rehearsed a step and takes its seat."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.rungs import CALM, reaches
from tests.cli.test_run_survivors import TRAIN, TWO, calm_weights, strike, weights

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REHEARSE = """
scratch = torch.zeros(1)
net.register_buffer("scratch", scratch, persistent=False)

def rehearse():
    scratch.add_(1)
    model(torch.ones(16, 8)).square().mean().backward()
    optimizer.step()
    open(f"{folder}/rehearsed-{rank}-{os.getpid()}", "w").close()

def train(here):
    assert scratch.item() == 0
"""
MARKED = TRAIN.replace("\ndef train(here):\n", REHEARSE).replace(
    "survive(model=model)", "survive(model=model, optimizer=optimizer, rehearsal=rehearse)"
)
# Of the groups only that of all ranks, as with DDP by itself: then the rehearsal has groups of its own.
PLAIN = MARKED.replace("mine = [dist.new_group([a, a + 1]) for a in range(0, world, 2)][rank // 2]", "mine = None")
SPARES = ("--set", "recovery.spares=true")


def rehearsed(job: Job) -> dict[int, int]:
    """The pid of each rank's spare that has rehearsed."""
    names = [path.name.split("-") for path in job.folder.glob("rehearsed-*")]
    return {int(rank): int(pid) for _, rank, pid in names}


@pytest.mark.parametrize(("kind", "script"), [("ddp", PLAIN), ("fsdp2", MARKED)])
def test_one_that_has_rehearsed_takes_the_seat(
    start: Start, kind: str, script: str, tmp_path_factory: pytest.TempPathFactory, warm_server: Path
) -> None:
    job = start(*TWO, *CALM, *SPARES, script=script, HOLDFAST_GATE="20", HOLDFAST_KIND=kind)
    job.until(lambda: len(rehearsed(job)) == 4, "a spare of each rank")
    spares = rehearsed(job)
    strike(job, 2)
    reaches(job, 25, generation=2)
    assert job.rank(2, generation=2) == spares[2], "it was there before its rank died"
    job.ends(0)
    [record] = job.report().incidents
    assert (record.resumed_from, record.kept, record.renewed) == (19, 3, 1)
    assert weights(job) == calm_weights(tmp_path_factory.mktemp(kind), warm_server, script, HOLDFAST_KIND=kind)
    job.check_replay()
