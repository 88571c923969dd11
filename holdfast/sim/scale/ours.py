"""Our policy at scale: the decider itself in virtual time, fed the alarms that published failures would raise."""

from collections.abc import Callable
from functools import cache
from random import Random

import msgspec

from holdfast.core.account import Ledger
from holdfast.core.decider import Decider
from holdfast.core.sizing import binomial
from holdfast.logs import catalog
from holdfast.model.action import Finish, Launch, Stage
from holdfast.model.alarm import Alarm
from holdfast.model.event import Begin, Decision, Entry, Event, Limits, Order, Phase, Progress, Ready, Tick
from holdfast.model.release import Release
from holdfast.model.topology import Job
from holdfast.sim.scale.book import TRAIN, Book
from holdfast.sim.scale.clock import ALWAYS, Clock
from holdfast.sim.scale.course import Course
from holdfast.sim.scale.deeds import Deeds
from holdfast.sim.scale.mixes import Fault, Mix
from holdfast.sim.scale.prices import Prices, Sheet
from holdfast.sim.scale.result import Result, Tally, result
from holdfast.sim.scale.signs import Sign, Signs, silent
from holdfast.sim.scale.weather import Setup, Strike, Weather, forecast

NAME = "holdfast"
_catalog = cache(catalog.load)
_PERSON = "the simulation"
_RUNS = (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING)
_SETTLED = 30  # steps after a launch at which progress is told once more: a release has proved itself by then


