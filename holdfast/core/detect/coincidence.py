"""Coincidence detector: finds strained machines, such as hot ones, that explain why a job slows down or stalls.

Machines run hot, and drivers are slow to answer, without harm to the job. Such a strain counts only if the job suffers
at the same time. If one machine began to slow itself down when the job lost its pace, this machine is the cause, and is
treated like the machine of a slow rank. If several machines did, the cause lies elsewhere: cooling, power, or the work.
A driver that does not answer while the job stalls is proof against its machine, unless many drivers do not answer.
"""

from collections.abc import Iterator

import msgspec

from holdfast.core.detect.health import HealthLimits, driver_deadline_s
from holdfast.core.detect.slow import LostPace, SlowLimits
from holdfast.core.incident.alarm_rate_limit import RepeatFilter, cap_stance
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.observation import Beat, Strain, StrainKind

_EARLY_S = 60.0  # so much before a machine is found to be strained may the job have become slower
_STALE_S = 30.0  # a node that has told nothing for so long no longer speaks for its machine


class CoincidenceDetector:
    def __init__(self, slow: SlowLimits, health: HealthLimits) -> None:
        self._slow, self._health = slow, health
        self._strains: dict[str, tuple[float, tuple[Strain, ...]]] = {}  # by who tells: when, and what
        self._seats: tuple[Seat, ...] = ()
        self._generation = 0
        self._told = RepeatFilter(slow.again_s)

    def on_launch(self, generation: int, seats: tuple[Seat, ...]) -> None:
        self._generation, self._seats = generation, seats
        self._told = RepeatFilter(self._slow.again_s)

    def on_beat(self, now: float, beat: Beat) -> None:
        if beat.strains:
            self._strains[beat.node] = now, beat.strains
        else:
            self._strains.pop(beat.node, None)

    @property
    def has_strains(self) -> bool:
        return bool(self._strains)

    def add_strains(self, now: float, alarm: Alarm) -> Alarm:
        """Return the alarm about a slow rank; its reason also names any strain that slows the rank's machine."""
        found = [s for nodes, s in self._strained_machines(now, StrainKind.SLOWS) if set(nodes) & set(alarm.suspects)]
        said = " and ".join(strain.text for strains in found for strain in strains)
        return msgspec.structs.replace(alarm, reason=f"{alarm.reason}; its machine {said}") if said else alarm

    def check_pace(self, now: float, lost: LostPace | None) -> Alarm | None:
        """Return an alarm about machines that have slowed themselves down since the job lost its pace."""
        if lost is None:
            return None
        every = dict(self._strained_machines(now, StrainKind.SLOWS))
        late_s = _EARLY_S + lost.blur_s
        found = [
            (nodes, hot)
            for nodes, strains in every.items()
            if (hot := [strain for strain in strains if -_EARLY_S <= lost.since - strain.since <= late_s])
        ]
        longer = f"{lost.what} take {lost.ratio:.2f} times as long"
        times = f"{longer} since then"
        if len(found) > 1 or (found and len(every) > 1 and 2 * sum(map(len, every)) > len(self._seats)):
            together = len(found) > 1  # else most are strained, and one began when the job lost its pace
            names = ", ".join(sorted(node for nodes in (dict(found) if together else every) for node in nodes))
            what = f"{names} slow down for heat or power"
            reason = f"{what} at once, and {times}" if together else f"{what}, and {longer}"
            why = "cooling, power or the work itself is the reason, and no node"
            return self._make_alarm(now, (), f"{reason}: {why}", Stance.NOTIFY)
        if not found or (lost.named and lost.named not in found[0][0]):
            return None  # the others wait for somebody else
        [(nodes, hot)] = found
        lasts_s = now - min(strain.since for strain in hot)
        reason = f"{' and '.join(strain.text for strain in hot)}, for {lasts_s:.0f} s; {times}"
        if lost.cost_s(now) < self._slow.cost_s:
            return self._make_alarm(now, nodes, reason, Stance.NOTIFY)
        reason += f", which has cost {lost.cost_s(now):.0f} s"
        return self._make_alarm(now, nodes, reason, Stance.ACT)

    def check_standstill(self, now: float, stands_since: float | None) -> tuple[Alarm, ...]:
        """Return an alarm for each machine whose driver does not answer while the job stalls. If the drivers of half of
        the nodes or more do not answer, return one alarm without suspects."""
        least_s = driver_deadline_s(self._health)
        if stands_since is None or now < stands_since + least_s:
            return ()
        found = [(nodes, strains[0]) for nodes, strains in self._strained_machines(now, StrainKind.STANDS)]
        silent = [(nodes, driver) for nodes, driver in found if now >= driver.since + least_s]
        stood = f"while the job has stood for {now - stands_since:.0f} s"
        if len(silent) > 1 and 2 * sum(len(nodes) for nodes, _ in silent) >= len(self._seats):
            names = ", ".join(sorted(node for nodes, _ in silent for node in nodes))
            reason = f"the GPU drivers of {names} do not answer, {stood}: no single node"
            told = self._make_alarm(now, (), reason, Stance.NOTIFY, StrainKind.STANDS)
            return (told,) if told else ()
        made = [
            self._make_alarm(now, nodes, f"{driver.text}, {stood}", Stance.ACT, StrainKind.STANDS)
            for nodes, driver in silent
        ]
        return tuple(alarm for alarm in made if alarm)

    def _strained_machines(self, now: float, kind: StrainKind) -> Iterator[tuple[tuple[str, ...], list[Strain]]]:
        """Yield, for each machine with strains of this kind, its seated nodes and these strains."""
        seated = {seat.node for seat in self._seats}
        for told_at, strains in self._strains.values():
            own = [strain for strain in strains if strain.kind is kind]
            nodes = sorted(seated.intersection(node for strain in own for node in strain.nodes))
            if nodes and now < told_at + _STALE_S:
                yield tuple(nodes), own

    def _make_alarm(
        self, now: float, nodes: tuple[str, ...], reason: str, wanted: Stance, kind: StrainKind = StrainKind.SLOWS
    ) -> Alarm | None:
        stance = cap_stance(wanted, self._health.stance)
        slows = kind is StrainKind.SLOWS
        stance = cap_stance(stance, Stance(self._slow.stance)) if slows else stance
        if self._told.is_repeat(now, (kind, stance, nodes)):
            return None
        ranks = [seat.first_rank for seat in self._seats if seat.node in nodes]  # of a seat, whichever node has it
        alarm = Alarm(
            kind=Kind.SLOW if slows else Kind.HEALTH,
            at=now,
            suspects=nodes,
            generation=self._generation,
            group="infrastructure",
            klass="gpu_thermal_power" if slows else "gpu_driver_gsp_fault",
            reason=reason,
            signature=f"strained {kind} {ranks}",
            stance=stance,
        )
        return alarm if slows or not nodes else msgspec.structs.replace(alarm, hard=True)
