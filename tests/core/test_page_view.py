"""The page says what the report says, and tells each incident from its first signal to its outcome."""

from functools import cache

import msgspec
import pytest

from holdfast.core.record.incident_story import IncidentStory, StoryLine
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.page_view import PageFold, PageView
from holdfast.model.action import Probe
from holdfast.model.decider_events import Outcome, Progress
from holdfast.model.journal_entry import Entry
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.fault_source import FaultRates, NodeLoss, RankCrash
from holdfast.sim.job_world import SimSetup
from tests.core.transcript import Scenario

QUIET = FaultRates(loss=0, crash=0, defect=0, cut=0, fleet_fails=0, dud=0, launch_fails=0, stop_fails=0)
SETUP = SimSetup(
    seed=3,
    nodes=4,
    nproc=2,
    days=0.1,
    rates=QUIET,
    script=((2000.0, RankCrash(node="n1")), (5000.0, NodeLoss(node="n0"))),
)


@cache
def simulated() -> tuple[Entry, ...]:
    entries: list[Entry] = []
    simulate(SETUP, entries.append)
    return tuple(entries)


def folded(entries: tuple[Entry, ...] | list[Entry]) -> PageFold:
    fold = PageFold()
    for entry in entries:
        fold.add(entry)
    return fold


def story_of(fold: PageFold, number: int) -> IncidentStory:
    story = fold.tell_story(number)
    assert story is not None
    return story


def lines_of(story: IncidentStory, part: str) -> list[StoryLine]:
    return [line for line in story.lines if line.part == part]


NAMES = ["silence_after_echoes", "user_code_again", "not_enough_nodes", "standby_lost"]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_the_report_says(name: str) -> None:
    scenario = Scenario(name)
    scenario.play()
    report, view = report_of(fold_entries(scenario.entries)), folded(scenario.entries).make_view(None)
    head = view.head
    assert (head.ettr, head.step, head.code, head.mttr_s) == (report.ettr, report.step, report.code, report.mttr_s)
    assert [one.number for one in view.incidents] == [record.number for record in report.incidents]
    assert [one.sentence for one in view.incidents] == [record.sentence for record in report.incidents]
    assert sum(seconds for _, seconds in view.causes) == pytest.approx(head.lost_s)
    assert head.lost_s == pytest.approx(sum(report.lost_s.values()), abs=0.1 * (len(report.spans) + 1))
    assert len(view.spans) == len(report.spans)
    assert msgspec.json.decode(msgspec.json.encode(view), type=PageView) == view


def test_a_crash_is_told_from_its_alarm_to_its_outcome() -> None:
    fold = folded(simulated())
    view, story = fold.make_view(None), story_of(fold, 1)
    parts = [line.part for line in story.lines if line.part not in ("news", "echo")]
    assert parts[0] == "alarm" and parts[-1] == "outcome"
    assert parts.index("action") < parts.index("outcome") < parts.index("verdict")
    assert "n1" in lines_of(story, "alarm")[0].text and "n1" in view.incidents[0].nodes
    (verdict,) = lines_of(story, "verdict")
    assert verdict.text.startswith(view.incidents[0].why)
    assert story.lines[-1].text == view.incidents[0].sentence and story.lines[-1].ok
    assert story.undone[0] == f"No node was evicted (n1 under suspicion): {view.incidents[0].why}."
    assert [line.at for line in story.lines] == sorted(line.at for line in story.lines)
    assert sum(view.incidents[0].phases_s.values()) == pytest.approx(
        view.incidents[0].lost_s - view.incidents[0].redo_s, abs=0.11
    )


def test_a_lost_node_is_evicted_and_its_seat_taken() -> None:
    view = folded(simulated()).make_view(None)
    lost = view.incidents[1]
    assert lost.evicted == ("n0",) and lost.admitted
    roles = {node.node: node for node in view.nodes}
    assert roles["n0"].role == "evicted" and roles["n0"].first_rank < 0 and roles["n0"].incidents == 1
    assert roles[lost.admitted[0]].role == "active"
    ranks = sorted(
        rank
        for node in view.nodes
        if node.first_rank >= 0
        for rank in range(node.first_rank, node.first_rank + node.nproc)
    )
    assert ranks == list(range(8)) and view.head.ranks == 8


def test_an_evicted_node_that_passes_its_examination_is_a_standby_again() -> None:
    scenario = Scenario("examined_and_back")
    scenario.play()
    last = next(n for n, entry in enumerate(scenario.entries) if "it is a standby again" in entry.decision.reason)
    before, after = (folded(scenario.entries[:end]).make_view(None) for end in (last, last + 1))
    assert [{node.node: node.role for node in view.nodes}["n1"] for view in (before, after)] == ["evicted", "ready"]


