"""SIGKILL in every part of a save, of ranks wrapped in every way: what all had sealed is there again, bit for bit."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start, start  # noqa: F401  fixtures
from tests.cli.tortured import Tortured

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STRETCH = "--stretch-s=0.005"
PARTS = ("train", "copy", "copied", "sealed")
SHAPES = [
    pytest.param("ddp", (2, 2), id="ddp"),
    pytest.param("fsdp", (2, 2), id="fsdp"),
    pytest.param("tp", (1, 2), id="tp"),
]


@pytest.mark.parametrize(("how", "shape"), SHAPES)
def test_killed_in_every_part(start: Start, tmp_path: Path, how: str, shape: tuple[int, int]) -> None:  # noqa: F811
    tortured = Tortured(start, tmp_path, shape, f"--how={how}", "--width=64", STRETCH)
    for turn, part in enumerate(PARTS):
        victim = turn % len(tortured.scene.ranks)
        tortured.scene.trains(turn + 1, steps=3)
        assert tortured.scene.await_phase(victim, part)
        tortured.strike(victim)
    tortured.ends_exact()
