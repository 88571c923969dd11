"""Makes a node's hello, and its beat from what its ranks have reported; it has the step of the slowest rank."""

from collections.abc import Iterable, Sequence
from math import isfinite

import msgspec

from holdfast.agent.agent_interfaces import AgentIdentity, NodeRanks, SnapshotKeeper
from holdfast.core.agent_state_machine import AgentProtocol
from holdfast.core.detect.job_progress import agreed_count, agreed_origin
from holdfast.model.observation import Beat
from holdfast.wire.agent_messages import Hello
from holdfast.wire.rank_memory.slot_reader import SlotReading


def make_hello(
    identity: AgentIdentity, life: AgentProtocol, ranks: NodeRanks, keeper: SnapshotKeeper, *, ready: bool
) -> Hello:
    running = max((key.generation for key, rank in ranks.held.items() if rank.code is None), default=0)
    return Hello(
        node=identity.node,
        host=identity.host,
        nproc=identity.nproc,
        order=identity.order,
        generation=life.occupied_by(running),  # parked ranks too: a node without a seat is to end them
        ready=ready,
        copies=keeper.list_copies(),
        keeper=keeper.address,
        epoch=life.epoch,
        identity=identity.on_host,
    )


def show_first_step(reading: SlotReading, *, ended: bool) -> SlotReading:
    """Return the reading; if the rank has ended, with the first step that holdfast's client counted and held back. The
    client holds the count back because the script may still number the step itself. If the two numbers may differ, the
    count stays hidden."""
    kept_back = reading.numbered and reading.counted and reading.step < 0 <= reading.first_step
    if not kept_back or not (ended or reading.failed or reading.ending == "returned"):
        return reading
    return msgspec.structs.replace(reading, step=reading.first_step, at=reading.first_at)


def make_beat(node: str, readings: Sequence[SlotReading], wall_s: float) -> Beat:
    """Return the beat of ranks that all have a step. `wall_s` converts the ranks' times to the controller's time."""
    slowest = min(readings, key=lambda r: (r.step, -r.at))
    loss, loss_step = _pick_loss(readings, slowest)
    return Beat(
        node=node,
        generation=slowest.generation,
        step=slowest.step,
        at=slowest.at + wall_s,
        last_at=max(r.at for r in readings) + wall_s,
        first_step=min(r.first_step for r in readings),
        first_at=max(r.first_at for r in readings) + wall_s,
        counted=slowest.counted,
        origin=agreed_origin(r.origin if r.counted else -1 for r in readings),
        made_up=any(r.made_up for r in readings),
        loss=loss,
        loss_step=loss_step,
        phase=slowest.phase,
        # One rank that does not ask would make the step that all the others leave out, and wait for them in it.
        skippable=all(r.skippable for r in readings),
        grouped_at=_latest_instant([r.grouped_at for r in readings], wall_s),
        restoring_at=_latest_instant([r.restoring_at for r in readings], wall_s),
        restored_at=_latest_instant([r.restored_at for r in readings], wall_s),
        restored=agreed_origin(r.restored for r in readings),
        set_up_at=_latest_instant([r.set_up_at for r in readings], wall_s),
        skipped=max(r.skipped for r in readings),
        skipped_samples=sum(r.skipped_samples for r in readings),
        parted=all(r.ending in ("parted", "returned") for r in readings),
        tokens=min(r.tokens for r in readings),  # all tell the same sums, and the slowest is the last to add to them
        flops=min(r.flops for r in readings),
        parameters=agreed_count(r.parameters for r in readings),
        survives=all(r.survives for r in readings),
        resizes=all(r.resizes for r in readings),
        carries=all(r.carries for r in readings),
        replicated=all(r.replicated for r in readings),
    )


def _pick_loss(readings: Sequence[SlotReading], slowest: SlotReading) -> tuple[float | None, int]:
    """Return a loss of any rank, since often only one logs it, and its step: that of the slowest rank's step or, where
    no rank tells it yet, the newest. Of losses of one step, one that is not finite comes first. The step is -1 if it is
    not numbered as the slowest rank's step is."""
    told = [(r.loss_step == slowest.step, r.loss_step, not isfinite(r.loss), r) for r in readings if r.loss is not None]
    if not told:
        return None, -1
    *_, owner = max(told, key=lambda one: one[:3])
    return owner.loss, owner.loss_step if owner.counted == slowest.counted else -1


def _latest_instant(instants: list[float], wall_s: float) -> float:
    """Return the latest instant that a rank has reported; 0 if none has."""
    return max(instants) + wall_s if any(instants) else 0.0


def returned_ranks(readings: Iterable[SlotReading], generation: int) -> set[int]:
    """Return the ranks whose script has finished, though their process may not have ended yet."""
    return {reading.rank for reading in readings if reading.generation == generation and reading.ending == "returned"}
