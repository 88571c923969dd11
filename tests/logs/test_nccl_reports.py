"""Which rank is the first cause, if NCCL and torch's watchdog report it on every rank but the one that caused it.

Reports are as torch 2.11 with NCCL 2.28 writes them.
"""

import itertools

import pytest

from holdfast.core.detect.crash import alarm_of
from holdfast.core.incident.first_cause import first_cause, is_echo
from holdfast.core.incident.open_incident import Incident
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.observation import Exit

AT = "[rank1]:[E1116 10:00:00.123456789 ProcessGroupNCCL.cpp:683] "
GROUP = "[PG ID 0 PG GUID 0(default_pg) Rank 1] "
ENDED = f"{AT}{GROUP}Process group watchdog thread terminated with exception: "
TERMINATE = "terminate called after throwing an instance of 'c10::DistBackendError'"
LATE = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=4096, "
    "NumelOut=4096, Timeout(ms)=60000) ran for 60012 milliseconds before timing out."
)
DOWN = f"{AT}[Rank 1] To avoid data inconsistency, we are taking the entire process down."
SYSTEM = f"{ENDED}NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9"
SYSTEM_CALL = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
REMOTE = f"{ENDED}NCCL error: remote process exited or there was a network error, NCCL version 2.28.9"
REMOTE_CALL = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
ABORTED = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1. "
REPORTS = {
    "timeout": (AT + LATE, DOWN, ENDED + LATE, TERMINATE, f"  what():  {LATE}"),
    "desync": (
        AT + LATE,
        "\t - [1] Timeout at collective: ALLREDUCE, #41",
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t   - [2] joined but didn't finish collective #40 (count from 1)",
        DOWN,
        TERMINATE,
    ),
    "dump": (
        f"{AT}{GROUP}Received a dump signal due to a collective timeout from rank 0 and we will try our best to dump "
        "the debug info. Last enqueued NCCL work: 40, last completed NCCL work: 40.",
        f"{AT}{GROUP}Terminating the process after attempting to dump debug info, due to collective timeout or "
        "exception.",
    ),
    "remote": (REMOTE, REMOTE_CALL, "Last error:", "", TERMINATE),
    "closed": (
        REMOTE,
        REMOTE_CALL,
        "Last error:",
        "NET/Socket : peer 10.0.0.2<4041> has closed the connection",
        TERMINATE,
    ),
    "reset": (
        SYSTEM,
        SYSTEM_CALL,
        "Last error:",
        "socketProgressOpt: Call to recv from 10.0.0.2<43217> failed : Connection reset by peer",
        TERMINATE,
    ),
    "pipe": (
        SYSTEM,
        SYSTEM_CALL,
        "Last error:",
        "socketProgressOpt: Call to send to 10.0.0.2<43217> failed : Broken pipe",
        TERMINATE,
    ),
    "system": (SYSTEM, SYSTEM_CALL, "Last error:", "", TERMINATE),
    "aborted": ("Traceback (most recent call last):", '  File "/app/train.py", line 30, in <module>', ABORTED),
    "cuda": (f"{ENDED}CUDA error: an illegal memory access was encountered", TERMINATE),
    "nothing": (),
}
CATALOG = catalog_files.load_built_in()


def report(rank: int, at: float, kind: str, code: int = -6) -> Alarm:
    return alarm_of(Exit(node=f"n{rank}", rank=rank, generation=1, code=code, at=at, words=REPORTS[kind]), CATALOG)


@pytest.mark.parametrize(
    ("kind", "klass"),
    [
        *((kind, "nccl_timeout") for kind in ("timeout", "desync", "dump", "aborted")),
        *((kind, "peer_connection_lost") for kind in ("remote", "closed", "reset", "pipe")),
        ("system", "nccl_init_config"),  # it does not say why
        ("cuda", "cuda_illegal_access"),
        ("nothing", "process_crash_signal"),
    ],
)
def test_what_a_report_says(kind: str, klass: str) -> None:
    assert report(1, 10.0, kind).klass == klass


HUNG = Alarm(kind=Kind.HANG, at=5.0, suspects=("n2",), ranks=(2,), reason="stands", signature="hang 2")


@pytest.mark.parametrize(
    "others", list(itertools.product(("timeout", "desync", "dump"), ("remote", "pipe", "system", "aborted")))
)
def test_a_rank_that_hung_says_nothing_and_the_others_time_out(others: tuple[str, str]) -> None:
    """Who loses the connections of a rank that timed out may end before it does."""
    timeout, peer = others
    alarms = [report(0, 10.0, timeout), report(1, 9.9, peer), report(3, 10.2, "closed")]
    for order in itertools.permutations(alarms):
        cause = first_cause(list(order))
        assert is_echo(cause) and cause.klass == "nccl_timeout"
        case = Incident(number=1, generation=1, opened_at=9.9, good_step=5, good_at=9.0, counted=False)
        for alarm in order:
            case.add_alarm(alarm)
        case.on_timeout(HUNG)
        assert case.name_cause() is HUNG, "it was named before, and only reported"


@pytest.mark.parametrize("cause", [report(2, 10.0, "nothing", -9), report(2, 10.3, "cuda"), report(2, 10.0, "nothing")])
@pytest.mark.parametrize("peer", ["remote", "closed", "reset", "pipe", "aborted"])
def test_a_rank_that_ended_is_the_cause_whoever_is_heard_first(cause: Alarm, peer: str) -> None:
    alarms = [cause, report(0, 9.9, peer), report(1, 10.1, "remote"), report(3, 10.2, "aborted")]
    for order in itertools.permutations(alarms):
        assert first_cause(list(order)) is cause


@pytest.mark.parametrize("peer", ["remote", "reset", "system", "aborted", "nothing"])
def test_a_node_that_is_lost_is_the_cause(peer: str) -> None:
    lost = Alarm(kind=Kind.SILENCE, at=10.0, suspects=("n2",), reason="silent", signature="silence n2")
    alarms = [lost, report(0, 10.4, peer), report(1, 10.3, "remote"), report(3, 12.0, "timeout")]
    for order in itertools.permutations(alarms):
        assert first_cause(list(order)) is lost


def test_nccls_general_error_is_the_cause_where_nobody_timed_out() -> None:
    alarms = [report(1, 10.0, "system"), report(0, 9.9, "remote"), report(3, 10.1, "closed")]
    for order in itertools.permutations(alarms):
        assert first_cause(list(order)) is alarms[0]
