"""Health detector: compares gauges of a machine with a catalog that says which reading means which fault.

A counter is judged by how much it rises while we watch, never by its earlier value. A level is judged by how many
readings in a row show it. The detector raises the same alarm at most once an hour. It does not act on faults that
heal by themselves: it ignores one flap of a link, and only reports heat, throttling and sources that do not answer.
"""

from collections.abc import Iterable

import msgspec

from holdfast.core.incident.alarm_rate_limit import RepeatFilter, SlidingSum, cap_stance
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.observation import Gauge


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: Stance = Stance.ACT  # the most that an alarm of this detector may be for
    kernel_s: float = 2.0  # how often each source is read
    gpu_s: float = 10.0
    host_s: float = 10.0
    network_s: float = 30.0
    deadline_s: float = 30.0  # a source that has not answered for so long is an alarm
    catalog: str = ""  # a file of rows that replace those for the same gauge, or add to them
    root: str = "/"  # where proc, sys and dev are looked for; {node} in it makes each node a machine of its own


class GaugeRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Catalog row that says what one gauge means; it sets exactly one of above, below and rises."""

    gauge: str
    klass: str
    group: str
    action: str
    say: str  # with {of} and {value}
    sample: tuple[float, ...]  # readings in a row that are an alarm at the last
    source: str
    above: float | None = None
    below: float | None = None
    rises: float | None = None  # by so much within the window
    times: int = 1  # readings in a row, for above and below
    within_s: float = 300.0
    stance: Stance = Stance.NOTIFY
    hard: bool = False
    hint: str = ""


class HealthDetector:
    def __init__(self, limits: HealthLimits, rows: Iterable[GaugeRow]) -> None:
        self.limits = limits
        self._rows = {row.gauge: row for row in rows}
        self._last: dict[tuple[str, str], float] = {}
        self._tally = SlidingSum()
        self._told = RepeatFilter()

    def on_gauge(self, gauge: Gauge, suspects: tuple[str, ...]) -> Alarm | None:
        row = self._rows.get(gauge.name)
        if row is None:
            return None
        key = (gauge.name, gauge.of)
        last = self._last.get(key, gauge.value)
        self._last[key] = gauge.value
        amount = _counted_amount(row, gauge.value, last)
        if row.rises is None and not amount:
            self._tally.forget(key)
            return None
        reached = self._tally.add(gauge.at, key, amount, row.within_s)
        if not amount or reached < (row.times if row.rises is None else row.rises):
            return None
        if self._told.is_repeat(gauge.at, key):
            return None
        return self._make_alarm(row, gauge, suspects)

    def _make_alarm(self, row: GaugeRow, gauge: Gauge, suspects: tuple[str, ...]) -> Alarm:
        stance = cap_stance(row.stance, self.limits.stance)
        said = row.say.format(of=gauge.of, value=f"{gauge.value:.4g}")
        return Alarm(
            kind=Kind.HEALTH,
            at=gauge.at,
            suspects=suspects,
            klass=row.klass,
            group=row.group,
            reason=f"{said}; {row.hint}" if row.hint else said,
            signature=f"{gauge.name} {gauge.of}",
            evidence=(f"{gauge.name} of {gauge.of} reads {gauge.value:g}",),
            stance=stance,
            hard=row.hard,
        )


def _counted_amount(row: GaugeRow, value: float, last: float) -> float:
    """Return how much one reading adds: for a counter its rise; for a level 1 if it is beyond its limit, else 0."""
    if row.above is not None:
        return float(value > row.above)
    if row.below is not None:
        return float(value < row.below)
    return max(0.0, value - last)  # less than before: the counter was reset


def find_row_fault(row: GaugeRow) -> str:
    """Return the fault in one row; empty if there is none."""
    if sum(limit is not None for limit in (row.above, row.below, row.rises)) != 1:
        return "needs exactly one of above, below and rises"
    try:
        row.say.format(of="", value="")
    except (KeyError, IndexError, ValueError):
        return "may name {of} and {value} in what it says, nothing else"
    health = HealthDetector(HealthLimits(), (row,))
    gauges = [Gauge(name=row.gauge, of="it", value=v, at=float(i)) for i, v in enumerate(row.sample)]
    heard = [health.on_gauge(gauge, ("n",)) for gauge in gauges]
    if not heard or heard[-1] is None or any(heard[:-1]):
        return "is not met by its own sample, or before its end"
    return ""
