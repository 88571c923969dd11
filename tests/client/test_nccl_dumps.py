"""What is made of dumps of torch's recorder from four NCCL ranks, in which something stopped on rank 2.

`nccl_dumps.json` has the last entries of each dump, with the fields that we read, as `tests/gpu/nccl_dumps.py` wrote
them on an H200 with torch 2.11 and NCCL 2.28.9, six seconds after the strike.
"""

import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.training.p2p_progress import leave_batches_out
from holdfast.client.training.rank_flight_recorder import FlightRecorder
from holdfast.core.diagnose.blocking_ranks import BlockingRanks, find_blocking
from holdfast.core.diagnose.wait_graph import build_wait_graph
from holdfast.model.rank_traces import Flight
from holdfast.wire.rank_memory import flight_log_reader
from holdfast.wire.rank_memory.flight_log_writer import FlightLog, flight_log_offset, slot_memory_bytes
from tests.core.diagnose.places import SLEEP, process, trace
from tests.core.diagnose.test_gpu_hang import ITEM

SCENES: dict[str, list[Any]] = json.loads((Path(__file__).parent / "nccl_dumps.json").read_text())
AT = flight_log_offset(1, 0)
NAMES = {"0": "0", "1": "1", "2": "2"}
MEMBERS = {"0": {rank: rank for rank in range(4)}}


def posted_messages(scene: str, rank: int) -> dict[Any, Any]:
    """What the process had counted. In a ring it numbers a message to one side and one from the other at each step; in
    a batch one number stands for messages to both sides and from both."""
    newest = max(entry["p2p_seq_id"] for entry in SCENES[scene][rank]["dump"]["entries"])
    sides = [((rank + 1) % 4, True), ((rank - 1) % 4, False)]
    if scene.startswith("batch"):
        sides += [((rank + 1) % 4, False), ((rank - 1) % 4, True)]
    count = newest if scene.startswith("batch") else newest // 2
    return {("0", peer, sends): (count, 0, 1 << 18) for peer, sends in sides} if newest else {}


def read_flight(scene: str, rank: int) -> Flight:
    told = SCENES[scene][rank]
    with mmap.mmap(-1, slot_memory_bytes(1)) as memory:
        recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=rank), 0)
        posted = posted_messages(scene, rank)
        channels = recorder.messages.list_channels(posted, told["dump"]["entries"], MEMBERS, NAMES, rank)
        recorder.note_collectives([told["dump"]], NAMES, told["at"], channels)
        report = flight_log_reader.read_flight(memory, AT, f"n{rank // 2}")
    assert report is not None
    return report.flight


def name_ranks(scene: str) -> BlockingRanks:
    flights = tuple(read_flight(scene, rank) for rank in range(4))
    host = scene.endswith("_host")
    places = [process(rank, SLEEP if host and rank == 2 else ITEM) for rank in range(4)]
    return find_blocking(trace(*places, flights=flights))


@pytest.mark.parametrize(
    ("scene", "how", "hard", "said"),
    [
        ("blocked", "gpu", True, "rank 2's GPU has not begun all_reduce 21 of group 0, which 3 others have begun"),
        ("ahead", "gpu", False, "rank 2's GPU has not begun collective 21 of group 0, which 3 others have begun"),
        ("backward", "gpu", True, "rank 2's GPU has not begun all_reduce 85 of group 0, which 3 others have begun"),
        ("groups", "crossed", False, "rank 2's GPU has not begun all_reduce 21 of group 1, which 3 others have begun"),
        ("ring", "gpu", True, "rank 2's GPU has not begun all_reduce 21 of group 0, which another one has begun"),
        ("ring_host", "missing", True, "rank 2 has not come to all_reduce 21 of group 0; 3 wait; it is in load"),
        ("batch", "gpu", True, "rank 2's GPU has not begun send 21 of group 0 (2 -> 1), which rank 1 waits for"),
        ("batch_host", "missing", True, "rank 2 has not come to send 21 of group 0 (2 -> 1)"),
    ],
)
def test_rank_2_is_named(scene: str, how: str, hard: bool, said: str) -> None:
    found = name_ranks(scene)
    assert (found.ranks, found.how, found.hard) == ((2,), how, hard), found.reason
    assert said in found.reason


def test_what_a_captured_graph_replays_leaves_no_entries() -> None:
    assert name_ranks("graph").ranks == ()


def test_in_a_job_that_runs_nobody_is_certain() -> None:
    """Some GPU is always the last."""
    assert not name_ranks("healthy").hard


def test_who_waits_for_whom_in_messages() -> None:
    """In the ring only rank 2 waits for nobody; what fits a buffer is sent before it is received."""
    waits = {
        scene: {(m.inside, m.ranks) for m in build_wait_graph([read_flight(scene, r) for r in range(4)]).missing}
        for scene in ("ring", "batch")
    }
    assert waits["ring"] == {((1,), (0, 2, 3)), ((3,), (2,)), ((0,), (3,))}
    assert waits["batch"] == {((1,), (2,)), ((3,), (2,)), ((0,), (1,)), ((0,), (3,))}


def test_what_torch_records_for_a_batch_of_messages_is_no_collective() -> None:
    for rank in range(4):
        entries = SCENES["batch"][rank]["dump"]["entries"]
        assert any(e["profiling_name"] == "nccl:coalesced" and not e["is_p2p"] for e in entries)
        assert leave_batches_out(entries) == []
        assert read_flight("batch", rank).groups[0].entered == 0
    cut = SCENES["batch"][0]["dump"]["entries"][-1:]
    assert leave_batches_out(cut) == [], "its messages have left the buffer"
    coalesced = {**cut[0], "collective_seq_id": 5, "record_id": 200}
    single = {**SCENES["ring"][0]["dump"]["entries"][-2], "collective_seq_id": 4, "p2p_seq_id": 22}
    assert leave_batches_out([single, coalesced]) == [coalesced], "collectives that were coalesced, after one message"


def test_how_long_collectives_held_each_gpu() -> None:
    """Four ranks take turns on one GPU here, so that now one and now another is the last."""
    held = {}
    for rank in range(4):
        with mmap.mmap(-1, slot_memory_bytes(1)) as memory:
            recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=rank), 0)
            recorder.note_collectives([SCENES["backward"][rank]["dump"]], NAMES, 1.0, [])
            report = flight_log_reader.read_flight(memory, AT, "n0")
        assert report is not None
        held[rank] = {one.seq: one.held_s for one in report.arrivals}
    assert {frozenset(one) for one in held.values()} == {frozenset({82, 83, 84})}, "85 has not ended"
    assert held[2] == {82: 0.007653, 83: 0.009242, 84: 0.017805}
    shortest = [min(held, key=lambda rank: held[rank][seq] or 0.0) for seq in (82, 83, 84)]
    assert shortest == [2, 3, 1]
