"""`holdfast report --compare`: shows the reports of two runs side by side."""

from collections.abc import Callable, Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.core.record.report_comparison import ComparedJobs

_UNKNOWN = "not known"
Pair = tuple[float | None, float | None]


def render_comparison(compared: ComparedJobs, names: tuple[str, str]) -> Group:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("", *names):
        table.add_column(head, justify="left" if not head else "right", overflow="fold")
    for what, one, other in _rows(compared):
        table.add_row(what, one, other)
    return Group(table, *(Text(note) for note in compared.notes))


def _rows(compared: ComparedJobs) -> Iterator[tuple[str, str, str]]:
    yield _row("time", compared.job_s, duration_text)
    pairs = zip(compared.at_most, compared.ettr, strict=True)
    shares = [f"{'at most ' if most else ''}{_percent(ettr)}" for most, ettr in pairs]
    yield "ETTR", shares[0], shares[1]
    yield _row("new steps", compared.steps, _count)
    yield _row("steps redone", compared.redone, _count)
    yield _row("steps/s", compared.steps_s, lambda pace: f"{pace:.3g}")
    if compared.tokens_s != (None, None):
        yield _row("tokens/s", compared.tokens_s, lambda pace: f"{pace:,.0f}")
    yield _row("mean time to recover", compared.mttr_s, duration_text)
    yield _row("incidents", compared.incidents, _count)
    for label, counts in compared.classes.items():
        yield _row(f"  {label}", counts, _count)
    lost = [sum(pair[place] for pair in compared.lost_s.values()) for place in (0, 1)]
    yield _row("lost", (lost[0], lost[1]), duration_text)
    for cause, seconds in compared.lost_s.items():
        both = zip(seconds, compared.lost_share[cause], strict=True)
        texts = [f"{duration_text(lost_s)} ({_percent(share)})" for lost_s, share in both]
        yield f"  {cause}", texts[0], texts[1]


def _row(what: str, pair: Pair, text_of: Callable[[float], str]) -> tuple[str, str, str]:
    one, other = (_UNKNOWN if value is None else text_of(value) for value in pair)
    return what, one, other


def _count(value: float) -> str:
    return str(int(value))


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{100 * share:.1f} %"
