"""The state that one worker of a pipeline holds between steps and across failures."""

import os
import secrets
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.client.elastic.backward_halves import BackwardHalves
from holdfast.client.elastic.early_steps import EarlySteps
from holdfast.client.elastic.finished_passes import FinishedPasses
from holdfast.client.elastic.kept_snapshots import KeptSnapshots, choose_reach
from holdfast.client.elastic.layer_files import LayerFiles
from holdfast.client.elastic.layer_state import HOST, LayerUnit, MakeLayer, MakeOptimizer
from holdfast.client.elastic.pass_times import PassTimes
from holdfast.client.elastic.rank_traffic import RankTraffic
from holdfast.client.elastic.recovery_settlement import RankReport
from holdfast.client.elastic.shadow_layers import add_shadows
from holdfast.client.elastic.step_totals import first_holder
from holdfast.core.elastic.layer_owners import Held
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.core.elastic.route_times import Route
from holdfast.model.pipeline_routes import PipelineJob, RoutePlan


class HeldLayers:
    """The layers of a worker, the plan that it follows, and how far it has come in a step."""

    def __init__(
        self,
        job: PipelineJob,
        make: list[MakeLayer],
        optimizer: MakeOptimizer,
        path: str | Path | None,
        *,
        shadows: bool = False,
    ) -> None:
        self.job, self._make, self._make_optimizer = job, make, optimizer
        self.units: dict[int, LayerUnit] = {}
        self.snapshots = KeptSnapshots()
        self.files = LayerFiles(None if path is None else Path(path), job.layers)
        self.traffic = RankTraffic(HOST)  # with the others of this generation
        self.plan = RoutePlan(held=(), routes=())  # with shadows
        self.bare = self.plan  # as it was chosen, without them
        self.keeps_shadows = shadows
        self.worker = -1  # this worker's number in the plan
        self.reach = 0  # how many ranks further on its snapshots are kept
        self.meeting = 0  # of workers, at which the plan was made; 0: there is none
        self.changes = 0  # of the plan since then
        self.committed = 0
        self.finished = 0  # the last step of which all is done
        self.ready = 0  # the step whose summed gradients are in hand
        self.made = FinishedPasses()  # of the step under way, or of the one that broke off
        self.reused: dict[int, Route] = {}  # by microbatch that was finished before its step broke off: who has it
        self.vote: tuple[int, tuple[float, ...]] = (
            0,
            (),
        )  # the last that was seen, with its totals
        self.broke_at = 0.0
        self.watched_since = time.monotonic()  # when workers met last
        self.announced = 0  # workers whose end was told since then
        self.costs = PhaseCosts()
        self.times = PassTimes()
        self.halves = BackwardHalves()
        self.early = EarlySteps()
        self.handed: dict[int, LayerUnit] = {}  # copies that a leaving worker gave this one, as of `committed`
        self.line = ""  # names what this generation writes to storage
        self.incidents = 0

    @property
    def device(self) -> torch.device:
        """Return the device of the layers, of which the groups of this generation send tensors."""
        return self.traffic.device

    def renew_traffic(self, device: torch.device) -> None:
        """Send by the groups of a new generation, and drop what belongs to the earlier one."""
        self.traffic.close()
        self.traffic = RankTraffic(device)

    def complete(self, plan: RoutePlan, have: Held) -> RoutePlan:
        """Return the plan; if this job keeps shadow layers, add them. `have` says which layers each worker holds."""
        return add_shadows(plan, have) if self.keeps_shadows else plan

    def take_plan(self, bare: RoutePlan, plan: RoutePlan, worker: int) -> None:
        self.bare, self.plan, self.worker = bare, plan, worker
        self.reach = choose_reach(plan, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.committed = plan.resume_step - 1
        self.times.forget()

    def list_finished(self) -> tuple[tuple[int, int], ...]:
        """Return the finished backward passes of the step that broke off, as far as others may rely on them."""
        return self.made.list_finished() if self.job.ordered and self.device == HOST else ()

    def take_over(self) -> None:
        """Hold the layers that were handed over, as this worker meets the others without those who left."""
        self.units |= self.handed

    def store_layers(self) -> None:
        """Write the layers of which this worker is the first holder to storage. All workers call it at one step."""
        rank = dist.get_rank()
        for layer, unit in sorted(self.units.items()):
            if first_holder(self.plan, layer) == rank:
                self.files.write(layer, self.committed, self.line, unit.pack())
        if rank == 0:
            self.files.drop_old()

    def make_unit(self, number: int) -> LayerUnit:
        return LayerUnit(number, self._make[number], self._make_optimizer, self.job.seed, self.device)

    def buffer_versions(self) -> list[int]:
        return [buffer._version for unit in self.units.values() for buffer in unit.module.buffers()]

    def make_report(self, step_s: float, rest_s: float) -> RankReport:
        return RankReport(
            meeting=self.meeting,
            changes=self.changes,
            worker=self.worker,
            plan=self.bare if self.meeting else None,
            layers=tuple((number, unit.step) for number, unit in sorted(self.units.items()) if unit.whole),
            handed=tuple(sorted(self.handed)),
            ready=self.ready,
            kept_step=self.made.step,
            kept=self.list_finished(),
            voted=self.vote[0],
            totals=self.vote[1],
            snapshots=self.snapshots.list_snapshots(),
            stored=self.files.newest_whole(),
            broke_at=self.broke_at,
            watched_s=time.monotonic() - self.watched_since,
            announced=self.announced,
            step_s=step_s,
            rest_s=rest_s,
            passes=self.times.list_layers(),
            send_s=self.times.median_send_s(),
            costs=self.costs,
            incidents=self.incidents,
            line=secrets.token_hex(4),
        )
