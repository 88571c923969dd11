"""Probe of one training step that the devices of the node make together, as TP2 x PP2 x DP2 or with experts.

Devices swap roles between rounds, and all replicas have the same batch. So several devices compute each value, and a
comparison of the bits shows which device computed wrongly.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.minigpt_collectives import RankAxis, RankExchange
from holdfast.agent.probes.minigpt_model import MiniGptForm, train_step
from holdfast.agent.probes.probe_team import LIMIT_S, TeamError, TeamSeat, TeamTask, find_seats, run_team, team_refusal
from holdfast.agent.probes.probe_tools import new_finding, tensor_digest
from holdfast.agent.probes.reference_step import forms_of_size
from holdfast.core.diagnose.sdc_localization import PlayedPart, TracePoint, assess_traces
from holdfast.model.probe_findings import Finding

_PROBE = "parallel_reference"
_MOST = 8  # devices in one step


class PlayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's digests, timing and result of one step."""

    form: str
    play: int
    part: int
    points: tuple[TracePoint, ...]
    finite: bool
    took_s: float


def run(asked: ProbeRequest) -> Iterator[Finding]:
    seats = find_seats(cores=not asked.small)
    if why := team_refusal(seats, asked.left_s):
        yield Finding(probe=_PROBE, level=3, ok=None, detail=why)
        return
    limit_s = min(LIMIT_S, asked.left_s)
    # Processors are many and alike: those of one step stand for all.
    seats = seats[:_MOST] if seats[0].device == "cpu" else seats
    yield from probe_seats(seats, small=asked.small, repeats=asked.repeats, limit_s=limit_s)


def probe_seats(seats: Sequence[TeamSeat], *, small: bool, repeats: int, limit_s: float) -> Iterator[Finding]:
    """Have the devices train each form of the model together. Yield a finding for each form, or why the team failed."""
    task = TeamTask(module=_PROBE, rank=0, world=0, port=0, device="", small=small, repeats=repeats, limit_s=limit_s)
    blank = replace(new_finding(_PROBE, torch.device(seats[0].device)), place="")
    try:
        told = run_team(seats, task, PlayedStep)
    except TeamError as e:
        yield e.to_finding(blank)
        return
    for form in dict.fromkeys(one.form for one in told[0]):
        steps = [
            (seat.place, one) for seat, lines in zip(seats, told, strict=True) for one in lines if one.form == form
        ]
        layout = describe_layout(len(seats), experts="experts" in form)
        yield _judge_steps(replace(blank, form=f"{form} {layout}"), steps)


def _judge_steps(found: Finding, steps: Sequence[tuple[str, PlayedStep]]) -> Finding:
    played = [PlayedPart(play=one.play, part=one.part, device=place, points=one.points) for place, one in steps]
    judged = assess_traces(played)
    if judged.reason:
        place = judged.bad[0] if len(judged.bad) == 1 else ""
        return replace(found, ok=False, place=place, detail=judged.reason)
    if broken := [place for place, one in steps if not one.finite]:
        return replace(found, ok=False, detail=f"the step gave a value that is not finite on {', '.join(broken)}")
    parts = {one.part: one.points for one in played}
    digest = hashlib.sha256(msgspec.json.encode([parts[part] for part in sorted(parts)])).hexdigest()[:32]
    took = sorted(one.took_s for _, one in steps)
    return replace(found, digest=digest, detail=f"a step in {took[len(took) // 2]:.3f} s")


# --- the layout ------------------------------------------------------------------------------------------------------


def describe_layout(devices: int, *, experts: bool) -> str:
    return f"{'EP2' if experts else 'TP2'}{ {2: '', 4: ' DP2', 8: ' PP2 DP2'}[_step_size(devices)] }"


def _step_size(devices: int) -> int:
    """Return how many of the devices make one step together: 8, 4 or 2."""
    return next(size for size in (_MOST, 4, 2) if size <= devices)


def plan_rounds(devices: int) -> list[tuple[int, ...]]:
    """Return the devices of each round, ordered by role. Over all rounds, several devices play each role."""
    size = _step_size(devices)
    starts = (0, 1) if devices == size else range(0, devices, size // 2)
    return [tuple((start + role) % devices for role in range(size)) for start in starts]


def _roles_of_axis(size: int, role: int) -> dict[str, tuple[int, ...]]:
    """Return the roles in this role's group along each axis: two, or this role alone if the layout has no such axis."""
    steps = {"inner": 1, "stage": 2 if size == _MOST else 0, "replica": size // 2 if size > 2 else 0}
    found: dict[str, tuple[int, ...]] = {}
    for axis, step in steps.items():
        first = role - step * ((role // step) % 2) if step else role
        found[axis] = (first, first + step) if step else (role,)
    return found


def _part_of(size: int, role: int) -> int:
    """Return which part of the step's work a role does; its replica does the same part."""
    return role % (size // 2) if size > 2 else role


# --- one rank --------------------------------------------------------------------------------------------------------


def run_rank(task: TeamTask, device: torch.device) -> Iterator[PlayedStep]:
    sizes = (64, 2, 32) if task.small else (128, 2, 64) if device.type == "cpu" else (512, 4, 256)
    forms, times = forms_of_size(*sizes), 1 + task.repeats
    for number, seats in enumerate(plan_rounds(task.world)):
        axes = _join_axes(seats, task.rank)
        for play in range(number * times, (number + 1) * times) if axes is not None else ():
            part = _part_of(len(seats), seats.index(task.rank))
            yield from (_play_step(form, device, axes or {}, (play, part)) for form in forms)
        dist.barrier()


def _play_step(
    form: MiniGptForm, device: torch.device, axes: dict[str, RankAxis], play_and_part: tuple[int, int]
) -> PlayedStep:
    exchange = RankExchange(**axes)
    began = time.perf_counter()
    result = train_step(form, device, exchange)
    took_s = time.perf_counter() - began
    last = TracePoint(name="the end of the step", sent=tensor_digest(*result))
    play, part = play_and_part
    return PlayedStep(
        form=str(form),
        play=play,
        part=part,
        points=(*exchange.points, last),
        finite=all(bool(tensor.isfinite().all()) for tensor in result),
        took_s=round(took_s, 4),
    )


def _join_axes(seats: tuple[int, ...], rank: int) -> dict[str, RankAxis] | None:
    """Make the process groups of a round, on all ranks in the same order; None if this rank has no role in it."""
    mine: dict[str, RankAxis] = {}
    for axis in ("inner", "stage", "replica"):
        for roles in dict.fromkeys(_roles_of_axis(len(seats), role)[axis] for role in range(len(seats))):
            ranks = tuple(seats[role] for role in roles)
            group = dist.new_group(sorted(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                mine[axis] = RankAxis(ranks.index(rank), len(ranks), group, ranks)
    return mine if rank in seats else None
