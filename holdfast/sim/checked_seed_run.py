"""Runs one seed: nothing unsafe may happen during the faults, and training must go on after them."""

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from holdfast.core.agent_state_machine import NodeLimits, fence_s
from holdfast.core.record.job_account import Account
from holdfast.core.record.ledger import Ledger
from holdfast.logs import catalog_files
from holdfast.model.decider_events import Begin, Order
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim import cost_model
from holdfast.sim.fault_source import DAY_S, SimFault, draw_faults
from holdfast.sim.invariants import Invariant, RecoveryEffort, UnsafeError
from holdfast.sim.job_world import JobWorld, SimSetup

# A dud takes ready_s to be given back and its successor boots after that; all the rest together takes minutes.
CALM_S = 1800.0
_ENCODER = msgspec.json.Encoder()


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    digest: str  # of the journal
    entries: int
    account: Account
    struck: dict[str, int]  # faults that hit something, by kind
    gave_up: str  # why, if it did


class EntryTally:
    """Sums up journal entries in the ledger, a hash and the cost of recovery, without keeping any entry."""

    def __init__(self, record: Callable[[Entry], None]) -> None:
        self.entries = 0
        self.ledger = Ledger()
        self.effort = RecoveryEffort()
        self._hash = hashlib.sha256()
        self._record = record

    def add(self, entry: Entry) -> None:
        self.entries += 1
        self._hash.update(_ENCODER.encode(entry))
        self._hash.update(b"\n")
        self.ledger.add(entry)
        self._record(entry)
        self.effort.on_entry(entry)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def simulate(setup: SimSetup, record: Callable[[Entry], None] = lambda entry: None) -> SimResult:
    """Simulate a setup to its end and record every journal entry; raises UnsafeError if an invariant is broken."""
    tally = EntryTally(record)
    world = JobWorld(setup, cost_model.load_costs(), catalog_files.load_failures(), tally.add)
    job = Job(
        run_id=f"sim-{setup.seed}",
        min_nodes=setup.nodes - setup.shrink,
        max_nodes=setup.nodes,
        standbys=setup.standbys,
        can_acquire=setup.acquire,
        probes=True,
    )
    world.step_decider(Begin(job=job, limits=Limits(), fence_s=fence_s(NodeLimits())))
    if not setup.acquire:
        for number in range(setup.nodes + setup.standbys):
            world.call_later(world.costs("boot"), world.add_node, f"n{number}")
    until_s = setup.days * DAY_S
    for at, fault in setup.script:
        world.call_later(at, world.strike_fault, fault)
    _next_fault(world, draw_faults(world.rng, setup.rates, setup.nodes + setup.standbys, until_s))
    world.run(until_s)
    _calm_down(world, tally)
    return SimResult(
        digest=tally.digest,
        entries=tally.entries,
        account=tally.ledger.make_account(),
        struck=dict(sorted(world.struck.items())),
        gave_up=tally.effort.ended,
    )


def _next_fault(world: JobWorld, faults: Iterator[tuple[float, SimFault]]) -> None:
    found = next(faults, None)
    if found:
        world.call_later(found[0] - world.now, _strike_next, world, found[1], faults)


def _strike_next(world: JobWorld, fault: SimFault, faults: Iterator[tuple[float, SimFault]]) -> None:
    world.strike_fault(fault)
    _next_fault(world, faults)


def _calm_down(world: JobWorld, tally: EntryTally) -> None:
    """Stop the faults. After a while order the job to stop. Raise UnsafeError if the job did not train again by then,
    or does not end in time."""
    world.calm = True
    step = tally.ledger.step
    world.run(world.now + CALM_S)
    if world.view.phase not in (Phase.DONE, Phase.ENDING):
        if world.view.phase is not Phase.TRAINING or tally.ledger.step == step:
            where = f"{world.view.phase} at step {tally.ledger.step}, {CALM_S:g} s after the last fault"
            raise UnsafeError(Invariant.TRAINS_AGAIN, where)
        world.step_decider(Order(verb="stop", who="the simulation"))
    world.run(world.now + CALM_S)
    if world.view.phase is not Phase.DONE:
        raise UnsafeError(Invariant.ENDS_WHEN_ORDERED, f"{world.view.phase}, {CALM_S:g} s after it")
