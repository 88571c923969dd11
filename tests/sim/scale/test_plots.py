"""Pictures: drawn as PNG and SVG, or one sentence where there is nothing to draw with."""

import sys
from pathlib import Path

import pytest

from holdfast.sim.scale import failure_mixes, plots, policy_study
from holdfast.sim.scale.failure_schedule import ScaleSetup

SETUP = ScaleSetup(gpus=512, days=5.0)


@pytest.mark.slow  # the first picture on a machine makes matplotlib look for fonts
def test_they_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'holdfast[plot]'")
    mix = failure_mixes.load_mix("byterobust")
    found = policy_study.compare_policies(("holdfast", "torchrun"), SETUP, mix, (1,))
    one, book = policy_study.play_policy("holdfast", SETUP, mix)
    drawn = plots.draw_plots(tmp_path / "out", found, {"holdfast": book.ettr_curves(one.saving)})
    assert {path.name for path in drawn} == {
        f"{n}.{kind}" for n in ("ettr", "lost", "compared") for kind in ("png", "svg")
    }
    for path in drawn:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start
        assert path.stat().st_size > 5000


@pytest.mark.slow
def test_axes_of_bars_begin_at_zero() -> None:
    """Or a bar would be longer than another by what was cut off."""
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'holdfast[plot]'")
    mix = failure_mixes.load_mix("byterobust")
    found = policy_study.compare_policies(("holdfast", "torchrun"), SETUP, mix, (1,))
    for figure in (plots._plot_comparison(found), plots._plot_losses(found)):
        [axes] = figure.axes
        assert axes.get_xlim()[0] == 0.0
        assert max(bar.get_x() + bar.get_width() for bar in axes.patches) <= axes.get_xlim()[1]
    one, book = policy_study.play_policy("holdfast", SETUP, mix)
    [axes] = plots._plot_over_time(book.ettr_curves(one.saving), "").axes
    assert axes.get_ylim()[0] == 0.0


def test_one_sentence_where_there_is_nothing_to_draw_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.PlotError, match=r"pip install 'holdfast\[plot\]'"):
        plots.require_matplotlib()
