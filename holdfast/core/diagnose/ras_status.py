"""Reads the status of NCCL's RAS: which ranks of a communicator have launched fewer operations or do not answer.

RAS counts what processes have launched, on the host. It sees neither a GPU that stands still nor what a captured graph
launches. In a running job, its counts come from slightly different times. So its status is shown as further evidence,
and no rank is blamed because of RAS alone.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.model.rank_traces import Process

TOLD_CHARS = 1024
_SHOWN = 3
_COMMUNICATOR = re.compile(r"#\d+-\d+ \([0-9a-f]+\) ([A-Z]+)")
_DIFFERENT = re.compile(r"\s+Communicator ranks have different (\w+) operation counts")
_MANY = re.compile(r"\s+\d+ ranks have (?:launched up to operation (\d+)|not launched any operations)")
_WHERE = r" -- GPU \S+ managed by process (\d+) on node \S+"
_ONE = re.compile(rf"\s+Rank (\d+) has (?:launched up to operation (\d+)|not launched any operations){_WHERE}")
_LISTED = re.compile(rf"\s+Rank (\d+){_WHERE}")


class RasWord(NamedTuple):
    """What NCCL's RAS (its status service) reports about one rank of a communicator: that it has launched fewer
    operations than other ranks, or that it does not answer."""

    rank: int  # in the communicator
    pid: int
    op: str = ""  # "": it does not answer
    launched: int = 0
    others: int = 0  # the most that others have launched


def telling_lines(text: str) -> str:
    """Return the lines about single ranks from RAS's verbose status, cut to the length that may be sent."""
    patterns = (_COMMUNICATOR, _DIFFERENT, _MANY, _ONE, _LISTED)
    told, left = list[str](), TOLD_CHARS
    for line in text.splitlines():
        if any(pattern.match(line) for pattern in patterns):
            if (left := left - len(line) - 1) < 0:
                break
            told.append(line)
    return "\n".join(told)


def parse_ras(text: str) -> tuple[RasWord, ...]:
    """Return the ranks that the text of RAS reports as late or silent; empty if there are none. The text is RAS's
    verbose status, or the part of it that `telling_lines` returns."""
    found: list[RasWord] = []
    counted: list[tuple[int, int, int]] = []  # rank, pid and operations, of one kind of operation
    op, most, many, silent = "", 0, -1, False

    def close() -> None:
        found.extend(
            RasWord(rank=rank, pid=pid, op=op, launched=count, others=most)
            for rank, pid, count in counted
            if count < most
        )
        counted.clear()

    for line in text.splitlines():
        if header := _COMMUNICATOR.match(line):
            close()
            op, most, many, silent = "", 0, -1, header[1] == "INCOMPLETE"
        elif different := _DIFFERENT.match(line):
            close()
            op, most, many = different[1], 0, -1
        elif several := _MANY.match(line):
            many = int(several[1] or 0)
            most = max(most, many)
        elif one := _ONE.match(line):
            counted.append((int(one[1]), int(one[3]), int(one[2] or 0)))
            most = max(most, counted[-1][2])
        elif listed := _LISTED.match(line):
            if op and many >= 0:
                counted.append((int(listed[1]), int(listed[2]), many))
            elif silent:
                found.append(RasWord(rank=int(listed[1]), pid=int(listed[2])))
    close()
    return tuple(dict.fromkeys(found))


def describe_ras(text: str, mains: Mapping[int, Process]) -> str:
    """Return in words what RAS reports about the job's ranks; empty if nothing. `mains` maps ranks to processes."""
    told: dict[str, None] = {}
    for word in parse_ras(text):
        # RAS tells a process and a rank of a communicator, which need not be that of the job.
        ranks = [rank for rank, main in mains.items() if main.pid == word.pid]
        rank = ranks[0] if len(ranks) == 1 else word.rank if word.rank in ranks else None
        if rank is None:
            continue
        if word.op:
            told[f"rank {rank} has launched {word.launched} {word.op}, others {word.others}"] = None
        else:
            told[f"rank {rank} does not answer"] = None
    return f"NCCL's RAS: {'; '.join([*told][:_SHOWN])}" if told else ""
