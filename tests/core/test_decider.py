"""Whatever the world says, in whatever order, the decider keeps its promises."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import fold_entries
from holdfast.model.action import Acquire, Action, Launch, Say, Stop
from holdfast.model.decider_events import (
    Begin,
    Ended,
    Event,
    LinksDown,
    LinksUp,
    MeshReport,
    Order,
    OrderVerb,
    Outcome,
    Progress,
    Ready,
    Tick,
)
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import SWITCH, Alarm, Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim.invariants import InvariantWatch

NODES = [f"n{i}" for i in range(6)]
CLASSES = [
    ("process_crash_signal", "framework", -11),
    ("python_exception", "script", 1),
    ("peer_connection_lost", "infrastructure", 1),
]


class Run:
    """A decider with its journal, and events that could come next, likely or not."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.decider = Decider()
        self.watch = InvariantWatch()
        self.entries: list[Entry] = []
        self.open: dict[int, Action] = {}
        low = rng.choice((1, 2, 3))
        job = Job(
            run_id="r",
            min_nodes=low,
            max_nodes=low + rng.choice((0, 0, 1)),
            standbys=rng.choice((0, 1, 2)),
            max_restarts=rng.choice((None, None, 0, 1, 2)),
            can_acquire=rng.choice((True, False)),
        )
        self.hear(Begin(job=job, limits=Limits(), fence_s=rng.choice((0.0, 130.0))))

    def hear(self, event: Event) -> None:
        decision = self.decider.step(self.now, event)
        entry = Entry(seq=len(self.entries) + 1, at=self.now, event=event, decision=decision)
        self.entries.append(entry)
        self.watch.check_entry(entry, self.decider.view)
        self.open |= {action.id: action for action in decision.actions if not isinstance(action, Say)}

    def one(self) -> None:
        self.now += self.rng.choice((0.0, 0.0, 0.1, 0.1, 3.0, 3.0, 50.0, 700.0))
        likely = 3 * (self.outcome,) + 2 * (self.ready, self.alarm)
        event: Callable[[], Event] = self.rng.choice(
            (*likely, self.progress, self.ended, self.tick, self.order, self.mesh, self.links, self.links, self.fleet)
        )
        self.hear(event())

    def one_node(self) -> str:
        """Mostly one that the job knows, or hardly any would be struck twice."""
        known = sorted({*self.decider.view.active, *self.decider.view.pool})
        return self.rng.choice(known if known and self.rng.random() < 0.7 else NODES)

    def some_nodes(self) -> tuple[str, ...]:
        return tuple({self.one_node(): None for _ in range(self.rng.choice((0, 1, 2, 3)))})

    def generation(self) -> int:
        return self.decider.view.generation - self.rng.choice((0, 0, 0, 1))

    def outcome(self) -> Event:
        id = self.rng.choice((*self.open, 999))
        action = self.open.pop(id, None)
        ok = self.rng.choice((True, True, False))
        nodes = self.some_nodes() if isinstance(action, Acquire) else ()
        failed = dict.fromkeys(self.some_nodes(), "why") if isinstance(action, Launch | Stop) and not ok else {}
        refused = isinstance(action, Acquire) and not ok and self.rng.random() < 0.3
        return Outcome(action=id, ok=ok, nodes=nodes, failed=failed, refused=refused)

    def alarm(self) -> Event:
        node, at = self.one_node(), self.now - self.rng.choice((0.0, 1.5))
        if self.rng.choice((True, False)):
            return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason="silent", signature=f"silence {node}")
        klass, group, code = self.rng.choice(CLASSES)
        return Alarm(
            kind=Kind.CRASH,
            at=at,
            suspects=(node,),
            ranks=(0,),
            reason="failed",
            klass=klass,
            group=group,
            code=code,
            signature=klass,
            generation=self.generation(),
        )

    def progress(self) -> Event:
        return Progress(
            generation=self.generation(),
            step=self.rng.choice((1, 2, 5, 50)),
            at=self.now - 0.1,
            first_step=1,
            first_at=self.now - 0.2,
            counted=self.rng.choice((False, False, True)),
        )

    def ready(self) -> Event:
        return Ready(node=self.rng.choice(NODES), host="h", nproc=self.rng.choice((1, 1, 2)))

    def ended(self) -> Event:
        return Ended(node=self.rng.choice(NODES), generation=self.generation())

    def order(self) -> Event:
        verbs: tuple[OrderVerb, ...] = (
            "update",
            "evict",
            "drain",
            "hold",
            "resume",
            "stop",
        )  # the first without a release
        return Order(verb=self.rng.choice(verbs), who="ann", node=self.one_node())

    def links(self) -> Event:
        """A link goes down or comes up, or several do at once; or a machine is proven bad."""
        nodes, suspects = self.some_nodes() or ("n0",), (self.one_node(),)
        bad = Alarm(kind=Kind.HEALTH, at=self.now, suspects=suspects, reason="is bad", signature="bad", hard=True)
        switch = msgspec.structs.replace(bad, suspects=nodes, signature=SWITCH)
        return self.rng.choice((LinksDown(nodes=nodes), LinksUp(nodes=nodes), LinksUp(nodes=tuple(NODES)), switch, bad))

    def fleet(self) -> Event:
        known = sorted({*self.decider.view.coming, *self.decider.view.pool, *self.decider.view.active})
        nodes = self.rng.sample(known, self.rng.randint(0, len(known))) or [self.one_node()]
        return FleetReport(nodes={node: self.fleet_node() for node in nodes})

    def fleet_node(self) -> FleetNode:
        return FleetNode(
            state=self.rng.choice(list(FleetState)),
            reason=self.rng.choice(("", "Priority", "Preempted")),
            failed=self.rng.random() < 0.5,
            ends_at=self.rng.choice((0.0, 0.0, self.now - 1, self.now + 30, self.now + 900)),
            near=self.rng.choice(((), ("r1", "s1"), ("r1", "s2"))),
        )

    def mesh(self) -> Event:
        return MeshReport(mesh=self.rng.choice(((("dp", 2),), (("pp", 2), ("dp", 2)))))

    def tick(self) -> Event:
        self.now = max(self.now, self.entries[-1].decision.wake_at or 0.0)
        return Tick()


