"""View of one rank: what its node's newest beat tells of it."""

import msgspec

from holdfast.controller.control_loop import Controller
from holdfast.model.job_and_seats import Seat
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Arrival

_GROUPS = 8  # process groups of which the newest collective is told


class ReachedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """The newest collective that a rank reached in one process group."""

    group: str
    number: int
    ago_s: float


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    node: str
    generation: int
    heard_s: float | None = None  # since the node's last message; None: its silence is not watched
    beat_s: float | None = None  # since its last beat of this generation; None: there was none
    step: int = -1  # of the slowest rank of the node; -1: not every rank of it has made a step
    step_s: float | None = None  # since when it is at this step
    loss: float | None = None  # of the node's ranks
    phase: str = ""
    mute: bool = False  # it tells of no step, while other ranks of the node have made several
    collectives: tuple[ReachedCollective, ...] = ()  # the newest first; empty: it reports none


def view_rank(controller: Controller, rank: int) -> RankView | None:
    """Return what is known of a rank of the newest launch; None if it has no such rank."""
    view, registry, now = controller.view, controller.registry, controller.clock()
    seat = find_seat(view.seats, rank)
    if seat is None:
        return None
    heard_at, beat = registry.heard_at(seat.node), registry.beats.get(seat.node)
    found = RankView(
        rank=rank,
        node=seat.node,
        generation=view.generation,
        heard_s=max(0.0, now - heard_at) if heard_at is not None else None,
    )
    if beat is None or beat.generation != view.generation:
        return found
    return _add_beat(found, beat, controller.detectors.pace.number_step(beat), now)


def find_seat(seats: tuple[Seat, ...], rank: int) -> Seat | None:
    return next((seat for seat in seats if seat.has_rank(rank)), None)


def _add_beat(found: RankView, beat: Beat, step: int, now: float) -> RankView:
    """Add what a beat tells; `step` is the beat's step in the job's numbering."""
    return msgspec.structs.replace(
        found,
        beat_s=max(0.0, now - beat.sent) if beat.sent else None,
        step=step,
        step_s=max(0.0, now - beat.at) if beat.step >= 0 else None,
        loss=beat.loss,
        phase=beat.phase,
        mute=found.rank in beat.mute,
        collectives=_newest_collectives(beat.arrivals.get(found.rank, ()), now),
    )


def _newest_collectives(arrivals: tuple[Arrival, ...], now: float) -> tuple[ReachedCollective, ...]:
    newest: dict[str, Arrival] = {}
    for one in sorted(arrivals, key=lambda one: one.at):
        newest[one.group] = one
    found = sorted(newest.values(), key=lambda one: -one.at)[:_GROUPS]
    return tuple(ReachedCollective(group=one.group, number=one.seq, ago_s=max(0.0, now - one.at)) for one in found)
