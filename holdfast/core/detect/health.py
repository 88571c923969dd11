"""Health detector: compares gauges of a machine with a catalog that says which reading means which fault.

A counter is judged by how much it rises while we watch, never by its earlier value. Any other gauge is judged by how
many readings in a row show the fault. The detector raises the same alarm at most once an hour.

Some faults heal by themselves. The detector ignores a link that flaps once. It only reports heat, throttling and
sources that do not answer. Such a strain counts against a machine if the job suffers at the same time. For that
comparison the detector also tells how long each strain lasts.
"""

from collections.abc import Iterable

import msgspec

from holdfast.core.incident.alarm_rate_limit import RepeatFilter, SlidingSum, cap_stance
from holdfast.core.incident.incident_text import advice_clause
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Gauge, Strain, StrainKind

_DRIVER_S = 10.0  # a driver answers within milliseconds
_HEAT = "gpu.temperature"
_WELL = 2.0  # a gauge is well again at twice its limit, or at half of it: readings near the limit go to and fro


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
    say: str  # with {of} and {value}, and {heat} for the temperature of a GPU
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
    over: str = ""  # what takes back `say`, once a reading is on the good side of the limit, and well so; "": nothing
    strain: StrainKind | None = None  # what it may explain as long as it lasts


def driver_deadline_s(limits: HealthLimits) -> float:
    """Return after how many seconds without an answer a GPU driver counts as hung."""
    return min(limits.deadline_s, _DRIVER_S)


class HealthDetector:
    def __init__(self, limits: HealthLimits, rows: Iterable[GaugeRow]) -> None:
        self.limits = limits
        self._rows = {row.gauge: row for row in rows}
        self._last: dict[tuple[str, str], float] = {}
        self._tally = SlidingSum()
        self._told = RepeatFilter()
        self._strains = MachineStrains()
        self._lasting = set[tuple[str, str]]()  # what was told and not taken back, where a row can take it back

    @property
    def strains(self) -> tuple[Strain, ...]:
        """The strains that the machine is under now, which may explain what happens to the job."""
        return tuple(self._strains.found.values())

    def on_gauge(self, gauge: Gauge, suspects: tuple[str, ...]) -> Alarm | None:
        key = (gauge.name, gauge.of)
        last = self._last.get(key, gauge.value)
        self._last[key] = gauge.value
        row = self._rows.get(gauge.name)
        if row is None:
            return None
        amount, reached = _counted_amount(row, gauge.value, last), 0.0
        if row.rises is None and not amount:
            self._tally.forget(key)
        else:
            reached = self._tally.add(gauge.at, key, amount, row.within_s)
        if row.strain:
            since = gauge.at - gauge.value if row.strain is StrainKind.STANDS else gauge.at
            sign, said = f"{gauge.name} {gauge.of}", self._describe_reading(row, gauge)
            strain = Strain(kind=row.strain, sign=sign, nodes=suspects, since=since, text=said)
            self._strains.on_reading(strain, reached > 0, row.times)
        if key in self._lasting and _is_well(row, gauge.value):
            self._lasting.discard(key)
            self._told.forget(key)
            return self._make_alarm(row, gauge, suspects, over=True)
        if not amount or reached < (row.times if row.rises is None else row.rises):
            return None
        if self._told.is_repeat(gauge.at, key):
            return None
        if row.over:
            self._lasting.add(key)
        return self._make_alarm(row, gauge, suspects)

    def _describe_reading(self, row: GaugeRow, gauge: Gauge) -> str:
        heat = self._last.get((_HEAT, gauge.of))
        at_heat = "" if heat is None else f" at {heat:.0f} °C"
        return row.say.format(of=gauge.of, value=f"{gauge.value:.4g}", heat=at_heat)

    def _make_alarm(self, row: GaugeRow, gauge: Gauge, suspects: tuple[str, ...], *, over: bool = False) -> Alarm:
        stance = cap_stance(Stance.NOTIFY if over else row.stance, self.limits.stance)
        said = self._describe_reading(row, gauge)
        return Alarm(
            kind=Kind.HEALTH,
            at=gauge.at,
            suspects=suspects,
            klass=row.klass,
            group=row.group,
            reason=row.over.format(of=gauge.of) if over else f"{said}{advice_clause(row.hint)}",
            over=over,
            signature=f"{gauge.name} {gauge.of}",
            evidence=(f"{gauge.name} of {gauge.of} reads {gauge.value:g}",),
            stance=stance,
            hard=row.hard and not over,
        )


class MachineStrains:
    """The strains that a machine is under now. A strain that slows the machine, such as heat, begins and ends only
    after as many readings in a row as an alarm needs. Any other strain takes one reading."""

    def __init__(self) -> None:
        self.found: dict[str, Strain] = {}  # by their signs
        self._runs: dict[str, tuple[bool, int, float]] = {}  # whether it shows, in how many readings, and since when

    def on_reading(self, strain: Strain, shows: bool, times: int) -> None:
        showed, count, since = self._runs.get(strain.sign, (not shows, 0, 0.0))
        if showed is not shows:
            count, since = 0, strain.since
        self._runs[strain.sign] = shows, count + 1, since
        if count + 1 < (times if strain.kind is StrainKind.SLOWS else 1):
            return
        if not shows:
            self.found.pop(strain.sign, None)
            return
        began = self.found.get(strain.sign)
        self.found[strain.sign] = msgspec.structs.replace(strain, since=began.since if began else since)


def _counted_amount(row: GaugeRow, value: float, last: float) -> float:
    """Return how much a reading adds to the sum that the catalog row is judged by. A counter adds its rise. A gauge
    with a limit adds 1 if the reading is beyond the limit, else 0."""
    if row.above is not None:
        return float(value > row.above)
    if row.below is not None:
        return float(value < row.below)
    return max(0.0, value - last)  # less than before: the counter was reset


def _is_well(row: GaugeRow, value: float) -> bool:
    """Return whether a gauge has come back from its limit, and is not close to it. False for a reading that is no
    number."""
    if row.below is not None:
        return value >= row.below * _WELL
    return row.above is not None and value <= row.above / _WELL


def find_row_fault(row: GaugeRow) -> str:
    """Return what is wrong with a catalog row; "" if nothing is."""
    if sum(limit is not None for limit in (row.above, row.below, row.rises)) != 1:
        return "needs exactly one of above, below and rises"
    try:
        row.say.format(of="", value="", heat="")
        row.over.format(of="")
    except (KeyError, IndexError, ValueError):
        return "may name {of}, {value} and {heat} in what it says, nothing else; in `over` {of} alone"
    health = HealthDetector(HealthLimits(), (row,))
    gauges = [Gauge(name=row.gauge, of="it", value=v, at=float(i)) for i, v in enumerate(row.sample)]
    heard = [health.on_gauge(gauge, ("n",)) for gauge in gauges]
    if not heard or heard[-1] is None or any(heard[:-1]):
        return "is not met by its own sample, or before its end"
    return ""
