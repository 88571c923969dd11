"""The state of a simulated job at scale, shared by all parts that change the job."""

from collections.abc import Callable
from functools import cache
from random import Random

from holdfast.core.decide.job_view import JobView
from holdfast.logs import catalog_files
from holdfast.sim.scale.bad_releases import BadReleases
from holdfast.sim.scale.failure_mixes import FailureMix, FailureMode
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.failure_symptoms import AlarmModel
from holdfast.sim.scale.node_defects import NodeDefect
from holdfast.sim.scale.price_sheet import PriceDraws, PriceSheet
from holdfast.sim.scale.scale_result import ScaleTally
from holdfast.sim.scale.step_progress import ScaleProgress
from holdfast.sim.scale.time_book import TimeBook
from holdfast.sim.scale.virtual_clock import VirtualClock

_catalog = cache(catalog_files.load_failures)


class ScaleState:
    def __init__(self, setup: ScaleSetup, mix: FailureMix, sheet: PriceSheet) -> None:
        self.setup, self.mix = setup, mix
        self.rng = Random(f"ours {setup.seed}")
        self.prices = PriceDraws(sheet, setup.gpus, self.rng)
        self.clock = VirtualClock()
        self.view: JobView  # of the decider, which the policy makes anew for every job
        self.begins = True  # the fleet has this job's nodes at hand
        self.nodes: set[str] = set()
        self.dead: set[str] = set()  # of these, those that answer no more
        self.defects: dict[str, NodeDefect] = {}  # by node
        self.book = TimeBook()
        self.tally = ScaleTally()
        self.signs = AlarmModel(self.prices, _catalog(), setup.step_s, setup.off)
        self.bugs = BadReleases()
        self.away: tuple[float, FailureMode | None] = (0.0, None)  # a service outside, until then
        self.cried = ""  # what the newest alarm was about
        self.course = ScaleProgress(setup, self.prices, self.rng, self.tally)

    @property
    def now(self) -> float:
        return self.clock.now

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.clock.call_later(delay_s, call, *args)
