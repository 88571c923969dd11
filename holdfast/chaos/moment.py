"""Striking in the right moment: a rank is held in the middle of a save or a restore while it is done."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from holdfast.chaos.fault import Cannot, Continue, Fault
from holdfast.chaos.hold import Held, state
from holdfast.chaos.scene import Scene
from holdfast.chaos.sight import Status

PHASES = {"saving": "save", "restoring": "restore"}  # as ranks name them in their slots
_UPDATING = ("pausing", "launching", "starting")
_SPIN_S = 0.0005
_LOOK_S = 0.5  # then ranks may be elsewhere


def await_step(scene: Scene, fault: Fault, lives: Callable[[], bool], limit_s: float) -> None:
    """Until the job trains and has made the step."""
    until = time.monotonic() + limit_s
    while True:
        status = scene.sight.status()
        if status and status.phase == "training" and status.step >= max(fault.at_step, 1):
            return
        if not lives():
            raise Cannot("the job has ended")
        if time.monotonic() > until:
            raise Cannot(f"the job did not train at step {max(fault.at_step, 1)} within {limit_s:g} s")
        time.sleep(0.05)


@contextlib.contextmanager
def seized(scene: Scene, fault: Fault, limit_s: float) -> Iterator[None]:
    """A block in which the moment lasts; at once if none was asked for."""
    if fault.when == "updating":
        _await_update(scene, fault, limit_s)
    if fault.when not in PHASES:
        yield
        return
    with _caught(scene, fault, limit_s) as held:
        try:
            yield
        finally:
            _let_go(held, fault)


def _let_go(held: Held, fault: Fault) -> None:
    if fault.kind != "rank.stop":
        with contextlib.suppress(Cannot):  # it may have been killed
            held.signal(signal.SIGCONT)


def _await_update(scene: Scene, fault: Fault, limit_s: float) -> None:
    """From the end of the old ranks to the first step of the new ones; a rank that is to be struck must be there."""
    until = time.monotonic() + limit_s
    while not ((status := scene.sight.status()) and status.phase in _UPDATING and _is_there(scene, fault, status)):
        if time.monotonic() > until:
            raise Cannot(f"no restart for an update began within {limit_s:g} s")
        time.sleep(0.01)


def _is_there(scene: Scene, fault: Fault, status: Status) -> bool:
    try:
        return fault.rank is None or state(scene.sight.pid(status, fault.rank)) not in ("", "Z", "X")
    except Cannot:
        return False


def _caught(scene: Scene, fault: Fault, limit_s: float) -> Held:
    """A rank that stands in this phase, stopped by us."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        status = scene.sight.status()
        if status is None or not status.active:
            time.sleep(_SPIN_S)
            continue
        rank = fault.rank if fault.rank is not None else status.active[0].numbers[0]
        look_until = time.monotonic() + _LOOK_S
        while time.monotonic() < look_until:
            if held := _try(scene, status, rank, PHASES[fault.when]):
                return held
            time.sleep(_SPIN_S)
    raise Cannot(f"no rank was seen {fault.when} within {limit_s:g} s")


def _try(scene: Scene, status: Status, rank: int, wanted: str) -> Held | None:
    reading = scene.sight.read(status, rank)
    if reading is None or reading.phase != wanted:
        return None
    try:
        held = Held(reading.pid)
    except Cannot:
        return None
    scene.keep(Continue(held.pid, held.started))
    if held.stop() and (again := scene.sight.read(status, rank)) and again.phase == wanted and again.pid == held.pid:
        return held
    with held, contextlib.suppress(Cannot):
        held.signal(signal.SIGCONT)
    return None
