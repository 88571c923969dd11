"""Durations of operations in the simulation, drawn from the ranges in costs.toml."""

import tomllib
from importlib import resources
from random import Random

import msgspec


class CostRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    least_s: float
    most_s: float
    source: str


class CostModel:
    def __init__(self, rows: tuple[CostRange, ...], rng: Random) -> None:
        self._rows = {row.name: row for row in rows}
        self._rng = rng

    def __call__(self, *names: str) -> float:
        """Draw the total seconds that the named operations take one after another."""
        return sum(self._rng.uniform(self._rows[name].least_s, self._rows[name].most_s) for name in names)


def load_costs() -> tuple[CostRange, ...]:
    text = resources.files("holdfast.sim").joinpath("costs.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["cost"], tuple[CostRange, ...])
