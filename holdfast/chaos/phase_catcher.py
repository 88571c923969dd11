"""Injects at the right moment: stops a rank in the middle of a save, restore or update until the fault is injected."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import msgspec

from holdfast.chaos.injection_records import CannotInject, ContinueProcess, InjectedFault
from holdfast.chaos.injection_scene import InjectionScene
from holdfast.chaos.job_observer import ObservedStatus
from holdfast.chaos.process_handles import ProcessHandle, open_confirmed
from holdfast.wire.rank_memory.slot_reader import SlotReading

PHASES = {"saving": "save", "restoring": "restore"}  # as ranks name them in their slots
_LAUNCHED = ("launching", "starting")  # phases of a generation that has made no step
CatchRank = Callable[[InjectionScene, ObservedStatus, int, InjectedFault], ProcessHandle | None]
_SPIN_S = 0.0005
_LOOK_S = 0.5  # then ranks may be elsewhere


def await_step(scene: InjectionScene, fault: InjectedFault, lives: Callable[[], bool], limit_s: float) -> None:
    """Wait until the job trains and has reached the fault's step. Raises CannotInject if it ends or takes too long."""
    until = time.monotonic() + limit_s
    while True:
        status = scene.sight.read_status()
        if status and status.phase == "training" and status.step >= max(fault.at_step, 1):
            return
        if not lives():
            raise CannotInject("the job has ended")
        if time.monotonic() > until:
            raise CannotInject(f"the job did not train at step {max(fault.at_step, 1)} within {limit_s:g} s")
        time.sleep(0.05)


@contextlib.contextmanager
def seize_moment(scene: InjectionScene, fault: InjectedFault, limit_s: float) -> Iterator[set[int]]:
    """During the block, keep a rank stopped at the fault's moment; do nothing if the fault names no moment. Yields a
    set to which the block adds the pids that it has struck."""
    struck: set[int] = set()
    if not fault.when:
        yield struck
        return
    look = _catch_starting if fault.when == "updating" else _catch_in_phase
    with _catch_rank(scene, fault, limit_s, look) as held:
        try:
            yield struck
        finally:
            scene.seized = None
            if fault.kind != "rank.stop" or held.pid not in struck:
                _let_go(held)


def _let_go(held: ProcessHandle) -> None:
    with contextlib.suppress(CannotInject):  # it may have been killed
        held.send_signal(signal.SIGCONT)


def _catch_rank(scene: InjectionScene, fault: InjectedFault, limit_s: float, look: CatchRank) -> ProcessHandle:
    """Wait for the fault's moment, then stop the rank that the fault names, or a random one. Return the process's
    handle. Raises CannotInject after `limit_s`."""
    until = time.monotonic() + limit_s
    rank = fault.rank
    while time.monotonic() < until:
        status = scene.sight.read_status()
        if status is None or not status.active:
            time.sleep(_SPIN_S)
            continue
        if rank is None:
            rank = _draw_rank(scene, fault, status)
        look_until = time.monotonic() + _LOOK_S
        while time.monotonic() < look_until:
            if held := look(scene, status, rank, fault):
                scene.seized = rank
                return held
            time.sleep(_SPIN_S)
    raise CannotInject(f"no rank was seen {fault.when} within {limit_s:g} s")


def _draw_rank(scene: InjectionScene, fault: InjectedFault, status: ObservedStatus) -> int:
    """Draw a random rank of the node that the fault names. If this node has no ranks, draw a rank of any node."""
    seated = any(node.node == fault.node for node in status.active)
    return scene.choose_rank(fault if seated else msgspec.structs.replace(fault, node=""), status)


def _catch_in_phase(
    scene: InjectionScene, status: ObservedStatus, rank: int, fault: InjectedFault
) -> ProcessHandle | None:
    """Stop the rank if its slot reports the save or restore phase that the fault names; otherwise return None."""
    wanted = PHASES[fault.when]
    reading = scene.sight.read_rank_slot(status, rank)
    if reading is None or reading.phase != wanted:
        return None
    try:
        held = open_confirmed(lambda: scene.sight.require_descendant(status.node_of(rank), reading.pid))
    except CannotInject:
        return None
    scene.keep_undo(ContinueProcess(held.pid, held.started))
    again = scene.sight.read_rank_slot(status, rank) if held.stop() else None
    if again and again.phase == wanted and again.pid == held.pid:
        return held
    with held:
        _let_go(held)
    return None


def _catch_starting(
    scene: InjectionScene, status: ObservedStatus, rank: int, fault: InjectedFault
) -> ProcessHandle | None:
    """Stop a rank before it begins to restore or, for a fault of the store, to join groups. Return None if the rank has
    no process. Raises CannotInject if the rank is already past the moment."""
    coming = status.generation + (status.phase not in _LAUNCHED)
    status = msgspec.structs.replace(status, generation=coming)
    try:
        held = open_confirmed(lambda: scene.sight.rank_pid(status, rank))
    except CannotInject:
        return None
    scene.keep_undo(ContinueProcess(held.pid, held.started))
    if held.stop():
        reading = scene.sight.read_rank_slot(status, rank)
        if reading is None or reading.pid != held.pid or not _is_past(reading, fault):
            return held
    with held:
        _let_go(held)
    raise CannotInject(f"rank {rank} had passed that moment, or had ended, before it could be stopped")


def _is_past(reading: SlotReading, fault: InjectedFault) -> bool:
    return bool(reading.grouped_at if fault.kind == "store.kill" else reading.restored_at)
