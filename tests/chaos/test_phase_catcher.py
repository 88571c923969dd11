"""The rank that is held in the middle of a moment is the one that is struck, and nobody else stays stopped."""

import contextlib
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.chaos import phase_catcher, process_faults
from holdfast.chaos.injection_records import CannotInject, InjectedFault
from holdfast.chaos.injection_scene import InjectionScene
from holdfast.chaos.job_observer import JobObserver, ObservedNode, ObservedStatus
from holdfast.chaos.undo_guard import UndoGuard
from tests.chaos.target import stands, target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


class Seen:
    """A job whose ranks all save, for ever."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def read_status(self) -> ObservedStatus:
        nodes = tuple(ObservedNode(node=f"n{rank}", role="active", ranks=str(rank)) for rank in range(len(self._pids)))
        return ObservedStatus(phase="training", generation=1, step=9, floor=1, nodes=nodes)

    def read_rank_slot(self, status: ObservedStatus, rank: int) -> Any:
        return SimpleNamespace(phase="save", pid=self._pids[rank])

    def rank_pid(self, status: ObservedStatus, rank: int) -> int:
        return self._pids[rank]

    def require_descendant(self, node: str, pid: int) -> int:
        return pid


@pytest.mark.parametrize("node", ["", "n2", "n3"])
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_the_rank_is_drawn_once(seed: int, node: str) -> None:
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(target()) for _ in range(4)]
        guard = stack.enter_context(UndoGuard())
        scene = InjectionScene(
            cast(JobObserver, cast(Any, Seen(*(rank.pid for rank in ranks)))), guard, random.Random(seed)
        )
        scene.id = 1
        fault = InjectedFault(kind="rank.stop", when="saving", node=node)
        with phase_catcher.seize_moment(scene, fault, 5) as pids:
            struck = process_faults.signal_rank(scene, fault)
            pids.update(struck.pids)
        [rank] = struck.ranks
        assert node in ("", struck.nodes[0])
        until(lambda: stands(ranks[rank].pid), "the one that was struck stands")
        assert [number for number, one in enumerate(ranks) if stands(one.pid)] == [rank]
        assert guard.run_undo(1) == ""
        until(lambda: not stands(ranks[rank].pid), "it goes on")


def test_a_rank_that_was_held_goes_on_if_another_process_was_struck_or_nobody() -> None:
    with target() as rank, UndoGuard() as guard:
        scene = InjectionScene(cast(JobObserver, cast(Any, Seen(rank.pid))), guard, random.Random(1))
        scene.id = 1
        with phase_catcher.seize_moment(scene, InjectedFault(kind="rank.stop", when="saving"), 5) as pids:
            assert stands(rank.pid) and scene.seized == 0
            pids.add(1)
        until(lambda: not stands(rank.pid), "it goes on")
        with (
            pytest.raises(CannotInject),
            phase_catcher.seize_moment(scene, InjectedFault(kind="rank.stop", when="saving"), 5),
        ):
            raise CannotInject("nobody was struck")
        until(lambda: not stands(rank.pid), "it goes on")
        assert scene.seized is None
