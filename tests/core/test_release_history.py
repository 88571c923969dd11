"""What the journal tells of releases."""

from holdfast.core.record.ledger import Ledger
from holdfast.core.record.release_history import ReleaseChapter, ReleaseHistory, new_and_redone
from holdfast.core.release.job_releases import JobReleases
from holdfast.model.action import Action, Launch, Stage
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Begin, Event, Order, Progress, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from tests.core.test_ledger import CRASH, START, account

FIRST = Release(number=1, digest="1" * 64, who="me")
SECOND = Release(number=2, digest="2" * 64, who="you", message="faster")


class Journal:
    def __init__(self) -> None:
        self.history, self.ledger = ReleaseHistory(), Ledger()
        self.releases = JobReleases(FIRST, trial_steps=20)
        self._count = 0

    def add(self, event: Event, *actions: Action) -> None:
        self._count += 1
        launches = any(isinstance(action, Launch) for action in actions)
        phase = Phase.LAUNCHING if launches else Phase.TRAINING if isinstance(event, Progress) else Phase.WAITING
        decision = Decision(actions=actions, phase=phase)
        entry = Entry(seq=self._count, at=float(self._count), event=event, decision=decision)
        self.history.add(entry)
        self.ledger.add(entry)

    def launch(self, generation: int, release: Release) -> None:
        self.add(Tick(), Launch(id=generation, generation=generation, seats=(), release=release))

    def step(self, generation: int, first: int, step: int) -> None:
        self.add(Progress(generation=generation, step=step, at=1.0, first_step=first, first_at=1.0, counted=False))

    def told(self) -> dict[int, ReleaseChapter]:
        releases = self.releases
        ran = self.ledger.list_releases()
        chapters = self.history.list_chapters(releases.known, releases.fates, releases.told, ran)
        return {chapter.release.number: chapter for chapter in chapters}


def begun() -> Journal:
    journal = Journal()
    job = Job(run_id="r", min_nodes=1, max_nodes=1)
    journal.add(Begin(job=job, limits=Limits(), release=FIRST))
    return journal


def test_steps_and_times() -> None:
    journal = begun()
    assert journal.told() == {1: ReleaseChapter(release=FIRST, fate=Fate.RUNNING, at=1.0)}
    journal.launch(1, FIRST)
    journal.step(1, 1, 7)
    journal.add(Order(verb="update", who="you", release=SECOND), Stage(id=9, release=SECOND, nodes=("a",)))
    journal.releases.known[2], journal.releases.fates[2] = SECOND, Fate.WAITING
    assert journal.told()[2] == ReleaseChapter(release=SECOND, fate=Fate.WAITING, at=4.0)
    journal.launch(2, SECOND)
    journal.step(1, 1, 8)  # late news of the generation before
    journal.step(2, 8, 10)
    journal.launch(3, SECOND)
    journal.step(3, 10, 12)
    journal.releases.fates[1], journal.releases.told[1] = Fate.REPLACED, "by release 2"
    first, second = journal.told().values()
    assert (first.steps, first.redone, first.launched_at, first.why) == (7, 0, 2.0, "by release 2")
    assert (second.steps, second.redone, second.launched_at) == (5, 1, 5.0), "step 10 was made twice"
    journal.launch(4, FIRST)
    journal.step(4, 11, 13)
    back = journal.told()[1]
    assert (back.steps, back.redone) == (8, 2), "one that is gone back to goes on counting"


def test_steps_that_may_have_been_made_before_are_not_called_new_for_sure() -> None:
    """Where nobody knows what the script went on from, the console says "at most", and so does this."""
    counted = account(*START, *CRASH, "36 progress 1 at 35 counted", "55 progress 60 at 54 from 1 since 35 counted")
    assert [(ran.unsure, *new_and_redone(ran)) for ran in counted.ran] == [(True, "at most 81", "at least 0")]
    known = account(*START, *CRASH, "36 progress 16 at 35")
    assert [(ran.unsure, *new_and_redone(ran)) for ran in known.ran] == [(False, "21", "1")]
