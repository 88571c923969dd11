"""Controllers that race for one run, and a server that is killed again and again: nothing is lost, and one acts at a
time."""

import contextlib
import threading
import time
from random import Random

import pytest

from holdfast.core.agent_state_machine import AgentProtocol, CarryOut, ErrandReceived, LinkOpened, NodeLimits
from holdfast.model.decider_events import Tick
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.node_errands import StopHere
from tests.postgres_server import PostgresServer

pytest.importorskip("psycopg", reason="the extra postgres is not installed")
from holdfast.journal.journal_errors import JournalAwayError, LeaseLostError
from holdfast.journal.journal_key import JournalKey
from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

pytestmark = pytest.mark.e2e
LEASE_S = 0.15


class Race:
    """Some controllers of one run, each in a thread, with the real machine of an agent that hears all of them."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed, self.run_id = url, seed, f"race {seed}"
        self.until = time.monotonic() + 1.0
        self.agent = AgentProtocol("n0", NodeLimits(), 0.0)
        self.carried_out: list[int] = []  # the epochs of the errands that the agent has carried out, in order
        self.acknowledged: dict[int, str] = {}
        self.refused: set[tuple[int, str]] = set()
        self.begun_at: dict[int, float] = {}  # by epoch: when its controller knew that it has the lease
        self.acted: list[tuple[float, int]] = []  # when a controller that was allowed to act had asked, and its epoch
        self.lock = threading.Lock()
        self.failed: list[BaseException] = []

    def run(self) -> None:
        controllers = [threading.Thread(target=self._control, args=(number,)) for number in range(3)]
        for thread in controllers:
            thread.start()
        for thread in controllers:
            thread.join()
        assert not self.failed, self.failed[0]

    def _control(self, number: int) -> None:
        rng = Random(f"{self.seed} {number}")
        lives = 0
        try:
            while time.monotonic() < self.until:
                lives += 1
                time.sleep(rng.uniform(0, 0.05))
                with contextlib.suppress(LeaseLostError, JournalAwayError):
                    self._live(f"{number}-{lives}", rng)
        except BaseException as e:
            self.failed.append(e)

    def _live(self, name: str, rng: Random) -> None:
        journal = PostgresJournal(
            self.url, self.run_id, LeaseHolder(name=name, lease_s=LEASE_S), JournalKey("", self.run_id)
        )
        epoch = journal.epoch
        with self.lock:
            self.begun_at[epoch] = time.monotonic()
            self.agent.step(0.0, LinkOpened(epoch))
        seq = max((entry.seq for entry in journal.read()), default=0)
        try:
            while time.monotonic() < self.until:
                seq += 1
                self._append(journal, seq, name)
                self._tell_agent(journal, seq, late=rng.random() < 0.1, rng=rng)
                if rng.random() < 0.1:
                    time.sleep(rng.uniform(0, 3 * LEASE_S))  # stopped, or short of processors
                if rng.random() < 0.05:
                    return journal.close()
                if rng.random() < 0.05:
                    return None  # killed: nobody is told
        finally:
            journal._link.close()
        return None

    def _append(self, journal: PostgresJournal, seq: int, name: str) -> None:
        decision = Decision(phase=Phase.TRAINING, reason=name)
        try:
            journal.append(Entry(seq=seq, at=float(seq), event=Tick(), decision=decision), durable=True)
        except LeaseLostError:
            self.refused.add((seq, name))
            raise
        with self.lock:
            assert seq not in self.acknowledged
            self.acknowledged[seq] = name

    def _tell_agent(self, journal: PostgresJournal, seq: int, *, late: bool, rng: Random) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 4 * LEASE_S))  # an action that takes its time before it has an errand
        asked_at = time.monotonic()
        epoch = journal.epoch
        with self.lock:
            self.acted.append((asked_at, epoch))
        if late:
            time.sleep(rng.uniform(0, 3 * LEASE_S))  # stopped just then: the errand is under way
        with self.lock:
            errand = StopHere(id=epoch * 1_000_000 + seq, generation=1, grace_s=0.0)
            deeds = self.agent.step(0.0, ErrandReceived(errand, epoch))
            self.carried_out += [epoch for deed in deeds if isinstance(deed, CarryOut)]

    def check(self) -> int:
        reader = PostgresJournal(self.url, self.run_id)
        found = list(reader.read())  # which checks the chain
        epochs = [
            row[0]
            for row in reader._link.execute(
                "select epoch from holdfast.entry where run_id = %(run)s order by seq", {"run": self.run_id}
            )
        ]
        reader.close()
        written = {entry.seq: entry.decision.reason for entry in found}
        assert [*written] == list(range(1, len(written) + 1))
        assert written.items() >= self.acknowledged.items(), "nothing that was acknowledged is lost"
        assert not self.refused & set(written.items()), "nothing that was refused is there"
        assert epochs == sorted(epochs), "no older controller has written after a newer one"
        assert self.carried_out == sorted(self.carried_out), "no node has obeyed an older one after a newer one"
        for asked_at, epoch in self.acted:
            later = [at for other, at in self.begun_at.items() if other > epoch]
            assert not later or asked_at <= min(later), f"epoch {epoch} may act, but a newer one had begun"
        return len(self.begun_at)


def race(url: str, seeds: range) -> None:
    takeovers = 0
    for seed in seeds:
        racing = Race(url, seed)
        racing.run()
        try:
            takeovers += racing.check()
        except AssertionError as e:
            e.add_note(f"seed {seed}")
            raise
    assert takeovers > 2 * len(seeds), "they did race"
    print(f"{len(seeds)} schedules, {takeovers} takeovers")


def test_controllers_race_for_a_run(shared_postgres: str) -> None:
    race(shared_postgres, range(3))


@pytest.mark.slow
@pytest.mark.search
@pytest.mark.timeout(1200)
def test_controllers_race_at_length(shared_postgres: str) -> None:
    race(shared_postgres, range(1000, 1200))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_under_load(own_postgres: PostgresServer) -> None:
    """Controllers write as fast as they can, and the next one goes on where the last one gave up."""
    over = threading.Event()
    acknowledged: list[int] = []
    gave_up: list[str] = []

    def write() -> None:
        while not over.is_set():
            with contextlib.suppress(JournalAwayError):
                write_on()

    def write_on() -> None:
        journal = PostgresJournal(
            own_postgres.url, "load", LeaseHolder(name="one", lease_s=1.0), JournalKey("", "load")
        )
        seq = max((entry.seq for entry in journal.read()), default=0)
        assert seq >= max(acknowledged, default=0), "what was acknowledged is there"
        try:
            while not over.is_set():
                seq += 1
                journal.append(Entry(seq=seq, at=1.0, event=Tick(), decision=Decision()), durable=seq % 3 == 0)
                acknowledged.extend([seq] if seq % 3 == 0 else [])
        except JournalAwayError as e:
            gave_up.append(str(e))
            raise
        journal.close()

    writer, rng = threading.Thread(target=write), Random(7)
    writer.start()
    for _ in range(10):
        before = len(acknowledged)
        while len(acknowledged) < before + 50:
            assert writer.is_alive()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        own_postgres.kill()
        time.sleep(rng.choice((0.0, 0.3, 1.5)))
        own_postgres.up()
    over.set()
    writer.join()
    reader = PostgresJournal(own_postgres.url, "load")
    found = [entry.seq for entry in reader.read()]
    reader.close()
    assert found == list(range(1, len(found) + 1)) and {*acknowledged} <= {*found}
    print(f"{len(acknowledged)} durable writes, 10 kills, {len(gave_up)} writers gave up")