def keeps_its_promises(rng: Random, length: int) -> None:
    run = Run(rng)
    for _ in range(length):
        run.one()
    ids = [a.id for e in run.entries for a in e.decision.actions if not isinstance(a, Say)]
    assert len(ids) == len(set(ids))
    account = fold_entries(run.entries, run.now + 1)
    assert account.wall_s == pytest.approx(sum(span.seconds for span in account.spans))
    assert account.ettr is None or 0 <= account.ettr <= 1
    again = Decider()
    journal = msgspec.json.decode(msgspec.json.encode(run.entries), type=list[Entry])
    replayed = [again.step(entry.at, entry.event) for entry in journal]
    assert msgspec.json.encode(replayed) == msgspec.json.encode([entry.decision for entry in run.entries])


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), length=st.integers(1, 60))
def test_promises_hold_whatever_happens(rng: Random, length: int) -> None:
    keeps_its_promises(rng, length)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)])
def test_promises_hold_in_long_runs(seeds: range) -> None:
    for seed in seeds:
        keeps_its_promises(Random(seed), 100)


def test_a_journal_begins_with_a_begin() -> None:
    for event in (Tick(), Ready(node="a", host="a", nproc=1), Order(verb="stop", who="me"), Outcome(action=1, ok=True)):
        with pytest.raises(AssertionError):
            Decider().step(0.0, event)


def test_and_has_no_other() -> None:
    decider = Decider()
    begin = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1), limits=Limits())
    decider.step(0.0, begin)
    with pytest.raises(AssertionError):
        decider.step(1.0, begin)


def test_what_people_read_is_there_before_anything_happened() -> None:
    view = Decider().view
    assert (view.phase, view.generation, view.seats, view.pool) == (Phase.NEW, 0, (), {})
    assert (view.open_incident, view.progress, view.coming, view.gone) == (0, None, {}, {})


def test_the_last_call_begins_with_a_whole_replica() -> None:
    """Or a job whose nodes do not make up a replica would make it in vain."""
    decider = Decider()
    job = Job(run_id="r", min_nodes=1, max_nodes=4, can_acquire=False, mesh=(("pp", 4), ("dp", 2)))
    decider.step(0.0, Begin(job=job, limits=Limits(wait_s=600.0, last_call_s=30.0)))
    assert decider.step(1.0, Ready(node="a", host="a", nproc=2)).wake_at == 600.0
    assert decider.step(40.0, Ready(node="b", host="b", nproc=2)).wake_at == 70.0
    assert decider.step(70.0, Tick()).phase is Phase.LAUNCHING, "nobody else is waited for"
