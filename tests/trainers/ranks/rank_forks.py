"""Ranks that are forks of one process, which has imported a trainer once: that takes longer than what they do."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

ENDED = "ranks ended with codes "


def serve(run_rank: Callable[[list[str]], None]) -> None:
    """For each line of JSON, run as many ranks as it says, and answer with a line when all of them have ended."""
    for line in sys.stdin:
        told = json.loads(line)
        codes = _await_all({_start(run_rank, rank, told) for rank in range(told["world"])})
        print(f"{ENDED}{json.dumps(codes)}", flush=True)


def _await_all(left: set[int]) -> list[int]:
    """Return how the processes ended; if one fails, the others are killed, since they would wait for it."""
    codes: list[int] = []
    while left:
        pid, status = os.waitpid(-1, 0)
        left.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        for other in left if codes[-1] else ():
            os.kill(other, signal.SIGKILL)
    return codes


def _start(run_rank: Callable[[list[str]], None], rank: int, told: dict[str, object]) -> int:
    pid = os.fork()
    if pid == 0:
        _run(run_rank, rank, told)
    return pid


def _run(run_rank: Callable[[list[str]], None], rank: int, told: dict[str, object]) -> NoReturn:
    code = 1
    try:
        log = os.open(f"{told['place']}/{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        for output in (1, 2):
            os.dup2(log, output)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(told["world"])}
        words = told["words"]
        assert isinstance(words, list)
        run_rank([str(rank), str(told["world"]), f"{told['place']}/meeting", f"{told['place']}/told", *words])
        code = 0
    except BaseException:  # as an interpreter does
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
