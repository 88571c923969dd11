"""The price sheet, loaded from TOML: durations by number of GPUs, and chances."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from itertools import pairwise
from math import log2
from random import Random

import msgspec

Curve = tuple[tuple[int, float], ...]  # (GPUs, seconds), ascending


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    source: str
    least_s: float = 0.0
    most_s: float = 0.0
    by_gpus: Curve = ()


class PriceShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    value: float
    source: str


class PriceSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    price: tuple[Price, ...]
    share: tuple[PriceShare, ...]


class PriceDraws:
    """Draws durations and chances from a price sheet for one size of job."""

    def __init__(self, sheet: PriceSheet, gpus: int, rng: Random) -> None:
        self._prices = {
            p.name: (read_curve(p.by_gpus, gpus),) * 2 if p.by_gpus else (p.least_s, p.most_s) for p in sheet.price
        }
        self._shares = {s.name: s.value for s in sheet.share}
        self._rng = rng

    def __call__(self, *names: str) -> float:
        return sum(self._rng.uniform(*self._prices[name]) for name in names)

    def share_value(self, name: str) -> float:
        return self._shares[name]

    def mean_price(self, *names: str) -> float:
        return sum(sum(self._prices[name]) / 2 for name in names)


def scale_sheet(sheet: PriceSheet, times: Mapping[str, float]) -> PriceSheet:
    """Return the sheet with the durations and chances that `times` names multiplied by its factors. Raise ValueError
    for an unknown name."""
    price = tuple(_scale_price(p, times.get(p.name, 1.0)) for p in sheet.price)
    shares = [msgspec.structs.replace(s, value=s.value * times.get(s.name, 1.0)) for s in sheet.share]
    unknown = times.keys() - {p.name for p in price} - {s.name for s in shares}
    if unknown:
        raise ValueError(f"there is no price or share named {', '.join(sorted(unknown))}")
    return PriceSheet(price=price, share=tuple(shares))


def _scale_price(price: Price, times: float) -> Price:
    curve = tuple((gpus, seconds * times) for gpus, seconds in price.by_gpus)
    return msgspec.structs.replace(price, least_s=price.least_s * times, most_s=price.most_s * times, by_gpus=curve)


def read_curve(curve: Curve, gpus: float) -> float:
    """Return a published curve's value at this number of GPUs. The curve is linear in log2(GPUs), and is extended
    beyond its ends. The value is never less than a quarter of the curve's minimum."""
    pairs = list(pairwise(curve))
    low, high = next(((a, b) for a, b in pairs if gpus <= b[0]), pairs[-1])
    part = (log2(gpus) - log2(low[0])) / (log2(high[0]) - log2(low[0]))
    least = min(seconds for _, seconds in curve) / 4  # a small job, far below the first point, still takes its time
    return max(least, low[1] + part * (high[1] - low[1]))


def load_sheet() -> PriceSheet:
    text = resources.files("holdfast.sim.scale").joinpath("prices.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), PriceSheet)
