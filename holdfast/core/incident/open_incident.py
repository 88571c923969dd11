"""The open incident: its alarms, rounds, evictions and times, from the first alarm to the next step."""

from collections.abc import Mapping

import msgspec

from holdfast.core.incident import cause_name, incident_text, recovery_phases
from holdfast.core.incident.failure_sequence import (
    JudgedFailure,
    add_raisers,
    add_who_was_first,
    join_labels,
    list_texts,
)
from holdfast.core.incident.first_cause import (
    TIMED_OUT,
    add_alike,
    first_cause,
    is_echo,
    is_killed,
    list_alike,
    list_other_causes,
    with_word,
)
from holdfast.core.incident.full_disks import FullDisks, blame_disk, name_disk
from holdfast.core.incident.incident_case import is_unwitnessed_fault
from holdfast.model.decider_events import Progress
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Verdict
from holdfast.model.job_and_seats import Seat
from holdfast.model.loss_response import Skip

DEPARTED = "python_exception"  # the taxonomy's class for what only a change of the script mends
JOIN_HINT = "Have every rank make as many steps: even out the data, or use torch's join()."
KEPT_ALARMS = 64  # of one incident; the rest are only counted
_STEPS, _ELSEWHERE_S = 3.0, 1.0  # no step takes so many times its usual time, nor so long by chance
_TOGETHER_S = 3.0  # nodes that fall silent within this hang on the same switch, or on the same power


