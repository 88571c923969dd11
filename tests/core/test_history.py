"""What the journal tells of releases."""

from holdfast.core.history import History, fold
from holdfast.model.action import Action, Launch, Stage
from holdfast.model.event import Begin, Decision, Entry, Event, Limits, Order, Outcome, Progress, Tick
from holdfast.model.release import Fate, Release
from holdfast.model.topology import Job

FIRST = Release(number=1, digest="1" * 64, who="me")
BEGIN = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1), limits=Limits(), release=FIRST)


class Journal:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, event: Event, *actions: Action, reason: str = "") -> None:
        number = len(self.entries) + 1
        decision = Decision(actions=actions, reason=reason)
        self.entries.append(Entry(seq=number, at=float(number), event=event, decision=decision))

    def begin(self) -> "Journal":
        self.add(BEGIN)
        self.launch(1, 1)
        return self

    def launch(self, generation: int, release: int, event: Event | None = None, reason: str = "") -> None:
        launched = Release(number=release, digest=str(release) * 64)
        launch = Launch(id=100 + generation, generation=generation, seats=(), release=launched)
        self.add(event or Tick(), launch, reason=reason)

    def step(self, generation: int, first: int, step: int) -> None:
        progress = Progress(generation=generation, step=step, at=1.0, first_step=first, first_at=1.0, counted=False)
        self.add(progress)

    def stage(self, number: int) -> None:
        release = Release(number=number, digest=str(number) * 64, who="you", message="faster")
        self.add(Order(verb="update", who="you", release=release), Stage(id=number, release=release, nodes=("a",)))

    def staged(self, number: int, ok: bool = True, detail: str = "") -> None:
        self.add(Outcome(action=number, ok=ok, detail=detail))


def fates(history: History) -> dict[int, Fate]:
    return {number: chapter.fate for number, chapter in history.chapters.items()}


def test_the_first_release() -> None:
    journal = Journal()
    journal.add(BEGIN)
    history = fold(journal.entries)
    assert fates(history) == {1: Fate.WAITING} and history.wanted() == (FIRST,)
    journal.launch(1, 1)
    journal.step(1, 1, 7)
    history = fold(journal.entries)
    assert fates(history) == {1: Fate.RUNNING} and history.running.number == 1
    assert history.chapters[1].steps == 7 and history.chapters[1].launched_at == 2.0


def test_an_update() -> None:
    journal = Journal().begin()
    journal.stage(2)
    history = fold(journal.entries)
    assert fates(history) == {1: Fate.RUNNING, 2: Fate.STAGING}
    assert [release.number for release in history.wanted()] == [1], "it has not passed its check"
    assert (history.chapters[2].release.who, history.chapters[2].at) == ("you", 3.0)
    journal.staged(2)
    history = fold(journal.entries)
    assert fates(history)[2] is Fate.WAITING and [r.number for r in history.wanted()] == [1, 2]
    journal.launch(2, 2)
    journal.step(2, 8, 10)
    history = fold(journal.entries)
    assert fates(history) == {1: Fate.REPLACED, 2: Fate.RUNNING} and history.chapters[2].steps == 3
    journal.launch(3, 2)
    journal.step(3, 10, 12)
    assert fold(journal.entries).chapters[2].steps == 6, "steps done twice count twice"


def test_refused_and_merged() -> None:
    journal = Journal().begin()
    journal.stage(2)
    journal.staged(2, ok=False, detail="train.py, line 1: no")
    journal.stage(3)
    journal.staged(3)
    journal.stage(4)
    journal.staged(4)
    history = fold(journal.entries)
    assert fates(history) == {1: Fate.RUNNING, 2: Fate.REFUSED, 3: Fate.MERGED, 4: Fate.WAITING}
    assert history.chapters[2].why == "train.py, line 1: no"
    assert history.chapters[3].why == "release 4 came while it waited"


def test_a_rollback() -> None:
    journal = Journal().begin()
    journal.stage(2)
    journal.staged(2)
    journal.launch(2, 2)
    journal.launch(3, 1, reason="it failed where release 1 ran")
    history = fold(journal.entries)
    assert fates(history) == {1: Fate.RUNNING, 2: Fate.ROLLED_BACK}
    assert history.chapters[2].why == "it failed where release 1 ran"
    journal.launch(4, 2, Order(verb="rollback", who="you", number=2))
    assert fates(fold(journal.entries)) == {1: Fate.REPLACED, 2: Fate.RUNNING}, "by hand one may go forth again"


def test_a_node_that_could_not_have_it_is_no_refusal() -> None:
    journal = Journal().begin()
    journal.stage(2)
    journal.add(Outcome(action=2, ok=False, failed={"a": "no room"}))
    assert fates(fold(journal.entries))[2] is Fate.WAITING


def test_journals_from_before_there_were_releases() -> None:
    journal = Journal()
    journal.add(Begin(job=BEGIN.job, limits=Limits()))
    journal.launch(1, 0)
    history = fold(journal.entries)
    assert history.running.number in (0, 1) and history.wanted()