def test_a_launch_of_many_nodes_names_a_few() -> None:
    entries: list[Entry] = []
    simulate(SimSetup(seed=1, nodes=300, nproc=8, days=0.02, rates=QUIET, script=SETUP.script[:0]), entries.append)
    assert max(len(entry.decision.reason) for entry in entries) < 200
    [reason] = {entry.decision.reason for entry in entries if "launching generation 1 on" in entry.decision.reason}
    assert reason.endswith("n0, n1, n2, n3, n4, n5, n6, n7 and 292 more")


def test_an_incident_is_told_while_it_is_open() -> None:
    entries = simulated()
    until = next(n for n, entry in enumerate(entries) if entry.decision.closed)
    fold = folded(entries[:until])
    head = fold.make_view(None).head
    assert (head.open_incident, head.incidents) == (1, 1)
    assert lines_of(story_of(fold, 1), "alarm")
    assert fold.tell_story(2) is None
    fold.add(entries[until])
    assert fold.make_view(None).head.open_incident == 0
    assert story_of(fold, 1).undone


def test_the_curve_is_bounded_and_ends_with_the_newest_step() -> None:
    launched = next(n for n, entry in enumerate(simulated()) if isinstance(entry.event, Progress))
    fold, first = folded(simulated()[: launched + 1]), simulated()[launched]
    assert isinstance(first.event, Progress)
    for n in range(1, 20_000):
        told = msgspec.structs.replace(first.event, step=n, at=first.at + n, loss=1.0 / n)
        fold.add(msgspec.structs.replace(first, seq=first.seq + n, at=first.at + n, event=told))
    view = fold.make_view(None)
    assert 600 < len(view.curve) <= 2401
    assert (view.curve[-1].step, view.head.loss) == (19_999, 1.0 / 19_999)
    assert view.head.recent_steps_s == pytest.approx(1.0)


def test_a_status_adds_what_only_the_controller_knows() -> None:
    fold = folded(simulated()[:40])
    nodes = [
        {"node": f"n{n}", "role": "draining" if n == 1 else "active", "step": 9 - n, "phase": ""} for n in range(4)
    ]
    status = {"now": "training; every rank has made step 6", "step": 6, "nodes": nodes, "floor": -1, "held": "Ada"}
    assert fold.make_view(None, status | {"slow": "no longer"}).head.said == {"held": "Ada"}
    slow = status | {"slow": "rank 2 makes the others wait", "slows": True}
    assert fold.make_view(None, slow).head.said["slow"] == "rank 2 makes the others wait"
    view = fold.make_view(None, status)
    assert view.head.watched and view.head.now == status["now"] and view.head.said == {"held": "Ada"}
    assert {node.node: (node.role, node.lag) for node in view.nodes if node.node in ("n0", "n1")} == {
        "n0": ("active", 0),
        "n1": ("draining", 1),
    }


def test_probes_are_told_of_each_node() -> None:
    fold = PageFold()
    plain = simulated()[0]
    for seq, event, actions in (
        (1, plain.event, (Probe(id=90, generation=0, nodes=("a", "b"), level=2),)),
        (2, Outcome(action=90, ok=True, failed={"b": "memory differs"}), ()),
    ):
        decision = msgspec.structs.replace(plain.decision, actions=actions)
        fold.add(Entry(seq=seq, at=float(seq), event=event, decision=decision))
    found = {node.node: [(one.ok, one.found) for one in node.probes] for node in fold.make_view(None).nodes}
    assert found == {"a": [(True, "")], "b": [(False, "memory differs")]}


def test_the_map_of_lateness_changes_every_20_seconds_and_with_the_number_of_ranks() -> None:
    fold = folded(simulated()[:40])

    def shown(now: float | None, told: str) -> tuple[str, ...]:
        return fold.make_view(now, {"lateness": told} if told else {}).lateness

    now = simulated()[39].at
    assert fold.make_view(now).lateness == ()
    first = "l" * 64 + "x" * 6
    assert shown(now, first) == ("l" * 64, "x" * 6)
    assert shown(now + 19, "m" * 70) == ("l" * 64, "x" * 6)
    assert shown(now + 20, "m" * 70) == ("m" * 64, "m" * 6)
    assert shown(now + 21, "n" * 8) == ("n" * 8,)
    assert shown(now + 22, "") == ()
