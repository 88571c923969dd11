"""Messages of real ranks over gloo, counted at both ends; and what the recorder of NCCL adds to that."""

import json
import timeit
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.training.p2p_counts import MessageCounts
from holdfast.client.training.p2p_progress import MessageProgress
from tests.client.conftest import Zygote

MEMBERS = {"0": {0: 4, 1: 5}}
NAMES = {"0": "0 from rank 4"}
TO, FROM = ("0", 1, True), ("0", 1, False)

PAIR = """
import json, os, sys, torch, torch.distributed as dist
from holdfast.client.training import p2p_counts
p2p_counts.count_messages()
p2p_counts.count_messages()
rank = int(os.fork() == 0)  # one import of torch for both
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
x = torch.ones(4)
for step in range(3):
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank, tag=step)
call = dist.irecv if rank == 0 else dist.isend
for work in dist.batch_isend_irecv([dist.P2POp(call, x, 1 - rank), dist.P2POp(call, x, 1 - rank)]):
    work.wait()
counts = p2p_counts.find_counts()
whole = counts.complete
dist.send_object_list([1], 1) if rank == 0 else dist.recv_object_list([None], 0)
told = [sorted(counts.posted.items()), whole, sorted(counts.waiting)]
dist.send(x, 1) if rank == 0 else dist.recv(x)
with open(f"{sys.argv[2]}/{rank}.json", "w") as out:
    json.dump([*told, counts.complete], out)
if rank == 0:
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os._exit(0)
"""


@pytest.mark.e2e
def test_both_ends_count_the_same(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PAIR)
    ended = bare.run(str(tmp_path / "script.py"), str(tmp_path / "store"), str(tmp_path))
    assert ended.code == 0, ended.err
    for rank in range(2):
        posted, whole, waiting, complete = json.loads((tmp_path / f"{rank}.json").read_text())
        counts = {tuple(key): tuple(value) for key, value in posted}
        assert counts["0", 1 - rank, rank == 1] == (2, 0, 16), "in a batch"
        assert counts["0", 1 - rank, rank == 0][0] == 5, "three, and an object list of two"
        assert whole and waiting == []
        assert complete == (rank == 0), "rank 1 received from whoever sent"


class Group:
    group_name = "0"


def test_what_cannot_be_counted_raises_nothing_that_torch_would_not() -> None:
    counts = MessageCounts()
    counts.note_message(Group(), False, ([], 0))
    assert not counts.complete and counts.posted == {}


class Tensor:
    def numel(self) -> int:
        return 4

    def element_size(self) -> int:
        return 4


def test_to_count_a_message_costs_less_than_five_microseconds() -> None:
    counts, args = MessageCounts(), ([Tensor()], 1, 0)
    best = min(timeit.repeat(lambda: counts.note_message(Group(), True, args), number=200, repeat=50)) / 200
    assert best < 5e-6
    assert counts.posted[TO] == (200 * 50, 0, 16)


def message(name: str, seq: int, state: str = "completed", *, batched: bool = False) -> Any:
    entry = {"record_id": seq, "pg_id": 0, "process_group": ("0", "x"), "collective_seq_id": 0, "p2p_seq_id": seq}
    entry |= {"profiling_name": name, "is_p2p": name != "nccl:coalesced", "time_created_ns": seq * 10**9}
    return entry | {"state": "scheduled" if batched else state, "retired": state == "completed" and not batched}


def tell(posted: dict[Any, Any], entries: list[Any], known: MessageProgress | None = None) -> dict[Any, Any]:
    found = (known or MessageProgress()).list_channels(posted, entries, MEMBERS, NAMES, 4)
    return {row[1:3]: row[3:6] for row in found}


def test_states_are_counted_back_from_the_newest() -> None:
    entries = [message("nccl:send 0->1", 1), message("nccl:send 0->1", 2, "started")]
    entries += [message("nccl:send 0->1", 3, "scheduled"), message("nccl:recv 0<-1", 4, "scheduled")]
    told = tell({TO: (9, 0, 16), FROM: (1, 0, 16)}, entries)
    assert told == {(4, 5): (9, 8, 7), (5, 4): (1, 0, 0)}


def test_messages_of_a_batch_have_its_state() -> None:
    parts = [message("nccl:send 0->1", 7, batched=True), message("nccl:recv 0<-1", 7, batched=True)]
    for state, begun, ended in (("scheduled", 0, 0), ("started", 1, 0), ("completed", 1, 1)):
        told = tell({TO: (1, 0, 16), FROM: (1, 0, 16)}, [*parts, message("nccl:coalesced", 7, state)])
        assert told == {(4, 5): (1, begun, ended), (5, 4): (1, begun, ended)}


def test_what_has_left_the_buffer_is_not_guessed() -> None:
    waits = message("nccl:recv 0<-1", 5, "scheduled")
    assert tell({FROM: (9, 0, 16)}, [waits]) == {(5, 4): (9, None, None)}, "the eight before it may be open"
    assert tell({FROM: (9, 0, 16)}, []) == {(5, 4): (9, None, None)}, "or all, as over gloo"
    known = MessageProgress()
    assert tell({FROM: (8, 0, 16)}, [message("nccl:recv 0<-1", 4)], known) == {(5, 4): (8, 8, 8)}
    assert tell({FROM: (8, 0, 16)}, [], known) == {(5, 4): (8, 8, 8)}, "they had ended before"
    assert tell({FROM: (9, 0, 16)}, [waits], known) == {(5, 4): (9, 8, 8)}
    assert tell({FROM: (9, 0, 16)}, [], known) == {(5, 4): (9, None, None)}, "it was open"


def test_a_queued_message_tells_since_when_the_gpu_could_have_begun_it() -> None:
    known, queued = MessageProgress(), message("nccl:recv 0<-1", 6, "scheduled")
    tell({FROM: (1, 0, 16)}, [queued], known)
    assert known.unbegun(0.0) == (0.0, 0.0), "without timing, one that has begun looks the same"
    ended = message("nccl:recv 0<-1", 2) | {"duration_ms": 500.0, "time_discovered_completed_ns": 9 * 10**9}
    tell({FROM: (2, 0, 16)}, [ended, queued], known)
    assert known.unbegun(0.0) == (9.0, 6.5), "the GPU was in the one before until then, which began late itself"
    assert known.unbegun(12.0) == (12.0, 6.5), "and then in a collective"
    tell({FROM: (2, 0, 16)}, [ended], known)
    assert known.unbegun(0.0) == (0.0, 6.5)


def test_groups_that_are_gone_are_left_out() -> None:
    assert tell({("9", 0, True): (3, 0, 16)}, []) == {}
