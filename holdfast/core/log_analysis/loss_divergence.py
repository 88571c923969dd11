"""Judges the numbers that a training loop logs as a series: a loss scale that only falls or is far too small, and a
loss that jumps."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median

from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.failure_catalog import CatalogRow
from holdfast.core.log_analysis.line_prefixes import LogLine

_SPOKEN = re.compile(r"overflow|OVERFLOW|scale")  # most lines have none of these, which is soon seen
_OVERFLOW = re.compile(
    r"(?:overflow|skipp(?:ed|ing) step|reducing)[^\n]{0,120}?(?:reducing (?:\w+ ){0,3}to|to|scale:?) ?"
    r"(?P<scale>\d+(?:\.\d+)?(?:e[+-]?\d+)?)",
    re.IGNORECASE,
)
_SCALE = re.compile(r"\bloss[ _]scale['\"]?\s?[:=]\s?(?P<scale>\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.IGNORECASE)
_LOSS = re.compile(
    r"(?<![a-z])(?:(?:lm|train\w*|total|avg)[ _])?loss['\"]?\s{0,3}[:=|]?\s{0,3}'?(?P<loss>\d{1,9}\.\d+(?:e[+-]?\d+)?)",
    re.I,
)
_NORM = re.compile(r"\bgrad(?:ient)?[ _-]?norm['\"]?\s?[:=]?\s?'?(?P<norm>\d{1,12}(?:\.\d+)?(?:e[+-]?\d+)?)", re.I)
_SKIPPED = 3  # falls in a row, which say something only if nothing else does
_FALLS = 4  # in a row, with no rise between: the start of training has some and then recovers
_FELL = 2.0**8  # from the first scale to the last
_LOW = 4.0  # or where it ends: a sound run settles far above
_TINY = 2.0**-6  # a scale below one makes gradients smaller than they are: only endless overflows lead there
_BEFORE, _AFTER = 4, 2  # losses before a jump, and after it
_LOSS_JUMP, _NORM_JUMP = 2.0, 10.0  # against the middle of those before
_LONG, _STAYS, _FAR = 5, 3, 4.0  # where no norm is logged: losses before and after, and how far above the worst before
_FALLING = CatalogRow(
    klass="nan_divergence", source="overflow after overflow, with a loss scale that only falls", weight=5
)
_SKIPS = CatalogRow(
    klass="nan_divergence", source="overflow after overflow, and no step between", weight=3, role="hint"
)
_SMALL = CatalogRow(klass="nan_divergence", source="a loss scale far below one", weight=5)
_JUMPED = CatalogRow(klass="nan_divergence", source="a loss and a gradient norm that jump and stay", weight=4)
_ROSE = CatalogRow(klass="nan_divergence", source="a loss that jumps and stays", weight=3, role="hint")


def find_divergence(lines: Sequence[LogLine]) -> Iterator[CatalogHit]:
    """Yield a hit for each source whose numbers show that training diverged."""
    for source in dict.fromkeys(said.source for said in lines):
        mine = [said for said in lines if said.source == source]
        yield from _falling_scale(mine)
        yield from _jumped_loss(mine)


def _falling_scale(lines: Sequence[LogLine]) -> Iterator[CatalogHit]:
    spoken = [said for said in lines if _SPOKEN.search(said.text)]
    skipped = {id(said): found for said in spoken if (found := _OVERFLOW.search(said.text[:400]))}
    scales = [
        (float(found["scale"]), said)
        for said in spoken
        if (found := skipped.get(id(said)) or _SCALE.search(said.text[:600]))
    ]
    falls = [said for (before, _), (after, said) in pairwise(scales) if after < before]
    rises = any(after > before for (before, _), (after, _) in pairwise(scales))
    if len(falls) >= _FALLS and not rises and (scales[0][0] >= _FELL * scales[-1][0] or scales[-1][0] <= _LOW):
        yield CatalogHit(row=_FALLING, said=falls[-1], weight=_FALLING.weight, rank=falls[-1].rank)
    elif scales and scales[-1][0] < _TINY and (scales[-1][0] or id(scales[-1][1]) in skipped):
        yield CatalogHit(row=_SMALL, said=scales[-1][1], weight=_SMALL.weight, rank=scales[-1][1].rank)
    elif len(falls) >= _SKIPPED and not rises and len(skipped) == len(scales):
        yield CatalogHit(row=_SKIPS, said=falls[-1], weight=_SKIPS.weight, rank=falls[-1].rank)


def _jumped_loss(lines: Sequence[LogLine]) -> Iterator[CatalogHit]:
    steps = [
        (float(loss["loss"]), float(norm["norm"]), said)
        for said in lines
        if "norm" in said.text and (loss := _LOSS.search(said.text[:600])) and (norm := _NORM.search(said.text[:600]))
    ]
    if not steps:
        yield from _risen_loss(lines)
    before, after = steps[:-_AFTER], steps[-_AFTER:]
    if len(before) < _BEFORE:
        return
    usual, calm = median(step[0] for step in before), median(step[1] for step in before)
    if all(loss > _LOSS_JUMP * usual and norm > _NORM_JUMP * calm for loss, norm, _ in after):
        yield CatalogHit(row=_JUMPED, said=after[0][2], weight=_JUMPED.weight, rank=after[0][2].rank)


def _risen_loss(lines: Sequence[LogLine]) -> Iterator[CatalogHit]:
    """Yield a hit for the first loss from which on all losses are far above all earlier losses."""
    losses = [(float(found["loss"]), said) for said in lines if (found := _LOSS.search(said.text[:600]))]
    worst = list(accumulate((loss for loss, _ in losses), max))
    least = list(accumulate((loss for loss, _ in reversed(losses)), min))[::-1]
    for place in range(_LONG, len(losses) - _STAYS + 1):
        if least[place] > _FAR * worst[place - 1]:
            said = losses[place][1]
            yield CatalogHit(row=_ROSE, said=losses[-1][1], weight=_ROSE.weight, rank=said.rank)
            return
