"""What NCCL's RAS says: texts of NCCL 2.28.9, of four ranks on an H200 and from its documentation."""

import time

from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.core.diagnose.ras_status import TOLD_CHARS, RasWord, describe_ras, parse_ras, telling_lines
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace

HEAD = """SERVER PROTOCOL 2
OK
NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.000s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
WELL = f"""{HEAD}    0         1         1         4         4         4   RUNNING      OK

Errors
======

Warnings
========

"""
BEHIND = f"""{HEAD}    0         1         1         4         4         4   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (be885fa1dc14f9e6) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 21
  Rank 2 has launched up to operation 20 -- GPU 0 managed by process 688 on node 127.0.0.1

"""
SILENT = f"""{HEAD}    0         1         1         3         4         3   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 1047 on node 127.0.0.1 managing GPU 0

#0-0 (d28fff848d19aad2) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 0 managed by process 1047 on node 127.0.0.1

Warnings
========

"""
SEVERAL = """#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  2 ranks have not launched any operations
  Rank 8 -- GPU 0 managed by process 11 on node 172.16.64.211
  Rank 9 -- GPU 1 managed by process 12 on node 172.16.64.211
"""
AHEAD = """#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different Broadcast operation counts
  26 ranks have launched up to operation 7
  Rank 3 has launched up to operation 9 -- GPU 3 managed by process 5 on node 172.16.64.210
"""


def behind(rank: int, pid: int, launched: int, others: int) -> str:
    counts = f"  3 ranks have launched up to operation {others}\n  Rank {rank} has launched up to operation {launched}"
    where = f"GPU 0 managed by process {pid} on node 127.0.0.1"
    return f"#0-0 (0) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n{counts} -- {where}"


def main_of(rank: int, pid: int, function: str = "train") -> Process:
    thread = Thread(main=True, frames=(Frame("main", "train.py", 1), Frame(function, "train.py", 2)))
    return Process(node=f"n{rank}", rank=rank, pid=pid, state="R", threads=(thread,))


def test_what_it_says() -> None:
    assert parse_ras(WELL) == () == parse_ras("") == parse_ras("HTTP/1.1 400 Bad Request\r\n")
    assert parse_ras(BEHIND) == (RasWord(rank=2, pid=688, op="AllReduce", launched=20, others=21),)
    assert parse_ras(SILENT) == (RasWord(rank=2, pid=1047),)


def test_what_is_sent_on() -> None:
    for text in (WELL, BEHIND, SILENT, SEVERAL, AHEAD):
        assert parse_ras(telling_lines(text)) == parse_ras(text)
        assert len(telling_lines(text)) <= TOLD_CHARS
    assert telling_lines(WELL) == ""


def test_several_and_those_ahead() -> None:
    found = parse_ras(SEVERAL)
    assert [(word.rank, word.pid, word.launched) for word in found] == [
        (0, 483072, 6649),
        (2, 483074, 6649),
        (8, 11, 0),
        (9, 12, 0),
    ]
    assert {(word.op, word.others) for word in found} == {("collective", 6650)}
    assert parse_ras(AHEAD) == (), "who is ahead keeps nobody waiting"
    many = "".join(f"  Rank {n} -- GPU 0 managed by process {n} on node h\n" for n in range(1000))
    cut = telling_lines(f"#0-0 (0) INCOMPLETE\n{many}")
    assert len(cut) <= TOLD_CHARS and 10 < len(parse_ras(cut)) < 30


def test_ranks_of_the_job() -> None:
    """A communicator numbers its ranks by itself; containers number processes alike."""
    word = behind(0, 7, 3, 4)
    assert "rank 5 has launched 3 AllReduce, others 4" in describe_ras(word, {5: main_of(5, 7), 0: main_of(0, 8)})
    assert "rank 0 has" in describe_ras(word, {5: main_of(5, 7), 0: main_of(0, 7)})
    assert not describe_ras(word, {5: main_of(5, 7), 6: main_of(6, 7)}), "nobody knows which of them"
    assert not describe_ras(word, {5: main_of(5, 9)}), "that is another job"


def test_it_stands_beside_other_evidence() -> None:
    mains = [main_of(rank, 600 + rank) for rank in range(4)]
    flights = [
        Flight(node=f"n{rank}", rank=rank, groups=(Collective(group="0", entered=21 - (rank == 2), completed=20),))
        for rank in range(4)
    ]
    word = behind(2, 602, 20, 21)
    traces = [
        Trace(node=f"n{r}", at=1.0, processes=(mains[r],), flights=(flights[r],), ras=word if r == 0 else "")
        for r in range(4)
    ]
    found = find_blocking(traces)
    assert found.ranks == (2,)
    assert found.reason.endswith(" (NCCL's RAS: rank 2 has launched 20 AllReduce, others 21)")


def test_alone_it_names_nobody() -> None:
    word = "#0-0 (0) INCOMPLETE\n  Rank 2 -- GPU 0 managed by process 602 on node h"
    traces = [
        Trace(node=f"n{r}", at=1.0, processes=(main_of(r, 600 + r),), ras=word if r == 0 else "") for r in range(4)
    ]
    found = find_blocking(traces)
    assert not found.ranks and found.reason.endswith(" (NCCL's RAS: rank 2 does not answer)")


def test_a_megabyte_of_telling_lines_is_cut_at_once() -> None:
    """A large job, or another user who listens in place of NCCL, tells so much; it took a quarter of an hour."""
    text = "#1-1 (a) A\n" * 95_000
    began = time.process_time()
    assert len(telling_lines(text)) == TOLD_CHARS // 11 * 11 - 1
    assert time.process_time() < began + 5
