"""What the repeated evaluation works out itself: sliding windows, and stacks that name a pipeline."""

import re

import pytest

from benchmarks import _byterobust_groups, byterobust
from benchmarks._byterobust_groups import KINDS, World
from benchmarks._ettr_windows import sliding
from holdfast.core.record.job_account import Span, TimeUse


def test_windows_slide_over_a_loss() -> None:
    spans = [
        Span(use=TimeUse.TRAIN, start_at=100.0, end_at=200.0),
        Span(use=TimeUse.STOP, start_at=200.0, end_at=230.0),
        Span(use=TimeUse.TRAIN, start_at=230.0, end_at=500.0),
    ]
    found = sliding(spans, 60.0)
    assert (len(found), min(found), found[0], found[-1]) == (341, 0.5, 1.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_stands_is_found_within_its_pipeline(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_byterobust_groups, "DP", 6)
    monkeypatch.setattr(_byterobust_groups, "NODES", 48)
    monkeypatch.setattr(_byterobust_groups, "MESH", (("pp", 8), ("dp", 6), ("tp", 8)))
    right, alone, named, _ = World(1).trial(kind)
    assert right and named in (1, 8) and alone == (named == 1)
    assert alone or not kind.startswith("user code")


def test_a_part_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert byterobust.main(["table9"]) == 2
    assert re.search(rf"\btable9; .* {', '.join(byterobust.PARTS)}$", capsys.readouterr().err)
