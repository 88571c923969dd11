"""A journal with a bit of everything that the page shows, and what the page should show of it."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.diagnose.stack_outline import outline_stacks
from holdfast.core.record.page_view import PageFold, PageView
from holdfast.model.action import Action, Launch, Probe
from holdfast.model.decider_events import Begin, Event, Outcome, Progress
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from tests.cli.page_in_browser import open_view, write_journal
from tests.core.diagnose.places import REDUCE, SLEEP, process, trace
from tests.core.test_page_view import simulated

MESH = (("pp", 2), ("dp", 2), ("tp", 2))
WAITED_FOR = "keeps the others waiting"
WIDE, TALL = 1440, 900
STACKS = outline_stacks(trace(*(process(rank, SLEEP if rank == 3 else REDUCE) for rank in range(8))), (3,))


def training(entries: Iterable[Entry]) -> list[Entry]:
    """These up to the last that tells of training."""
    found = list(entries)
    last = max(
        n for n, one in enumerate(found) if isinstance(one.event, Progress) and one.decision.phase is Phase.TRAINING
    )
    return found[: last + 1]


def generation_of(entries: list[Entry]) -> int:
    return max(a.generation for one in entries for a in one.decision.actions if isinstance(a, Launch))


def follow(entries: list[Entry], event: Event, *actions: Action) -> None:
    """Add an entry of a job that goes on as before."""
    last = entries[-1]
    decision = Decision(phase=last.decision.phase, actions=actions)
    entries.append(Entry(seq=last.seq + 1, at=last.at + 1.0, event=event, decision=decision))


def placed(entry: Entry) -> Entry:
    """The same entry of a job with a mesh, on nodes whose switches are known, whose alarms keep stacks."""
    event = entry.event
    match event:
        case Begin(job=job):
            event = msgspec.structs.replace(event, job=msgspec.structs.replace(job, mesh=MESH))
        case Alarm(stance=Stance.ACT):
            event = msgspec.structs.replace(event, stacks=STACKS)
    actions = tuple(
        msgspec.structs.replace(
            action,
            seats=tuple(
                msgspec.structs.replace(seat, near=("spine", f"leaf{seat.group_rank % 2}")) for seat in action.seats
            ),
        )
        if isinstance(action, Launch)
        else action
        for action in entry.decision.actions
    )
    return msgspec.structs.replace(
        entry, event=event, decision=msgspec.structs.replace(entry.decision, actions=actions)
    )


@cache
def told() -> tuple[Entry, ...]:
    """A job that trains: rank 3 is named in a hang, and nodes were probed, also a standby and one that was evicted."""
    entries = training(map(placed, simulated()))
    view = fold(entries).make_view(None)
    evicted = next(node.node for node in view.nodes if node.role == "evicted")
    standby = next((node.node for node in view.nodes if node.role == "ready"), evicted)
    for number, (node, found) in enumerate(
        ((evicted, "memory differs"), (evicted, "links differ"), (standby, ""), ("n1", ""))
    ):
        follow(entries, entries[-1].event, Probe(id=9000 + number, generation=0, nodes=(node,), level=2))
        failed = {node: found} if found else {}
        follow(entries, Outcome(action=9000 + number, ok=True, failed=failed))
    hang = Alarm(
        kind=Kind.HANG,
        at=entries[-1].at,
        suspects=("n1",),
        ranks=(3,),
        generation=generation_of(entries),
        reason=WAITED_FOR,
        stance=Stance.NOTIFY,
        stacks=STACKS,
    )
    follow(entries, hang)
    return tuple(entries)


def fold(entries: Iterable[Entry]) -> PageFold:
    found = PageFold()
    for entry in entries:
        found.add(entry)
    return found


def view_of(entries: Iterable[Entry]) -> PageView:
    return fold(entries).make_view(None)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_journal(tmp_path / "journal.db", told())


def open_page(browser: Any, address: str, view: str) -> Any:
    page = browser.new_context(viewport={"width": WIDE, "height": TALL}, timezone_id="UTC").new_page()
    open_view(page, address, view)
    return page
