"""The answer of a recovery policy, which is a proposal with its costs or the reason why there is none, and the costs of
each phase of a change."""

from typing import Literal

import msgspec

from holdfast.core.elastic.loss_forecast import LossHistory
from holdfast.model.pipeline_routes import RoutePlan, Semantics

Phase = Literal["detect", "abort", "agree", "plan", "rebuild", "move", "restore", "save", "restart", "verify", "warm"]


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that a policy proposes, and what it costs."""

    policy: str
    plan: RoutePlan
    downtime_s: dict[Phase, float]  # in which nobody trains
    rate_after: float  # samples per second beside those of the whole job; 1: as fast
    lost_steps: int = 0  # committed ones that have to be made again
    extra_memory: int = 0  # layers that the fullest worker holds beyond what it held before
    tolerance: int = 0  # further losses, whichever they are, after which every layer still has a live owner
    semantics: Semantics
    reason: str
    slow_steps: int = 0  # made at `slow_rate` before `rate_after` holds: the first part of a plan in two
    slow_rate: float = 1.0


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """Why a policy has no proposal."""

    policy: str
    reason: str


class PhaseCosts(msgspec.Struct, frozen=True, kw_only=True):
    """How many seconds each phase takes, and how often failures and changes are expected. New measurements enter a
    running mean."""

    detect_s: float = 0.5
    abort_s: float = 0.1
    agree_s: float = 0.1  # suspects are fenced, the vote is sealed, survivors say what they hold, and all go on
    plan_s: float = 0.05
    rebuild_s: float = 1.0  # new groups of communication
    regroup_s: float = 0.5  # new groups across pipelines alone, where those inside of pipelines stay as they are
    transfer_s: float = 0.1  # one layer over one link
    memory_s: float = 0.1  # one layer from a snapshot in memory
    storage_s: float = 1.0  # one layer from storage
    save_s: float = 1.0  # one layer to storage
    restart_s: float = 30.0  # all processes end and start again
    verify_s: float = 0.05
    warm_s: float = 0.0  # of a worker that has just come, until it is as fast as the others
    step_s: float = 10.0
    layer_s: tuple[float, ...] = ()  # by layer: relative; () if all take the same
    send_s: float = 0.0  # of a worker, to send one microbatch to the next one; in the same unit as `layer_s`
    rest_s: float = 0.0  # of a step, beside all passes: sums, vote, optimizer; in the same unit as `layer_s`
    unit_s: float = 0.0  # seconds that are 1 in `layer_s`; 0: not measured
    kappa: float = 1.0  # the share of a pipeline's filling and draining that foreign microbatches cannot use
    forward_share: float = 1 / 3  # of a layer's passes for one microbatch
    weights_share: float = 0.0  # and for the gradients of its weights; 0: not measured
    split_s: float = 0.001  # that a layer takes longer for one microbatch if its backward pass is made in two halves
    repair_s: float = 3600.0  # until a lost worker is replaced by a new one
    change_s: float = 36000.0  # until the plan changes for another reason
    failures_per_s: float = 0.0  # of one worker, where losses are not counted
    losses: LossHistory | None = None  # as they were counted; plans are weighed by what that forecasts
    weight: float = 0.25  # of a new measurement in the running mean

    def seen_phase(self, name: str, seconds: float) -> "PhaseCosts":
        """Return the costs, with one more measurement of a phase in its running mean."""
        before = getattr(self, f"{name}_s")
        return msgspec.structs.replace(self, **{f"{name}_s": before + self.weight * (seconds - before)})
