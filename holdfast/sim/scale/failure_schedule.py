"""The schedule of failures and their causes, drawn from a setup and a seed; it is the same for every policy."""

from collections.abc import Iterator
from random import Random

import msgspec

from holdfast.sim.scale.failure_mixes import BlastFailure, FailureMix, FailureMode, Why

DAY_S = 86400.0

# What can be switched off, one at a time.
MECHANISMS = {
    "standbys": "no node waits: every eviction waits for the fleet",
    "snapshots": "no state in memory: every restart goes back to storage",
    "backups": "no copies on peers: the loss of a node goes back to storage",
    "zygote": "fresh interpreters instead of forked ranks",
    "health": "no readings of machines: what they name is seen when a collective times out",
    "hang": "no hang detection: a collective times out, and nobody is named",
    "naming": "hangs are seen, and nobody is named",
    "slow": "nobody is told of a slow machine: a person has to see it first",
    "replica": "replicas are not compared: corruption is seen by the loss alone",
    "words": "last words are not understood",
    "probes": "nodes are never tried",
    "rollback": "a bad release is not rolled back",
    "update": "every update is a job that is queued again",
    "ask": "nobody is asked: a job without a remedy ends, and is queued again by a person",
}


class ScaleSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Size, length, seed and options of a simulated job."""

    gpus: int
    days: float = 90.0
    seed: int = 1
    nproc: int = 8
    standbys: int | None = None  # None: the 99th percentile of what a day takes, every node by itself
    step_s: float = 10.0
    rate: float | None = None  # None: the mix's own
    updates: bool = True  # whether changes of code are counted
    off: frozenset[str] = frozenset()
    ask_s: float = 4 * 3600.0  # how long a person is waited for

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.nproc)

    @property
    def end_at(self) -> float:
        return self.days * DAY_S


class ScheduledFailure(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    fault: FailureMode
    why: Why
    blast: BlastFailure | None  # all nodes beside that one at once
    lemon: bool  # it hits a node that fails more often, if there is one left; else another
    luck: float  # 0 to 1: which node

    @property
    def name(self) -> str:
        return self.blast.name if self.blast else self.fault.name


class FailureSchedule(msgspec.Struct, frozen=True, kw_only=True):
    strikes: tuple[ScheduledFailure, ...]
    updates: tuple[float, ...]  # when people change the code


def draw_schedule(setup: ScaleSetup, mix: FailureMix) -> FailureSchedule:
    """Draw all failures and updates from the seed. Every policy faces the same ones, so results compare in pairs."""
    strikes = _draw_failures(setup, mix, setup.nodes, Random(f"weather {setup.seed}"))
    return FailureSchedule(strikes=tuple(strikes), updates=_draw_updates(setup, mix))


def draw_standby_failures(setup: ScaleSetup, mix: FailureMix, standbys: int) -> tuple[ScheduledFailure, ...]:
    """Draw failures of standbys, which fail as often as other nodes. Standbys run no training code, so only machine
    failures that show as silence or in a health reading are drawn."""
    strikes = _draw_failures(setup, mix, standbys, Random(f"standbys {setup.seed}"))
    return tuple(s for s in strikes if s.why == "machine" and s.fault.shows in ("silence", "health") and not s.blast)


def _draw_failures(setup: ScaleSetup, mix: FailureMix, nodes: int, rng: Random) -> Iterator[ScheduledFailure]:
    rate = mix.rate if setup.rate is None else setup.rate
    per_s = nodes * rate / DAY_S
    lemonish = mix.lemons * mix.lemon_times / (mix.lemons * mix.lemon_times + 1 - mix.lemons)
    causes = [mix.cause_weights(fault) for fault in mix.fault]
    numbers, weights = range(len(mix.fault)), [fault.weight for fault in mix.fault]
    at = 0.0
    while per_s > 0:
        at += rng.expovariate(per_s)
        if at >= setup.end_at:
            break
        (number,) = rng.choices(numbers, weights)
        (why,) = rng.choices(list(causes[number]), list(causes[number].values()))
        blast = _draw_blast(mix, rng.random())
        lemon = rng.random() < lemonish
        yield ScheduledFailure(at=at, fault=mix.fault[number], why=why, blast=blast, lemon=lemon, luck=rng.random())


def _draw_blast(mix: FailureMix, lot: float) -> BlastFailure | None:
    for blast in mix.blast:
        if lot < blast.share:
            return blast
        lot -= blast.share
    return None


def _draw_updates(setup: ScaleSetup, mix: FailureMix) -> tuple[float, ...]:
    rng = Random(f"updates {setup.seed}")
    found, at = [], 0.0
    while setup.updates and mix.updates_per_day > 0:
        at += rng.expovariate(mix.updates_per_day / DAY_S)
        if at >= setup.end_at:
            break
        found.append(at)
    return tuple(found)
