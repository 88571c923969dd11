"""The liveput of a plan: the training that is expected of it in a time to come, with the losses that may strike.

Losses strike halfway, on average. If every layer still has an owner, training goes on after a stop, as much slower as
its rarest layer has fewer owners; else it goes back to storage, and as much is made again as is not there now. Which
workers are lost is drawn from the job's seed, the same draws for all plans; of one loss every case is looked at.
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from holdfast.core.elastic.layer_owners import Held, count_alike, count_owners
from holdfast.core.elastic.loss_forecast import LossForecast
from holdfast.model.pipeline_routes import PipelineJob

_MOST, _DRAWS = 4, 24  # losses that are looked at, and draws of who is lost


class LossOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """The losses that are forecast, the time ahead that is looked at, and what a loss costs, in seconds."""

    forecast: LossForecast
    ahead_s: float
    live_s: float  # the stop if training goes on from live workers
    rollback_s: float  # and if it goes back to storage
    unsaved_s: float  # training that is not on storage when the time begins


class Liveput(msgspec.Struct, frozen=True):
    """What is expected of a plan, in seconds of training by the whole job."""

    expected_s: float
    calm_s: float  # if nothing strikes
    rollback_chance: float  # that a layer is lost


def expected_liveput(job: PipelineJob, held: Held, rate: float, outlook: LossOutlook) -> Liveput:
    """Return the liveput of a plan in the time ahead. By the plan, workers hold `held`, and the job trains
    at `rate`, where 1 is the whole job. Workers whose end is known hold nothing here."""
    alike = count_alike(held)
    owners = count_owners(job.layers, alike)
    workers = sum(count for mine, count in alike.items() if mine)
    calm_s = rate * outlook.ahead_s
    if not all(owners) or not workers:
        return Liveput(0.0, calm_s, 1.0)
    chances = outlook.forecast.chances(workers, outlook.ahead_s, min(_MOST, workers))
    expected_s, rolls = chances[0] * calm_s, 0.0
    for lost, chance in enumerate(chances[1:], start=1):
        cases = [_after_losses(owners, gone) for gone in _list_losses(job, held, lost)]
        weight = chance / sum(count for count, _ in cases)
        for count, left in cases:
            expected_s += weight * count * _trained_s(rate, left, outlook)
            rolls += weight * count * (left == 0)
    return Liveput(expected_s, calm_s, rolls)


def _trained_s(rate: float, left: float, outlook: LossOutlook) -> float:
    half_s = outlook.ahead_s / 2
    if left:
        return rate * (half_s + left * max(0.0, half_s - outlook.live_s))
    return rate * max(0.0, outlook.ahead_s - outlook.rollback_s) - outlook.unsaved_s


def _after_losses(owners: list[int], gone: tuple[int, Counter[int]]) -> tuple[int, float]:
    """Return how often this case counts, and which share of the rarest layer's owners is left."""
    count, layers = gone
    return count, min((owners[layer] - less) / owners[layer] for layer, less in layers.items())


def _list_losses(job: PipelineJob, held: Held, lost: int) -> Iterator[tuple[int, Counter[int]]]:
    """Yield cases of so many losses: how often the case counts, and how many owners each layer loses."""
    having = [worker for worker, mine in enumerate(held) if mine]
    if lost == 1:
        yield from ((count, Counter(mine)) for mine, count in count_alike(held).items() if mine)
        return
    for draw in range(_DRAWS):
        gone = sorted(having, key=lambda worker: _draw_lot(job.seed, lost, draw, worker))[:lost]
        yield 1, Counter(layer for worker in gone for layer in held[worker])


def _draw_lot(seed: int, lost: int, draw: int, worker: int) -> bytes:
    return blake2b(f"{seed} {lost} {draw} {worker}".encode(), digest_size=8).digest()
