"""Looks at whether collectives are open: of gloo ranks in real processes, and of what NCCL's recorder has told."""

import json
import mmap
import os
import pickle  # noqa: TID251 - what torch hands out
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.training.network_looks import NetworkLooks, has_open_entry
from holdfast.wire.rank_memory import network_look_reader
from holdfast.wire.rank_memory.flight_log_writer import flight_log_offset, slot_memory_bytes
from holdfast.wire.rank_memory.network_look_writer import NetworkLookLog

AT = flight_log_offset(1, 0)

# The other rank enters each collective so much later: it is open that long on this one.
RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
from holdfast.client.training import rank_flight_recorder
from holdfast.wire.rank_memory.slot_writer import SlotWriter
rank, store, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
slot = None
if rank == 0:
    rank_flight_recorder.start_recorder(place, 1, 0, "slots:0")
    slot = SlotWriter.open(place.rpartition(":")[0], 0, generation=1, rank=0)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group, open_at = dist.new_group([0, 1]), []
for step in range(30):
    time.sleep(0.1)
    began = time.monotonic()
    if rank:
        time.sleep(0.1)
    works = [dist.all_reduce(torch.ones(4), group=one, async_op=True) for one in (group, None, None)]
    for work in works:
        work.wait()
    open_at.append((began, time.monotonic()))
    if slot:
        slot.step(step)
time.sleep(0.3)
print(json.dumps(open_at))
dist.destroy_process_group()
"""


def test_looks_find_collectives_while_they_are_open(tmp_path: Path) -> None:
    memory = tmp_path / "slots"
    memory.write_bytes(bytes(slot_memory_bytes(1)))
    with open(memory, "r+b") as file, mmap.mmap(file.fileno(), 0) as buf:
        network_look_reader.order_looks(buf, AT, 100, 0.02)
        words = [str(tmp_path / "store"), f"{memory}:{AT}"]
        env = os.environ | {"TORCH_FR_BUFFER_SIZE": "64"}
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(rank), *words], env=env, stdout=subprocess.PIPE)
            for rank in (1, 0)
        ]
        other, own = (rank.communicate(timeout=120)[0] for rank in ranks)
        assert [rank.returncode for rank in ranks] == [0, 0] and other
        open_at: list[list[float]] = json.loads(own)
        newest, looks = network_look_reader.read_looks(buf, AT, 0)
    assert newest >= 15 and len(looks) >= 15  # looks are dear where others compute, and are made less often there
    edge_s = 0.02  # between a clock's reading and the look
    inside = [one for one in looks if any(a + edge_s < one.at < b - edge_s for a, b in open_at)]
    outside = [one for one in looks if all(one.at < a - edge_s or one.at > b + edge_s for a, b in open_at)]
    assert len(inside) > 4 and len(outside) > 4
    assert sum(one.busy for one in inside) >= 0.9 * len(inside)
    assert sum(one.busy for one in outside) <= 0.1 * len(outside)
    assert all(one.begun_at <= one.at + edge_s and 0 <= one.step < 30 for one in looks)


def test_nothing_is_looked_at_without_an_order_or_groups() -> None:
    with mmap.mmap(-1, slot_memory_bytes(1)) as buf:
        looks = NetworkLooks(NetworkLookLog(buf, AT), lambda: (3, time.monotonic()))
        looks.look()
        assert looks.next_at > time.monotonic() and network_look_reader.read_looks(buf, AT, 0) == (0, [])
        network_look_reader.order_looks(buf, AT, 5, 0.01)
        looks.look()  # this process has no groups
        assert looks.next_at > time.monotonic() + 0.5 and network_look_reader.read_looks(buf, AT, 0) == (0, [])


def gloo_dump(entered: int, ended: int, retired: bool = False) -> Any:
    """A recorder with these counts; its entries say whether the newest collective has ended."""

    def dump(entries: bool, stacks: bool, active: bool) -> bytes:
        status = {
            "last_enqueued_collective": entered,
            "last_started_collective": -1,
            "last_completed_collective": ended,
        }
        found: dict[str, Any] = {"pg_status": {"0": status}}
        one = {"pg_id": 0, "is_p2p": False, "retired": retired, "state": "scheduled"}
        return pickle.dumps(found | ({"entries": [one]} if entries else {}))

    return dump


def test_collectives_that_ended_out_of_their_order_are_not_open() -> None:
    """Gloo has two threads, and torch notes the number of the one that ended last."""
    with mmap.mmap(-1, slot_memory_bytes(1)) as buf:
        looks = NetworkLooks(NetworkLookLog(buf, AT), lambda: (3, 0.0))
        assert not looks.has_open_count(gloo_dump(5, 5)) and not looks.has_open_count(gloo_dump(0, -1))
        assert [looks.has_open_count(gloo_dump(6, 5)) for _ in range(3)] == [True] * 3
        assert [looks.has_open_count(gloo_dump(8, 7, retired=True)) for _ in range(3)] == [False] * 3
        assert not looks.has_open_count(gloo_dump(8, 7)), "these numbers have been looked at"
        assert looks.has_open_count(gloo_dump(9, 7))


def test_dear_looks_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)

    def slow_dump(entries: bool, stacks: bool, active: bool) -> bytes:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        found: bytes = gloo_dump(8, 7, retired=True)(entries, stacks, active)
        return found

    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace", slow_dump)
    with mmap.mmap(-1, slot_memory_bytes(1)) as buf:
        looks = NetworkLooks(NetworkLookLog(buf, AT), lambda: (3, 0.0))
        network_look_reader.order_looks(buf, AT, 100, 0.01)
        looks.look()
        assert looks.next_at > time.monotonic() + 0.9
        assert [one.busy for one in network_look_reader.read_looks(buf, AT, 0)[1]] == [False]


def nccl_entry(state: str, started: int | None = None, name: str = "nccl:all_reduce") -> dict[str, Any]:
    return {"profiling_name": name, "retired": False, "state": state, "time_discovered_started_ns": started}


@pytest.mark.parametrize(
    ("entries", "started", "busy"),
    [
        ([], 0, False),
        ([nccl_entry("scheduled")], 5, False),  # queued behind the GPU's other work
        ([nccl_entry("started", 7), nccl_entry("scheduled")], 5, True),
        ([nccl_entry("completed", 7)], 5, False),
        ([nccl_entry("scheduled")], -1, True),  # torch does not tell when any begins
        ([nccl_entry("scheduled", name="gloo:barrier")], -1, False),  # counted elsewhere
    ],
)
def test_on_gpus_a_collective_is_open_from_its_begin(entries: list[dict[str, Any]], started: int, busy: bool) -> None:
    assert has_open_entry({"entries": entries, "pg_status": {"0": {"last_started_collective": started}}}) is busy
