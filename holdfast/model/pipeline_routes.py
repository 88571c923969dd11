"""Routes of microbatches through pipelines, and the situation in which new routes are chosen. A layer may move from one
worker to another.

Workers are ranks of the new generation. Layers are numbered in the order of the forward pass. The microbatches of a
step are always the same, whichever workers compute them.
"""

from enum import IntEnum
from typing import Literal

import msgspec


class Semantics(IntEnum):
    """How closely results match those of a run without failures. A user names the least match that is allowed."""

    BATCH_CHANGED = 0  # other samples count in a step
    FP_ORDER = 1  # the same samples, sums of floats in another order
    EXACT = 2  # the same bits


class RouteSegment(msgspec.Struct, frozen=True):
    """Layers `first` up to, not including, `end`, computed by one worker."""

    worker: int
    first: int
    end: int


class LayerTransfer(msgspec.Struct, frozen=True):
    """A layer's weights and optimizer state, sent from a worker that holds them to one that needs them."""

    layer: int
    source: int
    target: int


class RoutePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan: which worker holds which layers, and which workers compute each microbatch."""

    held: tuple[tuple[int, ...], ...]  # by worker: its layers, which take part in every optimizer step
    routes: tuple[tuple[RouteSegment, ...], ...]  # by microbatch, in the order of the forward pass; (): left out
    transfers: tuple[LayerTransfer, ...] = ()
    rollback: bool = False  # to `resume_step` - 1, by snapshots in memory or by checkpoints, as `sources` says
    sources: tuple[int, ...] = ()  # with `rollback`, by layer: the worker that has the snapshot; -1: storage
    resume_step: int = 1  # the next step to make
    saves: tuple[int, ...] = ()  # by layer: the worker that writes it to storage, as it is before `resume_step`
    halves: bool = False  # backward passes are made in two halves
    then: "RoutePlan | None" = None  # what follows from its own `resume_step` on, its transfers right before that


class PipelineJob(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a pipeline that do not change while it trains."""

    layers: int
    microbatches: int
    stages: int  # of a whole pipeline, as the user wants it
    pipelines: int = 0  # at most, beside standbys; 0: as many as there are workers for
    floor: Semantics = Semantics.EXACT
    ordered: bool = False  # gradients are summed by microbatch number, so any routes give the same bits
    capacity: int = 0  # layers that one worker has memory for, at most; 0: all of them
    seed: int = 0  # of what a policy draws
    halves: Literal["off", "auto", "on"] = (
        "off"  # of backward passes; "auto": while they make lost workers' work faster
    )


class PipelineSituation(msgspec.Struct, frozen=True, kw_only=True):
    """The situation in which routes are chosen. All workers know the same, so all choose the same routes."""

    committed: int  # the newest step that is applied wherever its layer is held
    held: tuple[tuple[int, ...], ...]  # by worker: layers at `committed`; () for one that has just come
    earlier: RoutePlan | None = None  # the plan before, in today's numbers; -1 - i in its routes is the i-th of `lost`
    lost: tuple[tuple[int, ...], ...] = ()  # layers that each lost worker held
    snapshots: tuple[tuple[tuple[int, int], ...], ...] = ()  # by worker: (layer, step) of the snapshots in its memory
    stored: int = -1  # step of the newest whole checkpoint; -1: there is none
    shadows: tuple[tuple[int, ...], ...] = ()  # by worker: layers that it keeps current beside its own
    speeds: tuple[float, ...] = ()  # by worker: relative; () if all are alike
    leaving: tuple[int, ...] = ()  # workers that will go soon: notice of preemption, drain, time limit
