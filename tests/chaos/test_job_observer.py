"""Pids that files name are those of the job, or nobody's: they may have been given to somebody else since."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.chaos import disk_faults, process_faults, process_handles
from holdfast.chaos.injection_records import CannotInject, InjectedFault
from holdfast.chaos.injection_scene import InjectionScene
from holdfast.chaos.job_observer import JobObserver
from holdfast.chaos.undo_guard import UndoGuard
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
    sight = JobObserver(job.run_dir)
    status = sight.read_status()
    assert status is not None
    node, other = (one.node for one in status.active)
    assert (sight.holder_pid(node), sight.rank_pid(status, 0)) == (job.holder(node), job.rank(0))
    assert process_handles.is_descendant(job.rank(1), sight.holder_pid(other)) and not process_handles.is_descendant(
        job.rank(1), sight.holder_pid(node)
    )
    with pytest.raises(CannotInject, match=rf"\b{node}$"):
        sight.require_descendant(node, job.rank(1))
    holder, rank = job.run_dir / "nodes" / node / "holder.pid", job.rank_dir(0) / "pid"
    with target() as stranger, UndoGuard() as guard:
        scene = InjectionScene(sight, guard, random.Random(1))
        for path, fault, strike in (
            (rank, InjectedFault(kind="rank.kill", rank=0), process_faults.signal_rank),
            (holder, InjectedFault(kind="node.kill", node=node), process_faults.kill_nodes),
            (holder, InjectedFault(kind="agent.kill", node=node), process_faults.signal_agent),
        ):
            with says(path, stranger.pid), pytest.raises(CannotInject):
                strike(scene, fault)
        with says(holder, job.holder(other)), pytest.raises(CannotInject, match=rf"^{node}\b"):
            sight.holder_pid(node)
        assert stranger.poll() is None
    assert (sight.controller_pid(), sight.store_pid()) == (job.controller(), job.store())
    job.finish()
    job.ends(0)


def test_files_of_others_are_not_touched(start: Start, tmp_path: Path) -> None:
    job = start()
    job.trains()
    outside, inside, link = tmp_path / "mine", job.run_dir / "of-the-job", job.run_dir / "link"
    for path in (outside, inside):
        path.write_bytes(b"hello")
    link.symlink_to(outside)
    with UndoGuard() as guard:
        scene = InjectionScene(JobObserver(job.run_dir), guard, random.Random(1))
        for path in (outside, link, job.run_dir / ".." / "mine"):
            with pytest.raises(CannotInject, match=str(path)):
                disk_faults.flip_checkpoint(scene, InjectedFault(kind="checkpoint.flip", path=str(path)))
        disk_faults.flip_checkpoint(scene, InjectedFault(kind="checkpoint.flip", path=str(inside)))
        assert outside.read_bytes() == b"hello" != inside.read_bytes()
    assert inside.read_bytes() == b"hello"
    job.finish()
    job.ends(0)
