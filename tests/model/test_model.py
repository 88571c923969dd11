"""The nouns survive the journal and the wire: encoded and decoded, they are equal."""

from typing import get_args

import msgspec
import pytest

from holdfast.model.action import Acquire, Action, Block, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.code_release import Release
from holdfast.model.decider_events import (
    Begin,
    Ended,
    Event,
    LinksDown,
    LinksUp,
    Lost,
    MeshReport,
    Order,
    Outcome,
    Progress,
    Ready,
    SlowTime,
    Successor,
    Tick,
)
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.job_and_seats import HostIdentity, Job, Seat, world_size
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.node_errands import (
    Errand,
    LaunchHere,
    Leave,
    PairTestHere,
    ProbeHere,
    ReplayHere,
    StageHere,
    StopHere,
)
from holdfast.model.probe_findings import PairMeeting
from holdfast.model.replay_task import ReplayTask
from holdfast.model.stored_checkpoint_report import MissedCheckpoint, StorageReport

SEATS = (Seat(node="a", group_rank=0, first_rank=0, nproc=2), Seat(node="b", group_rank=1, first_rank=2, nproc=3))
RELEASE = Release(number=2, digest="d", root="/r", script="a.py", argv=("a.py", "-x"), env={"A": "b"}, message="é")
EVENTS: tuple[Event, ...] = (
    Begin(job=Job(run_id="r", min_nodes=1, max_nodes=2, max_restarts=0), limits=Limits(wait_s=1.5)),
    Ready(node="a", host="h", nproc=2, order=1),
    Alarm(kind=Kind.CRASH, at=1.5, suspects=("a",), reason="é", ranks=(1,), code=-9, evidence=("x", "y")),
    Progress(generation=1, step=2, at=3.0, first_step=1, first_at=2.0, counted=True),
    Ended(node="a", generation=1),
    Outcome(action=3, ok=False, detail="why", nodes=("a",), failed={"b": "because"}),
    Order(verb="update", who="me", code=3, now=True, node="a", release=RELEASE, number=1, window_s=2.5),
    MeshReport(mesh=(("pp", 2), ("dp", 4))),
    LinksDown(nodes=("n1",)),
    LinksUp(nodes=("n1",)),
    FleetReport(nodes={"n1": FleetNode(state=FleetState.QUEUED, reason="Priority", near=("rack", "switch"))}),
    StorageReport(step=5, at=1.5, missed=MissedCheckpoint(step=9, why="step 9 was not written")),
    SlowTime(generation=1, since=2.0, until=5.0, cost_s=1.5, node="a"),
    Tick(),
    Successor(epoch=2, lost=Lost(kept=3, of=5, generation=2, release=1, phase=Phase.TRAINING)),
)
ACTIONS: tuple[Action, ...] = (
    Acquire(id=1, count=2),
    Dismiss(id=2, node="a", reason="why"),
    Block(id=9, host="h", identity=HostIdentity(id="m", gpus=("GPU-1",)), reason="why", incident=1),
    Launch(id=3, generation=1, seats=SEATS),
    Stop(id=4, generation=1, nodes=("a", "b"), grace_s=2.0),
    Stage(id=8, release=RELEASE, nodes=("a", "b")),
    Probe(id=6, generation=1, nodes=("a", "b"), level=2),
    Replay(id=7, generation=1, seats=SEATS, not_after=40),
    Finish(id=5, code=93, grace_s=0.0, reason="why"),
    Say(text="so it is"),
)
LAUNCH = LaunchHere(
    id=1, generation=1, seat=SEATS[1], world_size=5, group_world_size=2, store_host="h", store_port=2, run_id="r",
    max_restarts=3,
)  # fmt: skip
ERRANDS: tuple[Errand, ...] = (
    LAUNCH,
    StopHere(id=2, generation=1, grace_s=1.0),
    StageHere(id=7, release=RELEASE, check=True),
    ProbeHere(id=4, level=3),
    PairTestHere(id=-5, meeting=PairMeeting(rank=0, world=2, host="h", port=3, name="w")),
    ReplayHere(id=-6, launch=LAUNCH, replay=ReplayTask(name="1-1-h0", steps=5), within_s=9.0),
    Leave(id=3, code=0, grace_s=1.0, reason="done"),
)


def test_nothing_is_left_out_here() -> None:
    for examples, union in ((EVENTS, Event), (ACTIONS, Action), (ERRANDS, Errand)):
        assert {type(example) for example in examples} == set(get_args(union))


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_entry_survives(event: Event) -> None:
    entry = Entry(seq=1, at=2.5, event=event, decision=Decision(actions=ACTIONS, wake_at=3.5, reason="why"))
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(entry), type=Entry) == entry


@pytest.mark.parametrize("errand", ERRANDS, ids=lambda e: type(e).__name__)
def test_an_errand_survives(errand: Errand) -> None:
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(errand), type=Errand) == errand


def test_what_is_no_event_is_refused() -> None:
    for text in (b'{"type":"comet"}', b'{"type":"ready","node":"a"}', b'{"type":"ended","node":1}', b"7"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Event)


def test_seats_know_their_ranks() -> None:
    assert world_size(SEATS) == 5
    assert [rank for rank in range(-1, 6) if SEATS[1].has_rank(rank)] == [2, 3, 4]
