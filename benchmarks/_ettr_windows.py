"""ETTR of every window of a job, not only of the whole: what the worst minute or five minutes of it were like."""

import statistics

from benchmarks._report import Figure
from holdfast.core.record.job_account import Span
from holdfast.sim.scale.time_book import TimeBook

WINDOWS_S = (60.0, 300.0)
LOOK_S = 1.0


def sliding(spans: list[Span], window_s: float) -> list[float]:
    """The ETTR of every window that lies within the job, a second apart."""
    book, start_at = TimeBook(), spans[0].start_at
    for span in spans:
        book.add_piece(span.use.value, span.end_at - start_at)
    instants = [window_s + LOOK_S * n for n in range(int((book.wall_s - window_s) / LOOK_S) + 1)]
    made = book.productive_until(0.0, instants)
    before = book.productive_until(0.0, [at - window_s for at in instants])
    return [(now - then) / window_s for now, then in zip(made, before, strict=True)]


def window_figures(spans: list[Span]) -> dict[str, Figure]:
    """The least and the median of each window that is shorter than the job."""
    found: dict[str, Figure] = {}
    for window_s in WINDOWS_S:
        if spans and (parts := sliding(spans, window_s)):
            found |= {f"{window_s:g}_s_least": round(min(parts), 4)}
            found |= {f"{window_s:g}_s_median": round(statistics.median(parts), 4)}
    return found