class Incident(msgspec.Struct, kw_only=True):
    """One incident, from its first alarm to the next step; it may take several rounds of stopping and launching."""

    number: int
    generation: int
    opened_at: float
    good_step: int
    good_at: float
    counted: bool
    step_s: float = 0.0  # the usual time of a step of its generation; 0: not known
    alone_at: float = 0.0  # when a rank made its newest step, if ranks do not step together
    numbered: bool = False
    stood_step: int = -1  # the last step before a planned restart that this incident ended; ranks made none since
    stood_counted: bool = False
    made_step: int = -1  # as in Record
    trusted_step: int | None = None  # later steps are in doubt; None: none is
    again_at: float = 0.0
    earlier_s: dict[str, float] = {}
    is_pausing: bool = False  # ranks are being ended on purpose; this has been so since `again_at`
    was_pausing: bool = False  # as `paused` in Record
    alarms: list[Alarm] = []  # of this round; once judged, the cause comes first
    departures: tuple[Alarm, ...] = ()  # alarms about ranks that ended well while the others went on
    dropped: int = 0  # echoes no longer kept
    rounds: int = 0  # failures judged so far
    forgiven: int = 0  # of these, before a person let it go on
    judged: bool = False  # whether this round is among them
    told: list[JudgedFailure] = []  # the failure of each judged round; of very many, the first ones and the last
    first: Alarm | None = None  # the cause of the first round
    first_named: Alarm | None = None  # the same with the ranks and nodes of all other causes
    first_text: str = ""  # and in words
    hosts: Mapping[str, str] = {}  # by node, as known when the round was judged
    last_kind: str = ""  # as in Record
    stopped_at: float = 0.0
    probed_s: float = 0.0
    stood_at: float = 0.0  # since when no rank may run until a person says so
    asked_s: float = 0.0  # as in Record, of this round
    held_s: float = 0.0
    lost: dict[str, Alarm] = {}  # nodes that fell silent or were found bad by others while nodes were tried
    absent: tuple[str, ...] = ()  # silent when a person was asked whether to go on; evicted with the answer
    found: dict[str, str] = {}  # machines that the probe or the replay of this round found bad
    silent_at: float = 0.0  # as in Record, of this round
    ordered_at: float = 0.0
    probe_told: bool = False  # that nodes have been tested for long
    launched_at: float = 0.0
    parked: bool = False  # ranks that survive were told to wait for the next launch, not to end
    kept: int = 0  # as in Record
    renewed: int = 0
    short: str = ""
    disks: int = 0  # that the newest launch reads states from
    apart: str = ""  # as in Record
    evicted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    ordered: dict[str, str] = {}  # as in Record
    fleet_said: dict[str, str] = {}  # as in Record
    passed: tuple[str, ...] = ()
    rolled_back: int = 0  # the release that was given up
    brought_in: int = 0  # the release that came in with a restart of this incident
    skipped: tuple[Skip, ...] = ()
    grouped_at: float = 0.0
    restoring_at: float = 0.0
    restored_at: float = 0.0
    set_up_at: float = 0.0
    untold: bool = False  # as in Record
    watched_at: float = 0.0  # since when there was a controller, if there had been none; 0: there was one before

    @property
    def failures(self) -> int:
        """Return the number of failures so far, including the one not judged yet."""
        return self.rounds + (not self.judged)

    def add_alarm(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        others = [a for a in self.alarms if a.kind is not Kind.SILENCE]
        if len(others) > KEPT_ALARMS:
            least = max(others, key=lambda a: (is_echo(a), a.at))  # the least telling
            self.alarms.remove(least)
            alike = [a for a in self.alarms if is_killed(least) and (a.code, a.reason) == (least.code, least.reason)]
            if len(alike) > 1:  # its rank must be named all the same, and the first one not be joined by others
                last = max(alike, key=lambda a: a.at)
                self.alarms[self.alarms.index(last)] = incident_text.join_alarms([last, least])
            else:
                self.dropped += is_echo(least)

    def on_evicted(self, nodes: tuple[str, ...], ordered: Mapping[str, str]) -> None:
        """Record nodes that leave. `ordered` says of some of them who wanted that, and how."""
        seated = list(self.admitted)
        for node in self.passed:
            seated.remove(node)
        self.passed += tuple(node for node in nodes if node in seated)
        self.evicted += nodes
        self.ordered = self.ordered | {node: ordered[node] for node in nodes if node in ordered}

    def on_answer(self, now: float, *, held: bool) -> None:
        """Record how long the job has stood because a person held it, or because one was asked."""
        stood_s = now - self.stood_at
        self.asked_s, self.held_s = self.asked_s + (0.0 if held else stood_s), self.held_s + (stood_s if held else 0.0)

    def on_late_step(self, event: Progress) -> bool:
        """Record a step made before the first alarm but reported later. Return whether it is the last good step."""
        if event.generation != self.generation:
            return False
        self.untold = False
        if event.step <= max(self.good_step, self.made_step):
            return False
        if self.made_step >= 0:  # it is in doubt like those before it
            self.made_step = event.step
            return False
        self.good_step, self.good_at = event.step, max(self.good_at, min(event.at, self.opened_at))
        self.step_s, self.alone_at = event.mean_step_s, event.last_at
        self.counted, self.numbered = event.counted, event.numbered
        return True

    def on_recovered(self, event: Progress) -> None:
        """Record when the ranks of the next generation had process groups, had restored their state and were set up."""
        self.grouped_at, self.restoring_at, self.restored_at = event.grouped_at, event.restoring_at, event.restored_at
        self.set_up_at = event.set_up_at

    def on_nothing_left(self) -> None:
        """Count lost time only from the failure on: the restarted ranks had no step to make, so no work was lost."""
        if self.first is not None:
            self.good_at = max(self.good_at, min(self.first.at, self.opened_at))

    def next_round(self, now: float) -> None:
        """Start a new round, because the job failed again before it made a step."""
        recovery_phases.book_phases(self, now, incident_text.FAILED)
        self.stopped_at = now
        self.parked, self.kept, self.renewed = False, 0, 0
        self.dropped = self.echoes
        self.alarms.clear()
        self.found = {}
        self.judged = False

    def on_more(self, now: float, alarm: Alarm) -> None:
        """Record an alarm that comes while ranks are being stopped."""
        self.add_alarm(alarm)
        if alarm.kind is Kind.SILENCE:
            self.silent_at = self.silent_at or now

    def on_fleet_word(self, node: str, word: str) -> bool:
        """Record what the fleet says of a node that has fallen silent. Return False if the node is no part of this
        incident. Before the round is judged, the word becomes a part of the alarm, and so of the cause."""
        if not self.judged and node in self.silent:
            own = [alarm.kind is Kind.SILENCE and alarm.suspects == (node,) for alarm in self.alarms]
            self.alarms = [
                with_word(alarm, word) if ours else alarm for alarm, ours in zip(self.alarms, own, strict=True)
            ]
            return True
        if node in self.evicted and not any(word in alarm.evidence for alarm in self.alarms):
            self.fleet_said = self.fleet_said | {node: word}
        return node in self.evicted

    def on_timeout(self, named: Alarm | None) -> None:
        """If a collective timed out and no alarm says why, add `named`, the alarm about the rank others waited for."""
        waited = any(a.klass == TIMED_OUT for a in self.alarms) and is_echo(first_cause(self.alarms))
        if named is not None and waited:
            self.add_alarm(named)

    def on_departed(self, ranks: tuple[int, ...], seats: tuple[Seat, ...]) -> None:
        """Blame ranks that ended well while other ranks went on, if no alarm so far shows another cause."""
        if not self.alarms or not all(is_echo(alarm) for alarm in self.alarms):
            return
        nodes = {seat.first_rank + local: seat.node for seat in seats for local in range(seat.nproc)}
        here = tuple(rank for rank in ranks if rank in nodes)
        if not here or len(here) == len(nodes):
            return
        made = incident_text.describe_place(self.good_step, counted=self.counted, relation="after")
        when = made if self.good_step >= 0 else "before any step was seen"
        departure = Alarm(
            kind=Kind.CRASH,
            at=min(alarm.at for alarm in self.alarms),
            suspects=tuple(sorted({nodes[rank] for rank in here})),
            ranks=here,
            generation=self.generation,
            klass=DEPARTED,
            group="script",
            action="rollback_or_fix_code",
            confidence=1.0,
            reason=f"left {when} {incident_text.WENT_ON}",
            hint=JOIN_HINT,
            signature=f"departed {here}",
        )
        self.departures = (*self.departures, departure)
        self.add_alarm(departure)

    def name_cause(self, disks: FullDisks | None = None, now: float = 0.0) -> Alarm:
        """Return the first cause of this round and move it to the front of the alarms. If one of `disks` was full, that
        may be what it comes of."""
        cause = first_cause(self.alarms)
        self.alarms.remove(cause)
        if path := disks.explain(now, cause) if disks else "":
            cause = blame_disk(cause, path)
        self.alarms.insert(0, cause)
        self.rounds += 1
        self.judged = True
        failure = JudgedFailure(self.cause_text, (cause, *(() if cause.full_disk else self.other_causes)))
        self.told = [*self.told[: KEPT_ALARMS - 1], failure]
        self.last_kind = cause.kind.value
        if self.first is None:
            self.first, self.first_text = self.shared_cause, self.cause_text
            self.first_named = incident_text.join_alarms(add_alike([self.first, *self.other_causes], self.alarms))
        return cause

    @property
    def shared_cause(self) -> Alarm:
        """Return the cause of a judged round, extended by all ranks that report the same bad loss."""
        cause = self.alarms[0]
        alike = [a for a in self.alarms if cause.kind is Kind.LOSS and (a.kind, a.reason) == (cause.kind, cause.reason)]
        return incident_text.join_alarms([cause, *alike])

    @property
    def other_causes(self) -> list[Alarm]:
        """Return the alarms of a judged round that show other causes beside the first."""
        return list_other_causes(self.alarms[0], self.alarms)

    @property
    def cause_text(self) -> str:
        """Return the causes of a judged round as text, with all ranks that were killed or that raised the same error,
        and all nodes that were lost."""
        causes = [add_who_was_first(self.shared_cause, self.alarms), *sorted(self.other_causes, key=lambda a: a.ranks)]
        told = [add_raisers(one, list_alike(one, self.alarms)) for one in causes]
        return name_disk(self.alarms[0].full_disk, incident_text.describe_causes(told, self.hosts))

    def describe_so_far(self) -> str:
        """Return the cause of an incident that is not over, as its record would have it if it ended now."""
        alarm = self.alarms[0]
        newest = self.cause_text if self.judged else incident_text.describe_round(alarm)
        first = self.first_text or newest
        at = incident_text.describe_place(self.good_step, counted=self.counted)
        named = self.good_step < 0 or alarm.kind in (Kind.LOSS, Kind.REDONE) or f" {at} " in f"{first} "
        place = "" if named else f" {at}"
        again = incident_text.describe_failures(self.failures, newest if newest != first else "")
        return f"{first}{place}{again}"

    def doubt_steps(self, not_after: int) -> None:
        """Record that all steps after `not_after` are in doubt, so that the last good step is `not_after` at most."""
        self.made_step, self.good_step = max(self.made_step, self.good_step), min(self.good_step, not_after)
        self.trusted_step = not_after if self.trusted_step is None else min(self.trusted_step, not_after)

    @property
    def not_after(self) -> int | None:
        """Return the last step that every alarm of this round trusts; None if no alarm doubts any state.

        All alarms count, not only the first cause: states with a bad loss are bad even if a node then fell silent.
        """
        return min((alarm.not_after for alarm in self.alarms if alarm.not_after is not None), default=None)

    def _good_step(self, resumed_from: int | None) -> int:
        """Return the last good step. The step resumed from counts even if a silent node never reported it, unless it is
        in doubt: a script may have saved, and restored, a state that was bad already."""
        good_step = self.good_step if self.good_step >= 0 else self.stood_step
        reached = max(good_step, resumed_from or 0) if good_step >= 0 and not self._is_counted else good_step
        return reached if self.trusted_step is None else min(reached, max(good_step, self.trusted_step))

    @property
    def _is_counted(self) -> bool:
        """Whether the last good step is a count since the launch of its generation."""
        return self.counted if self.good_step >= 0 else self.stood_counted

    def _describe_last(self, first: Alarm) -> str:
        """Describe the last failure, if it differs from the first; "" otherwise."""
        if self.rounds < 2 or not self.judged or not self.alarms or self.alarms[0].signature == first.signature:
            return ""
        return self.cause_text

    @property
    def echoes(self) -> int:
        """Return how many alarms only said that another rank had failed. The first of the alarms is no echo of
        another."""
        return sum(is_echo(alarm) for alarm in self.alarms[1:]) + self.dropped

    @property
    def silent(self) -> tuple[str, ...]:
        """Return the nodes that have fallen silent. Once the round is judged, return only nodes that fell silent during
        a probe or replay, or that were silent when a person was asked whether to go on."""
        if self.judged:
            return tuple(sorted({*self.absent, *(n for n, alarm in self.lost.items() if alarm.kind is Kind.SILENCE)}))
        return tuple(sorted({n for a in self.alarms if a.kind is Kind.SILENCE for n in a.suspects}))

    def silent_together(self, hosts: Mapping[str, str]) -> tuple[str, ...]:
        """Return the nodes that fell silent at about the same time as the cause, if they are on several hosts."""
        silences, at = [a for a in self.alarms if a.kind is Kind.SILENCE], self.alarms[0].at
        nodes = sorted({node for a in silences if abs(a.at - at) <= _TOGETHER_S for node in a.suspects})
        return tuple(nodes) if len({hosts.get(node, node) for node in nodes}) > 1 else ()

    def _label_cost(self, cause: Alarm) -> str:
        """Return the cause to which the cost is charged. A machine fault that only a rank reported, without an
        eviction, is marked as unconfirmed."""
        if cause in self.departures:
            return "rank left early"
        label = cause_name.cause_label(cause)
        told = is_unwitnessed_fault(cause) and not is_echo(cause) and not self.evicted
        return f"unconfirmed: {label}" if told else label or cause.kind.value

    def _date_loss(self, cause: Alarm) -> tuple[float, float]:
        """Return when the lost time began, and when the last step was made if the lost time began well after that step.
        Otherwise the second value is 0.

        Usually time is lost since the last step, because the next step was under way. If a process ended or a node fell
        silent long after the last step, ranks were doing something else or stood still. Then time is lost since this
        cause.
        """
        ended_at = min(cause.at, self.opened_at)
        if self.watched_at or not (cause.kind is Kind.SILENCE or cause.code is not None) or ended_at <= self.good_at:
            return self.good_at, 0.0
        stepped_at = max(self.good_at, min(self.alone_at, ended_at))
        if self.step_s and ended_at - stepped_at > max(_STEPS * self.step_s, _ELSEWHERE_S):
            return ended_at, stepped_at
        return stepped_at, 0.0

    def make_record(self, verdict: Verdict, resumed_at: float, resumed_from: int | None) -> Record:
        """Return the record of the incident at its end."""
        cause, stopped_at = self.first or self.name_cause(), max(self.stopped_at, self.opened_at)
        named, (lost_since, stepped_at) = self.first_named or cause, self._date_loss(cause)
        record = Record(
            number=self.number,
            generation=self.generation,
            cause=self.first_text,
            kind=cause.kind.value,
            last_kind=self.last_kind,
            last_cause=self._describe_last(cause),
            klass=cause.klass,
            verdict=verdict,
            good_step=self._good_step(resumed_from),
            good_at=lost_since,
            stepped_at=stepped_at,
            alarm_at=self.opened_at,
            stopped_at=stopped_at,
            launched_at=max(self.launched_at or resumed_at, stopped_at),  # it made steps before its launch was told of
            resumed_at=max(resumed_at, self.launched_at, stopped_at),
            probed_s=self.probed_s,
            resumed_from=resumed_from,
            untold=self.untold,
            failures=self.rounds,
            echoes=self.echoes,
            evicted=self.evicted,
            admitted=self.admitted,
            ranks=named.ranks,
            suspects=named.suspects,
            grouped_at=self.grouped_at,
            restoring_at=self.restoring_at,
            restored_at=self.restored_at,
            set_up_at=self.set_up_at,
            rolled_back=self.rolled_back,
            brought_in=self.brought_in,
            counted=self._is_counted,
            label=join_labels([self._label_cost(alarm) for one in self.told for alarm in one.causes], self.rounds),
            made_step=self.made_step,
            again_at=self.again_at,
            earlier_s=self.earlier_s,
            silent_at=self.silent_at if self.alarms[0].kind is Kind.SILENCE else 0.0,
            ordered_at=self.ordered_at,
            kept=self.kept,
            renewed=self.renewed,
            short=self.short,
            skipped=self.skipped,
            disks=self.disks,
            apart=self.apart,
        )
        return self._complete_record(record)

    def _complete_record(self, record: Record) -> Record:
        """Return the record with what people did, and with its sentence."""
        told = {"causes": list_texts(self.told), "asked_s": self.asked_s, "held_s": self.held_s}
        told |= {"paused": self.was_pausing}
        record = msgspec.structs.replace(record, **told)
        record = msgspec.structs.replace(record, ordered=self.ordered, passed=self.passed, fleet_said=self.fleet_said)
        return msgspec.structs.replace(record, sentence=incident_text.incident_sentence(record))


def open_incident(now: float, number: int, generation: int, good: Progress | None, alarm: Alarm) -> Incident:
    return Incident(
        number=number,
        generation=generation,
        opened_at=now,
        good_step=good.step if good else -1,
        good_at=min(good.at if good else alarm.at, now),
        counted=good.counted if good else False,
        step_s=good.mean_step_s if good else 0.0,
        alone_at=good.last_at if good else 0.0,
        numbered=good.numbered if good else False,
    )
