"""Pids that files name are those of the job, or nobody's: they may have been given to somebody else since."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.chaos import files, hold, processes
from holdfast.chaos.fault import Cannot, Fault
from holdfast.chaos.guard import Guard
from holdfast.chaos.scene import Scene
from holdfast.chaos.sight import Sight
from tests.chaos.target import target
from tests.cli.conftest import Start

pytestmark = pytest.mark.e2e


@contextmanager
def says(path: Path, pid: int) -> Iterator[None]:
    before = path.read_text()
    path.write_text(f"{pid}\n")
    yield
    path.write_text(before)


@pytest.mark.slow
def test_a_pid_that_is_somebody_elses_by_now_is_not_hit(start: Start) -> None:
    job = start("--nnodes", "2")
    job.trains()
    sight = Sight(job.run_dir)
    status = sight.status()
    assert status is not None
    node, other = (one.node for one in status.active)
    assert (sight.holder(node), sight.pid(status, 0)) == (job.holder(node), job.rank(0))
    assert hold.is_below(job.rank(1), sight.holder(other)) and not hold.is_below(job.rank(1), sight.holder(node))
    with pytest.raises(Cannot, match=f"is none of {node} any more"):
        sight.below(node, job.rank(1))
    holder, rank = job.run_dir / "nodes" / node / "holder.pid", job.rank_dir(0) / "pid"
    with target() as stranger, Guard() as guard:
        scene = Scene(sight, guard, random.Random(1))
        for path, fault, strike in (
            (rank, Fault(kind="rank.kill", rank=0), processes.rank_signal),
            (holder, Fault(kind="node.kill", node=node), processes.node_kill),
            (holder, Fault(kind="agent.kill", node=node), processes.agent_signal),
        ):
            with says(path, stranger.pid), pytest.raises(Cannot):
                strike(scene, fault)
        with says(holder, job.holder(other)), pytest.raises(Cannot, match=f"{node} has no holder"):
            sight.holder(node)
        assert stranger.poll() is None
    assert (sight.controller(), sight.store()) == (job.controller(), job.store())
    job.finish()
    job.ends(0)


def test_files_of_others_are_not_touched(start: Start, tmp_path: Path) -> None:
    job = start()
    job.trains()
    outside, inside, link = tmp_path / "mine", job.run_dir / "of-the-job", job.run_dir / "link"
    for path in (outside, inside):
        path.write_bytes(b"hello")
    link.symlink_to(outside)
    with Guard() as guard:
        scene = Scene(Sight(job.run_dir), guard, random.Random(1))
        for path in (outside, link, job.run_dir / ".." / "mine"):
            with pytest.raises(Cannot, match="is no file of this job: give one in"):
                files.checkpoint_flip(scene, Fault(kind="checkpoint.flip", path=str(path)))
        files.checkpoint_flip(scene, Fault(kind="checkpoint.flip", path=str(inside)))
        assert outside.read_bytes() == b"hello" != inside.read_bytes()
    assert inside.read_bytes() == b"hello"
    job.finish()
    job.ends(0)
