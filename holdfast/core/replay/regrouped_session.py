"""Turns the seats of a job into groups that replay, each a small job of its own, and collects their results.

A group numbers its ranks from 0 and has its own store. All groups have the same number of ranks, so they all do the
same work, batch for batch, and only the nodes differ.
"""

from collections.abc import Sequence
from math import prod

import msgspec

from holdfast.core.replay.majority import GroupResult, ReplayMajority
from holdfast.core.replay.node_grid import (
    Nodes,
    ReplayPlan,
    UnfitError,
    fit_grid,
    nodes_per_replica,
    plan_grid,
    shrink_mesh,
)
from holdfast.core.replay.regrouped_replay import DualPhaseReplay, ReplayGroup, ReplayLimits, ReplayRuling, ReplayWave
from holdfast.model.job_and_seats import Dims, Seat, world_size
from holdfast.model.replay_task import ReplayTask

_GROUPS = 3  # of fewer than three that differ nobody can say which is wrong


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay: the nodes, the number of steps and the newest step to start from."""

    seats: tuple[Seat, ...]
    mesh: Dims = ()
    suspects: Nodes = ()  # where some are likelier than the rest
    steps: int = 5
    not_after: int = -1
    seeded: bool = False  # the script said that its work follows from a seed


class GroupLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One group with its seats and mesh, to be launched like a job."""

    group: ReplayGroup
    seats: tuple[Seat, ...]
    world_size: int
    mesh: Dims
    replay: ReplayTask


class GroupSession:
    """A whole dual-phase replay: hands out launches, takes in group results, and ends with a ruling."""

    def __init__(self, asked: ReplayRequest, limits: ReplayLimits) -> None:
        self._asked = asked
        self._replay = DualPhaseReplay(plan_replay(asked.seats, asked.mesh, asked.suspects), limits)
        self._alike = ReplayMajority(comparable=asked.seeded)
        self._waiting: dict[str, GroupLaunch] = {}
        self._told: dict[str, GroupResult | None] = {}
        self._tries: dict[ReplayGroup, int] = {}
        self.unlike = False  # no two groups came to the same

    def next_launches(self) -> tuple[GroupLaunch, ...] | ReplayRuling:
        """Return the groups to launch now, or the ruling. While groups run, return only the groups without a result."""
        if self._waiting.keys() <= self._told.keys():
            self._judge_wave()
            match self._replay.next_wave():
                case ReplayRuling() as ruling:
                    return self._note_unlike(ruling)
                case ReplayWave() as wave:
                    self._begin_wave(wave)
        return tuple(launch for name, launch in self._waiting.items() if name not in self._told)

    def on_group_result(self, name: str, told: GroupResult | None) -> None:
        """Record the result of the replay with this name. `told` is None if it could not run or its result is
        unknown."""
        if name in self._waiting:
            self._told.setdefault(name, told)

    def _begin_wave(self, wave: ReplayWave) -> None:
        asked = self._asked
        self._told = {}
        self._waiting = {}
        for launch in wave_launches(wave, asked.seats, asked.mesh, asked.steps, asked.not_after):
            tries = self._tries[launch.group] = self._tries.get(launch.group, 0) + 1
            name = launch.replay.name if tries == 1 else f"{launch.replay.name}-{tries}"  # in a folder of its own
            replay = msgspec.structs.replace(launch.replay, name=name)
            self._waiting[name] = msgspec.structs.replace(launch, replay=replay)

    def _judge_wave(self) -> None:
        """Judge each group by comparing all groups of the wave, or by failures alone if no state can be compared."""
        known = {name: told for name, told in self._told.items() if told is not None}
        faulty = self._alike.judge_wave(known)
        whole = [faulty[name] for name, told in known.items() if told.ended]
        if len(whole) >= _GROUPS and all(one is None for one in whole):
            self.unlike, self._alike = True, ReplayMajority(comparable=False)
            faulty = self._alike.judge_wave(known)
        for name, launch in self._waiting.items():
            self._replay.on_group_result(launch.group, faulty.get(name))

    def _note_unlike(self, ruling: ReplayRuling) -> ReplayRuling:
        if not self.unlike:
            return ruling
        note = "groups that did the same work differed all over, so only crashes and losses that are not finite counted"
        return msgspec.structs.replace(ruling, reason=f"{ruling.reason}; {note}")


def plan_replay(seats: Sequence[Seat], mesh: Dims, suspects: Nodes = ()) -> ReplayPlan:
    """Return a plan for the suspects if they form enough groups, else for all nodes. Raise UnfitError if none fits."""
    if len({seat.nproc for seat in seats}) != 1:
        raise UnfitError("nodes with different numbers of ranks cannot stand in for one another")
    whole = nodes_per_replica(valid_mesh(seats, mesh), seats[0].nproc)
    nodes = tuple(seat.node for seat in seats)
    for chosen in (tuple(node for node in nodes if node in set(suspects)), nodes):
        try:
            m, n = fit_grid(len(chosen), whole)
        except UnfitError:
            if chosen is nodes:
                raise
            continue
        if n >= _GROUPS or chosen is nodes:
            return plan_grid(chosen, m, n)
    raise AssertionError("all nodes were tried")


def wave_launches(
    wave: ReplayWave, seats: Sequence[Seat], mesh: Dims, steps: int, not_after: int = -1
) -> tuple[GroupLaunch, ...]:
    """Return one launch for each group of a wave. All groups of a wave run at the same time."""
    nproc = {seat.node: seat.nproc for seat in seats}
    return tuple(group_launch(group, nproc, mesh, steps, not_after) for group in wave.groups)


def valid_mesh(seats: Sequence[Seat], mesh: Dims) -> Dims:
    """Return the mesh; empty if its size does not fit the seats."""
    return mesh if mesh and prod(size for _, size in mesh) == world_size(tuple(seats)) else ()


def group_launch(group: ReplayGroup, nproc: dict[str, int], mesh: Dims, steps: int, not_after: int) -> GroupLaunch:
    seats, first = [], 0
    for place, node in enumerate(group.nodes):
        seats.append(Seat(node=node, group_rank=place, first_rank=first, nproc=nproc[node]))
        first += nproc[node]
    name = f"{group.phase}-{group.repeat}-{group.name}"
    return GroupLaunch(
        group=group,
        seats=tuple(seats),
        world_size=first,
        mesh=shrink_mesh(mesh, first) if mesh else (),
        replay=ReplayTask(name=name, steps=steps, not_after=not_after, ranks=first, job_ranks=sum(nproc.values())),
    )
