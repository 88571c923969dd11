"""Results of one simulated job, and of several seeds of it."""

from collections.abc import Mapping
from statistics import mean, stdev

import msgspec

from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.time_book import TimeBook

_LOOKS = 13000  # every ten minutes of 90 days


class ScaleTally(msgspec.Struct, kw_only=True):
    """Counts of incidents, evictions, used standbys and the like."""

    incidents: int = 0
    faults: dict[str, int] = {}
    evicted: int = 0
    standbys_used: int = 0
    standbys_lost: int = 0  # that failed while they waited
    waits: int = 0  # times that a replacement had to be waited for
    people: int = 0  # interventions
    updates: int = 0
    rolled_back: int = 0
    restored: dict[str, int] = {}  # from own memory, a peer, storage
    rungs: dict[str, int] = {}  # incidents and changes of code by what ended them, as the report counts them

    def count_rungs(self, counts: Mapping[str, int]) -> None:
        for rung, count in counts.items():
            self.rungs[rung] = self.rungs.get(rung, 0) + count

    def count_failure(self, name: str) -> None:
        self.faults[name] = self.faults.get(name, 0) + 1


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    failures: str
    gpus: int
    days: float
    seed: int
    standbys: int
    ettr: float
    lowest_hour: float  # ETTR of the worst hour
    saving: float  # the part of training that saving state takes
    wall_s: float
    lost_by_use: dict[str, float]
    lost_by_cause: dict[str, float]
    tally: ScaleTally
    off: tuple[str, ...] = ()

    @property
    def per_incident_s(self) -> float:
        return (1 - self.ettr) * self.wall_s / max(1, self.tally.incidents)


class ScaleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Means over several seeds of the same setup."""

    policy: str
    failures: str
    gpus: int
    days: float
    seeds: tuple[int, ...]
    ettr: float  # mean
    ettrs: tuple[float, ...]  # of each seed
    ettr_least: float
    ettr_most: float
    ettr_spread: float  # standard deviation
    lowest_hour: float
    incidents: float
    people: float
    standbys: int
    standbys_used: float
    evicted: float
    waits: float
    updates: float
    rolled_back: float
    lost_by_use: dict[str, float]  # seconds, mean
    lost_by_cause: dict[str, float]
    restored: dict[str, float]
    rungs: dict[str, float] = {}
    off: tuple[str, ...] = ()


def make_result(
    setup: ScaleSetup, names: tuple[str, str], standbys: int, book: TimeBook, tally: ScaleTally, *, stall: float
) -> ScaleResult:
    policy, failures = names
    return ScaleResult(
        policy=policy,
        failures=failures,
        gpus=setup.gpus,
        days=setup.days,
        seed=setup.seed,
        standbys=standbys,
        ettr=book.productive_s(stall) / book.wall_s if book.wall_s else 0.0,
        lowest_hour=min(book.ettr_curves(stall, max(600.0, book.wall_s / _LOOKS))[2], default=0.0),
        saving=stall,
        wall_s=book.wall_s,
        lost_by_use=book.by_use(stall),
        lost_by_cause=book.by_cause(stall),
        tally=tally,
        off=tuple(sorted(setup.off)),
    )


def make_summary(results: list[ScaleResult]) -> ScaleSummary:
    first, ettrs = results[0], [r.ettr for r in results]
    tallies = [r.tally for r in results]
    return ScaleSummary(
        policy=first.policy,
        failures=first.failures,
        gpus=first.gpus,
        days=first.days,
        seeds=tuple(r.seed for r in results),
        ettr=mean(ettrs),
        ettrs=tuple(ettrs),
        ettr_least=min(ettrs),
        ettr_most=max(ettrs),
        ettr_spread=stdev(ettrs) if len(ettrs) > 1 else 0.0,
        lowest_hour=min(r.lowest_hour for r in results),
        incidents=mean(t.incidents for t in tallies),
        people=mean(t.people for t in tallies),
        standbys=first.standbys,
        standbys_used=mean(t.standbys_used for t in tallies),
        evicted=mean(t.evicted for t in tallies),
        waits=mean(t.waits for t in tallies),
        updates=mean(t.updates for t in tallies),
        rolled_back=mean(t.rolled_back for t in tallies),
        lost_by_use=_mean_values([r.lost_by_use for r in results]),
        lost_by_cause=_mean_values([r.lost_by_cause for r in results]),
        restored=_mean_values([{k: float(v) for k, v in t.restored.items()} for t in tallies]),
        rungs=_mean_values([{k: float(v) for k, v in t.rungs.items()} for t in tallies]),
        off=first.off,
    )


def missed_ettr(whole: ScaleSummary, without: ScaleSummary) -> tuple[float, float]:
    """Return how much ETTR is lost without a mechanism: the mean difference over all seeds, and its standard error."""
    apart = [a - b for a, b in zip(whole.ettrs, without.ettrs, strict=True)]
    return mean(apart), stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0


def _mean_values(found: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in found for name in one)
    means = {name: mean(one.get(name, 0.0) for one in found) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))
