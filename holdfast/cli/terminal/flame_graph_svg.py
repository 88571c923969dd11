"""Flame graphs of the stacks of all ranks: one box per frame, whose width is the number of ranks in that frame."""

from html import escape

from holdfast.core.diagnose.stack_tree import StackBranch
from holdfast.core.rank_ranges import format_ranks

_WIDTH, _ROW, _FONT = 1200.0, 18, 11
_CHAR = 6.4  # of the font, about
_LEAST = 0.3  # boxes narrower than this are left out


def draw_flame_graph(root: StackBranch, title: str, suspects: frozenset[int]) -> str:
    """Return the SVG, with the innermost frames on top. A box is red if all of its ranks are suspects."""
    total = max(1, len(root.ranks))
    boxes: list[str] = []
    height = (_tree_depth(root) + 2) * _ROW

    def put(branch: StackBranch, x: float, level: int) -> None:
        width = _WIDTH * len(branch.ranks) / total
        if width < _LEAST:
            return
        boxes.append(_draw_box(branch, (x, height - (level + 1) * _ROW, width), suspects))
        for below in sorted(branch.below.values(), key=lambda b: (-len(b.ranks), b.frame)):
            put(below, x, level + 1)
            x += _WIDTH * len(below.ranks) / total

    x = 0.0
    for branch in sorted(root.below.values(), key=lambda b: (-len(b.ranks), b.frame)):
        put(branch, x, 0)
        x += _WIDTH * len(branch.ranks) / total
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height}" font-family="monospace"'
    text = f'<text x="4" y="{_ROW - 5}" font-weight="bold">{escape(title)}</text>'
    return "\n".join([f'{head} font-size="{_FONT}">', text, *boxes, "</svg>\n"])


def _draw_box(branch: StackBranch, place: tuple[float, float, float], suspects: frozenset[int]) -> str:
    x, y, width = place
    guilty = bool(suspects) and suspects.issuperset(branch.ranks)
    colour = "#e4572e" if guilty else "#8fb8de" if suspects.isdisjoint(branch.ranks) else "#f3c969"
    shown = branch.frame[: max(0, int((width - 6) / _CHAR))]
    label = f'<text x="{x + 3:.1f}" y="{y + _ROW - 5}">{escape(shown)}</text>' if len(shown) > 2 else ""
    hint = f"<title>{escape(branch.frame)}: {escape(format_ranks(sorted(set(branch.ranks))))}</title>"
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" fill="{colour}" rx="1"/>'
    return f"<g>{hint}{box}{label}</g>"


def _tree_depth(root: StackBranch) -> int:
    deepest, level = 0, [root]
    while level := [below for branch in level for below in branch.below.values()]:
        deepest += 1
    return deepest
