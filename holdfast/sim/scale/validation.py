"""Validation of the simulator: its results beside published ones, with the known differences."""

from collections.abc import Iterable
from math import sqrt
from random import Random
from statistics import mean

import msgspec

from holdfast.core.membership.standby_sizing import binomial_quantile
from holdfast.sim.scale import failure_mixes, policy_study, price_sheet, published_policy
from holdfast.sim.scale.failure_mixes import FailureMix, FailureMode
from holdfast.sim.scale.failure_schedule import DAY_S, ScaleSetup, draw_schedule
from holdfast.sim.scale.holdfast_policy import NAME
from holdfast.sim.scale.price_sheet import Price, read_curve
from holdfast.sim.scale.published_policy import PolicyRun, PublishedPolicy, SymptomResponse

_RSC = 0.0065  # failures per node and day
_DENSE = 0.5  # below this ETTR a formula for rare failures is not one any more
_GRID = tuple(
    (nodes, write_s, restart_s)
    for nodes in (128, 512, 1200, 2048, 12500)
    for write_s, restart_s in ((300.0, 300.0), (10.0, 300.0), (5.0, 60.0), (0.1, 60.0))
)


class ValidationCheck(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    published: str
    found: str
    agrees: bool
    note: str = ""
    known: bool = False  # that it does not agree, and why is in the note


def run_checks(seeds: int = 3) -> list[ValidationCheck]:
    return [
        *check_closed_form(seeds),
        *check_standbys(),
        *check_restarts(),
        *check_scheduling(),
        *check_llama(seeds),
        *check_byterobust(seeds),
    ]


# --- Meta: expected ETTR in closed form ------------------------------------------------------------------------------


def meta_ettr(nodes: int, rate: float, every_s: float, write_s: float, restart_s: float) -> float:
    """Compute ETTR by the formula of Kokolis et al. (HPCA 2025): a failure costs a restart and half a save interval."""
    lost = nodes * rate / DAY_S * (restart_s + every_s / 2)
    return (1 - lost) / (1 + write_s / every_s)


def daly_interval_s(nodes: int, rate: float, write_s: float) -> float:
    return sqrt(2 * write_s * DAY_S / (nodes * rate))


def check_closed_form(seeds: int, grid: tuple[tuple[int, float, float], ...] = _GRID) -> list[ValidationCheck]:
    """Compare simulated ETTR with that of `meta_ettr`. They must agree within 5 %, except where failures are so
    frequent that the formula is known to be off."""
    found = []
    for nodes, write_s, restart_s in grid:
        every_s = daly_interval_s(nodes, _RSC, write_s)
        expected = meta_ettr(nodes, _RSC, every_s, write_s, restart_s)
        ettr = mean(_simple_ettr(nodes, every_s, write_s, restart_s, seed) for seed in range(1, seeds + 1))
        off = ettr / expected - 1
        what = f"Meta's ETTR, {nodes} nodes, write {write_s:g} s, restart {restart_s:g} s"
        dense = expected < _DENSE
        found.append(
            ValidationCheck(
                what=what,
                published=f"{expected:.4f}",
                found=f"{ettr:.4f} ({off:+.1%})",
                agrees=abs(off) <= 0.05,
                note="failures come while the job restarts: the formula is for rare ones" if dense else "",
                known=dense,
            )
        )
    return found


def _simple_ettr(nodes: int, every_s: float, write_s: float, restart_s: float, seed: int) -> float:
    """Simulate a job as the formula assumes: a failure costs one restart and the work since the last save."""
    fault = FailureMode(name="failure", weight=1, shows="crash", passing=1, source="")
    mix = FailureMix(name="simple", rate=_RSC, rate_source="", fault=(fault,))
    simple = PublishedPolicy(
        name="simple", standbys="none", keeps="storage", save_every_s=every_s, save_stall_s=0.0, group=1,
        rollback=False, updates="requeue", tries=1, restart="restart",
        sees=(SymptomResponse(shows="crash", detect_s=(0.0, 0.0), source=""),),
    )  # fmt: skip
    sheet = price_sheet.load_sheet()
    price = Price(name="restart", least_s=restart_s, most_s=restart_s, source="")
    sheet = msgspec.structs.replace(sheet, price=(*sheet.price, price))
    played = PolicyRun(simple, ScaleSetup(gpus=8 * nodes, days=365.0 * 128 / nodes, seed=seed), mix, sheet).play_job()
    return played.ettr / (1 + write_s / every_s)  # each interval of training is followed by a save


# --- ByteRobust's tables ---------------------------------------------------------------------------------------------


def check_standbys() -> list[ValidationCheck]:
    """Compare the P99 number of standbys with ByteRobust's table 5, which has four job sizes and one failure rate."""
    published = {128: 2, 256: 2, 512: 3, 1024: 4}
    found = {nodes: binomial_quantile(nodes, 0.0012) for nodes in published}
    return [
        ValidationCheck(
            what="ByteRobust, P99 standbys of 128, 256, 512, 1024 machines at 0.12 % a day",
            published=_join_values(published.values()),
            found=_join_values(found.values()),
            agrees=found == published,
        )
    ]


def check_restarts() -> list[ValidationCheck]:
    """Check the form of the curves of restart times, which come from ByteRobust's table 7. Each point must be
    predictable from the other points of its curve."""
    found = []
    for name, published in (("first_step", "hot update"), ("requeue", "requeue")):
        curve = next(p.by_gpus for p in price_sheet.load_sheet().price if p.name == name)
        offs = []
        for left_out in range(len(curve)):
            rest = tuple(point for number, point in enumerate(curve) if number != left_out)
            offs.append(read_curve(rest, curve[left_out][0]) / curve[left_out][1] - 1)
        found.append(
            ValidationCheck(
                what=f"ByteRobust, table 7, {published}: each size foretold from the other three",
                published=_join_values(round(seconds) for _, seconds in curve) + " s",
                found=", ".join(f"{off:+.0%}" for off in offs),
                agrees=all(abs(off) <= 0.15 for off in offs),
                note="an input of ours: only its form is tested",
            )
        )
    return found


def check_scheduling(trials: int = 20000) -> list[ValidationCheck]:
    """Compare ByteRobust's figure 12 with values from its table 7; the number of lost machines is random."""
    sheet, rng = price_sheet.load_sheet(), Random("figure 12")
    warm_s = next(read_curve(p.by_gpus, 16384) for p in sheet.price if p.name == "first_step")
    requeue_s = next(read_curve(p.by_gpus, 16384) for p in sheet.price if p.name == "requeue")
    boot_s = mean(next((p.least_s, p.most_s) for p in sheet.price if p.name == "boot"))
    held = binomial_quantile(1024, 0.0012)
    total = 0.0
    for _ in range(trials):
        lost = 32 if rng.random() < 0.01 else 1 + sum(rng.random() < 0.0012 for _ in range(held))
        total += warm_s if lost <= held else warm_s + boot_s
    ours_s = total / trials
    rows = (
        ("requeue / warm standbys", 10.87, requeue_s / ours_s, 0.10, ""),
        ("reschedule / warm standbys", 5.36, (warm_s + boot_s) / ours_s, 0.10, "the price of booting comes from here"),
        ("warm standbys / unlimited ones", 1.0519, ours_s / warm_s, 0.02, ""),
    )
    return [
        ValidationCheck(
            what=f"ByteRobust, figure 12, {name}",
            published=f"{published:g}",
            found=f"{value:.2f} ({value / published - 1:+.1%})",
            agrees=abs(value / published - 1) <= within,
            note=note,
        )
        for name, published, value, within, note in rows
    ]


def check_byterobust(seeds: int) -> list[ValidationCheck]:
    """Compare ByteRobust's reported ETTR of 97 % with the ETTR simulated from its tables, which is known to be
    higher."""
    setup, mix = ScaleSetup(gpus=9600), failure_mixes.load_mix("byterobust")
    found = policy_study.play_seeds("byterobust", setup, mix, range(1, seeds + 1))
    unexplained = 0.3435 * found.incidents
    each_s = (found.ettr - 0.97) * setup.days * DAY_S / unexplained
    note = (
        f"its tables leave 34 % of incidents open: were they {each_s / 60:.0f} minutes each, it would be 97 %"
        if each_s > 0
        else ""
    )
    return [
        ValidationCheck(
            what="ByteRobust, ETTR of 9,600 GPUs over 90 days from its own tables",
            published="0.97",
            found=f"{found.ettr:.4f}",
            agrees=abs(found.ettr - 0.97) <= 0.01,
            note=note,
            known=True,
        )
    ]


# --- Llama 3 ---------------------------------------------------------------------------------------------------------


def check_llama(seeds: int) -> list[ValidationCheck]:
    setup, mix = ScaleSetup(gpus=16384, days=54.0), failure_mixes.load_mix("llama3")
    counts = [
        len(draw_schedule(msgspec.structs.replace(setup, seed=seed), mix).strikes) for seed in range(1, 10 * seeds + 1)
    ]
    ettrs = {
        name: policy_study.play_seeds(name, setup, mix, range(1, seeds + 1)).ettr for name in published_policy.KNOWN
    }
    told = ", ".join(f"{name} {ettr:.1%}" for name, ettr in ettrs.items())
    ours = policy_study.play_seeds(NAME, setup, mix, range(1, seeds + 1))
    return [
        ValidationCheck(
            what="Llama 3, unexpected interruptions of 16,384 GPUs in 54 days",
            published="419",
            found=f"{mean(counts):.0f} ({min(counts)} to {max(counts)} of {len(counts)} seeds)",
            agrees=abs(mean(counts) - 419) <= 0.05 * 419 and min(counts) <= 419 <= max(counts),
            note="the rate is an input; its spread is not",
        ),
        ValidationCheck(
            what="Llama 3, effective training time, by practices of others",
            published="above 90 %",
            found=told,
            agrees=ettrs["megatron"] > 0.90,
            note="its own practice was not published; what ByteRobust calls usual is too slow to reach 90 %",
            known=ettrs["byterobust"] > 0.90,
        ),
        ValidationCheck(
            what="Llama 3, times that a person had to do something",
            published="3",
            found=f"{ours.people:.0f} (holdfast)",
            agrees=ours.people <= 6,
            note="slow machines and mended bugs are counted here, and the causes of its code failures are ByteRobust's",
            known=True,
        ),
    ]


def _join_values(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)