class Ours:
    def __init__(self, setup: Setup, mix: Mix, sheet: Sheet) -> None:
        self.setup, self.mix = setup, mix
        self.rng = Random(f"ours {setup.seed}")
        self.prices = Prices(sheet, setup.gpus, self.rng)
        self._clock = Clock()
        self.begins = True  # the fleet has this job's nodes at hand
        self.nodes: set[str] = set()
        self.dead: set[str] = set()  # of these, those that answer no more
        self.defects: dict[str, Fault] = {}  # node -> what shows itself again after every launch
        self._lemons: set[str] = set()
        self.book = Book()
        self.tally = Tally()
        self.standbys = self._standbys()
        self._signs = Signs(self.prices, _catalog(), setup.step_s, setup.off)
        self._deeds = Deeds(self)
        self._bad: dict[str, Fault] = {}  # releases that fail, by their digest
        self._bug: Fault | None = None  # in whichever release runs
        self._release = ""  # digest of what runs
        self._mending: set[str] = set()  # failures that people are at work on
        self._away: tuple[float, Fault | None] = (0.0, None)  # a service outside, until then
        self._striking = ""
        self._handed_over: set[str] = set()  # nodes that left alive
        self._before: list[str] = []  # who sat where in the last generation
        self._causes: dict[int, str] = {}  # of this life's incidents
        self.course = Course(setup, self.prices, self.rng, self.tally)
        self._live()

    def _standbys(self) -> int:
        if "standbys" in self.setup.off:
            return 0
        if self.setup.standbys is not None:
            return self.setup.standbys
        return binomial(self.setup.nodes, self.mix.rate if self.setup.rate is None else self.setup.rate)

    def _live(self) -> None:
        """A job begins: the first one, or one that a person has queued again."""
        self._clock.life += 1
        self.decider, self.ledger = Decider(), Ledger()
        self._wake_at: float | None = None
        self._seq = 0
        self._causes.clear()

    # --- time --------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._clock.now

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self._clock.later(delay_s, call, *args)

    def play(self) -> Result:
        weather: Weather = forecast(self.setup, self.mix)
        for strike in weather.strikes:
            self._clock.at(ALWAYS, strike.at, self._strike, strike)
        for number, at in enumerate(weather.updates):
            self._clock.at(ALWAYS, at, self._update, f"release-{number}")
        self._begin()
        self._clock.run(self.setup.end_at)
        self._write(self.now)
        self.book.cut(self.now)
        stall = 0.0 if "snapshots" in self.setup.off else self.prices.share("save_stall_s") / self.setup.step_s
        return result(self.setup, (NAME, self.mix.name), self.standbys, self.book, self.tally, stall=stall)

    def _begin(self) -> None:
        job = Job(
            run_id=f"scale-{self.setup.seed}",
            min_nodes=self.setup.nodes,
            max_nodes=self.setup.nodes,
            standbys=self.standbys,
            probes="probes" not in self.setup.off,
        )
        ask_s = 0.0 if "ask" in self.setup.off else self.setup.ask_s
        limits = Limits(ready_s=900.0, wait_s=3600.0, ask_s=ask_s, recheck_s=0.0)
        self.tell(Begin(job=job, limits=limits))

    def tell(self, event: Event) -> Decision:
        before = self.decider.phase
        decision = self.decider.step(self.now, event)
        self._seq += 1
        self.ledger.add(Entry(seq=self._seq, at=self.now, event=event, decision=decision))
        incident = self.decider.incident
        if incident is not None:
            self._causes.setdefault(incident.number, self._striking)
        if decision.closed:
            self.tally.evicted += len(decision.closed.evicted)
            self.tally.standbys_used += len(decision.closed.admitted)
            self.tally.rolled_back += bool(decision.closed.rolled_back)
        self.tally.waits += decision.phase is Phase.WAITING and before not in (Phase.WAITING, Phase.NEW)
        for action in decision.actions:
            self._deeds.carry(action)
        if decision.wake_at is not None and decision.wake_at != self._wake_at:
            self._clock.at(self._clock.life, max(self.now, decision.wake_at), self._tick, decision.wake_at)
        self._wake_at = decision.wake_at
        if decision.phase is Phase.HELD and before is not Phase.HELD:
            self._call_person()
        return decision

    def _tick(self, wake_at: float) -> None:
        if wake_at == self._wake_at:
            self.tell(Tick())

    def _write(self, until: float) -> None:
        """This life's spans go into the book, each with the failure that it is owed to."""
        for span in self.ledger.account(until).spans:
            cause = self._causes.get(span.incident, "") or ("update" if span.change else "")
            self.book.add(span.use.value if span.use.value != "train" else TRAIN, span.end_at, cause)

    # --- nodes -------------------------------------------------------------------------------------------------

    def arrive(self, name: str) -> None:
        self.nodes.add(name)
        if self.rng.random() < self.mix.lemons:
            self._lemons.add(name)
        order = int(name.removeprefix("n"))
        self.tell(Ready(node=name, host=name, nproc=self.setup.nproc, order=order))

    def leave(self, name: str) -> None:
        if name not in self.dead:
            self._handed_over.add(name)
        for kept in (self.nodes, self.dead, self._lemons):
            kept.discard(name)
        self.defects.pop(name, None)

    def _anybody(self, luck: float) -> str:
        """A node that has a seat, alive or not; nobody before the first launch."""
        seats = self.decider.seats
        return seats[int(luck * len(seats))].node if seats else ""

    # --- failures ----------------------------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> None:
        node = self._victim(strike)
        if node not in self.nodes or node in self.dead:
            return
        self.tally.incidents += 1
        self.tally.struck("switch" if strike.blast else strike.fault.name)
        if strike.blast:
            self._blast(node)
            return
        match strike.why:
            case "machine":
                self.defects[node] = strike.fault
            case "release":
                self._bring(strike.fault)
                return
            case "outside":
                self._away = (self.now + self.prices("away"), strike.fault)
            case "passing" if strike.fault.shows == "slow":
                dragged_s = self.prices("passes") * self.prices.share("drag")
                self.book.drag(self.now, dragged_s, strike.fault.name)
                return
            case "passing":
                pass
        # What chance makes of this failure is the same whatever went before it, so that policies are compared in pairs.
        self._show(strike.fault, node, Random(f"sign {self.setup.seed} {strike.at}"))

    def _victim(self, strike: Strike) -> str:
        """Of the nodes that have a seat; lemons that are gone fail no more often than others. Empty: nobody."""
        if not strike.lemon:
            return self._anybody(strike.luck)
        seats = self.decider.seats
        lemons = [seat.node for seat in seats if seat.node in self._lemons]
        if lemons and self.rng.random() < len(lemons) / max(1.0, self.mix.lemons * len(seats)):
            return lemons[int(strike.luck * len(lemons))]
        return self._anybody(strike.luck) if self.rng.random() < 1 / self.mix.lemon_times else ""

    def _blast(self, node: str) -> None:
        """A switch is gone, and with it the nodes beside this one."""
        seats = self.decider.seats
        place = next(number for number, seat in enumerate(seats) if seat.node == node)
        first = place // self.mix.blast * self.mix.blast
        gone = [seat.node for seat in seats[first : first + self.mix.blast] if seat.node in self.nodes]
        self.dead.update(gone)
        self._striking = "switch"
        self.stall()
        self.later(self.prices("silence"), self._cry, silent(*gone), "switch", 0)

    def _bring(self, fault: Fault) -> None:
        """A release that fails comes, and shows itself when it runs."""
        digest = f"bad-{len(self._bad)}"
        self._bad[digest] = fault
        if not self._order_update(digest, now=True):
            self._bug = fault
            self._known(fault)
            self._show(fault, self._anybody(self.rng.random()))

    def _show(self, fault: Fault, node: str, rng: Random | None = None) -> None:
        """A failure shows itself on a node of the generation that runs."""
        if node not in self.nodes or self.decider.phase not in _RUNS:
            return
        self._striking = fault.name
        if fault.shows == "silence":
            self.dead.add(node)
        machine = self.defects.get(node) is fault
        sign = self._signs.of(fault, node, self._anybody(self.rng.random()), rng or self.rng, machine=machine)
        if fault.shows == "slow":
            self._drag(fault, sign, node)
            return
        spoilt = max(0, self.course.step(self.now) - sign.back_steps) if sign.back_steps else 0
        if sign.stalls:
            self.stall()
        self.later(sign.after_s, self._cry, sign.alarm, fault.name, self.decider.generation, spoilt)

    def _drag(self, fault: Fault, sign: Sign, node: str) -> None:
        """Steps are made, but slowly; of a bad release only a person can say so."""
        machine = self.defects.get(node) is fault
        by_hand = not machine or "slow" in self.setup.off
        after_s = self.prices("person") if by_hand else sign.after_s
        self.book.drag(self.now, after_s * self.prices.share("drag"), fault.name)
        self.tally.people += by_hand
        if machine:
            self.later(after_s, self._cry, sign.alarm, fault.name, self.decider.generation)
        else:
            self.later(after_s, self._roll_back, fault)

    def _roll_back(self, fault: Fault) -> None:
        self._striking, self._bug = fault.name, None
        self._bad = {digest: bad for digest, bad in self._bad.items() if bad is not fault}
        self.tell(Order(verb="rollback", who=_PERSON))

    def _cry(self, alarm: Alarm, name: str, generation: int, spoilt: int = 0) -> None:
        if generation not in (0, self.decider.generation):
            return  # its ranks were ended meanwhile
        self._striking = name
        at = self.course.good_at(self.now)
        not_after = spoilt if spoilt else None
        self._tell_step()
        self.tell(msgspec.structs.replace(alarm, at=at, generation=self.decider.generation, not_after=not_after))

    # --- releases and people -----------------------------------------------------------------------------------

    def _update(self, digest: str) -> None:
        self.tally.updates += 1
        if "update" in self.setup.off:
            self._write(self.now)
            self._queue_again(self.prices("requeue") - self.prices("first_step"), "update")
        elif self.decider.phase is not Phase.DONE:
            self._order_update(digest, now=False)

    def _order_update(self, digest: str, *, now: bool) -> bool:
        release = Release(number=0, digest=digest, source="simulated")
        order = Order(verb="update", who=_PERSON, release=release, now=now, window_s=86400.0)
        return any(isinstance(action, Stage) for action in self.tell(order).actions)

    def _call_person(self) -> None:
        self.tally.people += 1
        self.later(self.prices("person"), self._answered)

    def _answered(self) -> None:
        """A person has found what it was, and lets the job go on."""
        self._mend()
        if self.decider.phase is Phase.HELD:
            self.tell(Order(verb="resume", who=_PERSON))

    def _mend(self) -> None:
        self._bug, self._away = None, (0.0, None)
        self._bad.clear()
        self.defects.clear()

    def finished(self, action: Finish) -> None:
        """It gave up: a person finds out why, and queues it again."""
        self._write(self.now)
        self.tally.people += 1
        self._mend()
        self.book.add("person", self.now + self.prices("person"), self._striking)
        self._queue_again(self.prices("requeue") - self.prices("first_step"), self._striking)

    def _queue_again(self, wait_s: float, cause: str) -> None:
        begin_at = max(self.book.at, self.now) + wait_s
        self.book.add("requeue", begin_at, cause)
        self._live()
        for kept in (self.nodes, self.dead, self._lemons):
            kept.clear()
        self.begins = True
        self.course.ended(self.now)
        self._clock.at(self._clock.life, begin_at, self._begin)

    # --- training ----------------------------------------------------------------------------------------------

    def stall(self) -> None:
        self.course.stall(self.now)

    def stop(self) -> None:
        self.stall()
        if self.decider.phase is Phase.PAUSING:  # an incident was told of the last step before its alarm
            self._tell_step()

    def launching(self, action: Launch) -> None:
        self.stall()
        self._release = action.release.digest
        names = [seat.node for seat in action.seats]
        places = enumerate(zip(self._before, names, strict=False))
        dead = tuple(number for number, (was, now) in places if was != now and was not in self._handed_over)
        self.course.launching(action, dead, changed=names != self._before)
        self._before, self._handed_over = names, set()

    def started(self, action: Launch) -> None:
        fresh_s = self.prices("fresh") if "zygote" in self.setup.off else 0.0
        self.later(self.course.restore_s() + self.prices("first_step") + fresh_s, self._first_step, action)

    def _first_step(self, action: Launch) -> None:
        if self.decider.generation != action.generation or self.decider.phase is not Phase.STARTING:
            return
        until, away = self._away
        if away is not None and self.now < until:
            self._show(away, self._anybody(self.rng.random()))
            return
        self.course.begin(self.now)
        self._tell_step()
        for steps in sorted({self.course.behind, _SETTLED} - {0}):
            self.later(steps * self.setup.step_s, self._settled, action.generation)
        bug = self._bad.get(action.release.digest) or self._bug
        if bug is not None:
            self.later(self.prices("relapse"), self._relapse, action.generation, bug, "")
        seated = {seat.node for seat in action.seats} if self.defects else set()
        for node, defect in self.defects.items():
            if node in seated:
                again = "corrupts" if defect.shows == "loss" else "relapse"
                self.later(self.prices(again), self._relapse, action.generation, defect, node)

    def _relapse(self, generation: int, fault: Fault, name: str) -> None:
        if generation != self.decider.generation or self.course.stalled:
            return
        if name and self.defects.get(name) is not fault:
            return
        if not name:
            self._known(fault)
        self._show(fault, name or self._anybody(self.rng.random()))

    def _known(self, fault: Fault) -> None:
        """A release has failed: if it is not rolled back, its authors mend it, as soon as a person can."""
        if "rollback" in self.setup.off:
            self._bug = fault
        if fault.name not in self._mending:
            self._mending.add(fault.name)
            self.later(self.prices("person"), self._mended, fault)

    def _mended(self, fault: Fault) -> None:
        self._mending.discard(fault.name)
        if self._bug is fault or self._bad.get(self._release) is fault:
            self.tally.people += 1
            self._bug = None
            self._bad = {bad: other for bad, other in self._bad.items() if other is not fault}

    def _settled(self, generation: int) -> None:
        if generation == self.decider.generation and not self.course.stalled:
            self._tell_step()

    def _tell_step(self) -> None:
        """The job's step, where it has made one in this generation."""
        made = self.course.made(self.now)
        if made is None:
            return
        step, at, first_step, first_at = made
        generation = self.decider.generation
        self.tell(
            Progress(generation=generation, step=step, at=at, first_step=first_step, first_at=first_at, counted=False)
        )
