"""Modelled costs are data: each has its source, each is used, and none is missing."""

import re
from pathlib import Path
from random import Random

import holdfast.sim
from holdfast.sim.cost_model import CostModel, load_costs

ROWS = load_costs()


def test_every_row_is_sound() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert 0 <= row.least_s <= row.most_s
        assert row.source.startswith(("measured:", "assumed:", "ByteRobust", "the controller")), row.name


def test_costs_are_drawn_within_their_bounds() -> None:
    costs = CostModel(ROWS, Random(1))
    for row in ROWS:
        drawn = [costs(row.name) for _ in range(100)]
        assert row.least_s <= min(drawn) <= max(drawn) <= row.most_s
    assert costs("fork", "boot") > costs("fork")


def test_every_row_is_used() -> None:
    (folder,) = holdfast.sim.__path__
    source = "".join(path.read_text() for path in Path(folder).glob("*.py"))
    named = set(re.findall(r'"(\w+)"', source))
    assert {row.name for row in ROWS} <= named
