"""Plots of a simulated job: ETTR over time, where time went, and policies and mechanisms side by side."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from holdfast.sim.scale.scale_result import ScaleSummary
from holdfast.sim.scale.time_book import Curves

if TYPE_CHECKING:
    from collections.abc import Mapping

_DAY_S = 86400.0
_INK, _FAINT = "#1f3b57", "#9fb4c7"
_SHADES = (  # one for each use of time
    "#1f3b57", "#3f6f94", "#6fa3bf", "#a8c8d8", "#d9a441", "#c96f4a", "#8c4a4a", "#7a7a7a", "#bdbdbd", "#5b8c5a",
    "#b39bc8", "#6b4f8a", "#e3d3a0", "#2f2f2f",
)  # fmt: skip


class PlotError(Exception):
    """Nothing can be drawn; the message is one sentence that says why."""


def require_matplotlib() -> None:
    """Raise PlotError if matplotlib is missing; call it before a long simulation, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("--plot needs matplotlib; install it with: pip install 'holdfast[plot]'") from None


def require_folder(folder: Path) -> None:
    """Raise PlotError if pictures cannot be written to this folder; call it before a long simulation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise PlotError(f"--plot {folder}: no pictures can be kept there ({e}); give another folder") from None


def draw_plots(folder: Path, found: list[ScaleSummary], curves: "Mapping[str, Curves]") -> list[Path]:
    """Draw all pictures, each as PNG and SVG; return their paths."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    require_folder(folder)
    drawn: list[Path] = []
    for policy, one in curves.items():
        drawn += _save_figure(
            folder, "ettr", _plot_over_time(one, f"{found[0].gpus:,} GPUs, {found[0].failures}, {policy}")
        )
    drawn += _save_figure(folder, "lost", _plot_losses(found))
    if len(found) > 1:
        drawn += _save_figure(folder, "compared", _plot_comparison(found))
    return drawn


def _new_figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _plot_over_time(curves: Curves, title: str) -> Any:
    instants, total, sliding = curves
    figure, axes = _new_figure(9, 4)
    days = [at / _DAY_S for at in instants]
    axes.plot(days, [100 * part for part in sliding], color=_FAINT, linewidth=0.7, label="hour by hour")
    axes.plot(days, [100 * part for part in total], color=_INK, linewidth=2.2, label="since the start")
    axes.set(
        xlabel="days", ylabel="effective training time, %", title=title, ylim=(0, 101), xlim=(0, max(days, default=1.0))
    )
    axes.legend(frameon=False, loc="lower right")
    return figure


def _plot_losses(found: list[ScaleSummary]) -> Any:
    """Plot where each policy lost time, as a share of all time."""
    uses = list(dict.fromkeys(use for one in found for use in one.lost_by_use))
    figure, axes = _new_figure(9, 1.5 + 0.42 * len(found))
    names = [_policy_name(one) for one in found]
    left = [0.0] * len(found)
    for number, use in enumerate(uses):
        parts = [100 * one.lost_by_use.get(use, 0.0) / (one.days * _DAY_S) for one in found]
        axes.barh(names, parts, left=left, label=use, color=_SHADES[number % len(_SHADES)])
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="lost, % of the time", title="Where the time went")
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return figure


def _plot_comparison(found: list[ScaleSummary]) -> Any:
    """Plot lost time as bars that start at zero. Bars of ETTR, all near 100 %, would need a cut axis."""
    figure, axes = _new_figure(9, 1.5 + 0.38 * len(found))
    names, means = [_policy_name(one) for one in found], [100 * (1 - one.ettr) for one in found]
    low = [100 * (one.ettr_most - one.ettr) for one in found]
    high = [100 * (one.ettr - one.ettr_least) for one in found]
    axes.barh(names, means, xerr=(low, high), color=[_INK, *[_FAINT] * (len(found) - 1)], ecolor="#444444", capsize=3)
    axes.invert_yaxis()
    most = max(mean + above for mean, above in zip(means, high, strict=True))
    axes.set(xlim=(0, 1.2 * most or 1.0), xlabel="lost time, % (ETTR beside it)")
    for number, one in enumerate(found):
        places = {"xytext": (6, 0), "textcoords": "offset points", "ha": "left", "va": "center"}
        axes.annotate(f"{100 * one.ettr:.2f}", (means[number] + high[number], number), fontsize="small", **places)
    axes.set_title(f"{found[0].gpus:,} GPUs, {found[0].days:g} days, failures of {found[0].failures}")
    return figure


def _policy_name(one: ScaleSummary) -> str:
    return f"without {', '.join(one.off)}" if one.off else one.policy


def _save_figure(folder: Path, name: str, figure: Any) -> list[Path]:
    from matplotlib import pyplot

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    try:
        for path in paths:
            figure.savefig(path, dpi=160)
    except OSError as e:
        raise PlotError(f"--plot {folder}: {name} could not be written ({e})") from None
    finally:
        pyplot.close(figure)
    return paths
