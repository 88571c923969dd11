"""What is said of a lost node is what its ranks and their neighbours had really done."""

import re

import pytest

from holdfast.cli.commands.releases_command import load_releases
from tests.cli.conftest import Start
from tests.cli.driver import gone
from tests.cli.rungs import node_of, standbys

# Two ranks that step together, as with DDP, and save every tenth step.
LOCKSTEP = """
import os, sys, time
import holdfast
folder, rank, life = sys.argv[1], int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
def put(name, step):
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(str(step))
    os.replace(f"{folder}/{name}.new", f"{folder}/{name}")
def got(name):
    return int(open(f"{folder}/{name}").read()) if os.path.exists(f"{folder}/{name}") else 0
begun = step = min(got("saved-0"), got("saved-1"))
while step < 250:
    step += 1
    put(f"begun-{life}-{rank}", step)
    while got(f"begun-{life}-{1 - rank}") < step:
        time.sleep(0.005)
    time.sleep(0.02)
    if step % 10 == 0:
        put(f"saved-{rank}", step)
    put(f"made-{life}-{rank}", step)
    holdfast.step(step)
"""


@pytest.mark.e2e
def test_steps_after_the_last_beat_of_a_lost_node_are_counted(start: Start) -> None:
    job = start("--nnodes", "2", "--standbys", "1", script=LOCKSTEP)

    def made(life: int, rank: int) -> int:
        path = job.folder / f"made-{life}-{rank}"
        return int(path.read_text()) if path.exists() else 0

    standbys(job, 1)
    job.until(lambda: made(0, 0) > 60, "some steps")
    rank, node = job.rank(1), node_of(job, 1)
    job.kill(job.holder(node))
    job.until(lambda: gone(rank), "the end of its rank")
    resumed = int((job.folder / "saved-1").read_text())  # rank 0 may have saved one more, alone
    job.ends(0)
    [record] = job.report().incidents
    last = made(0, 0)
    assert (record.kind, record.good_step, record.resumed_from) == ("silence", last, resumed), job.story()
    assert record.evicted == (node,) and record.sentence in job.text()
    told = re.findall(r"step (\d+)|(\d+) steps?", re.sub(r"\(.*?\)", "", record.sentence))
    assert [int(at or count) for at, count in told] == [last, resumed, last - resumed], record.sentence
    [release] = load_releases(job.run_dir).releases
    assert (release.steps, release.redone) == (250, last - resumed)
