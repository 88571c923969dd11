"""Routes of microbatches through pipelines whose layers may change hands, and what is known when they are chosen anew.

Workers are ranks of the generation that goes on. Layers are numbered in the order of the forward pass. A step has
always the same microbatches, whoever computes them.
"""

from enum import IntEnum

import msgspec


class Semantics(IntEnum):
    """What holds of results, beside a run without failures; a user names the least that must hold."""

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
    """Who holds which layers, and who computes them for each microbatch."""

    held: tuple[tuple[int, ...], ...]  # by worker: its layers, which take part in every optimizer step
    routes: tuple[tuple[RouteSegment, ...], ...]  # by microbatch, in the order of the forward pass; (): left out
    transfers: tuple[LayerTransfer, ...] = ()
    rollback: bool = False  # to `resume_step` - 1, by snapshots in memory or by checkpoints, as `sources` says
    sources: tuple[int, ...] = ()  # with `rollback`, by layer: the worker that has the snapshot; -1: storage
    resume_step: int = 1  # the next step to make
    saves: tuple[int, ...] = ()  # by layer: the worker that writes it to storage, as it is before `resume_step`
    then: "RoutePlan | None" = None  # what follows from its own `resume_step` on, its transfers right before that


class PipelineJob(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a pipeline trains."""

    layers: int
    microbatches: int
    stages: int  # of a whole pipeline, as the user wants it
    pipelines: int = 0  # at most, beside standbys; 0: as many as there are workers for
    floor: Semantics = Semantics.EXACT
    ordered: bool = False  # gradients are summed by microbatch number, so any routes give the same bits
    capacity: int = 0  # layers that one worker has memory for, at most; 0: all of them
    seed: int = 0  # of what a policy draws


class PipelineSituation(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker knows when routes are chosen: the same for all, so that all choose the same."""

    committed: int  # the newest step that is applied wherever its layer is held
    held: tuple[tuple[int, ...], ...]  # by worker: layers at `committed`; () for one that has just come
    earlier: RoutePlan | None = None  # the plan before, in today's numbers; -1 - i in its routes is the i-th of `lost`
    lost: tuple[tuple[int, ...], ...] = ()  # layers that each lost worker held
    snapshots: tuple[tuple[tuple[int, int], ...], ...] = ()  # by worker: (layer, step) of the snapshots in its memory
    stored: int = -1  # step of the newest whole checkpoint; -1: there is none
    shadows: tuple[tuple[int, ...], ...] = ()  # by worker: layers that it keeps current beside its own
    speeds: tuple[float, ...] = ()  # by worker: relative; () if all are alike
    leaving: tuple[int, ...] = ()  # workers that will go soon: notice of preemption, drain, time limit
