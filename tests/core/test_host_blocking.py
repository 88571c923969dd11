"""Which evictions block a host, and which hosts an entry of the list refuses."""

import pytest

from holdfast.core.incident.incident_case import machine_faults
from holdfast.core.membership.host_blocking import BlockedHost, HostFaults, lift_entries, matching_entry
from holdfast.model.action import Block
from holdfast.model.decider_events import Ready
from holdfast.model.detector_alarm import MACHINE_LOST, Alarm, Kind
from holdfast.model.job_and_seats import HostIdentity

ENTRY = BlockedHost(host="h1", id="id1", gpus=("GPU-1", "GPU-2"), reason="bad", run_id="r", at=0.0, until=100.0)


def alarm(kind: Kind, **more: object) -> Alarm:
    return Alarm(kind=kind, at=1.0, suspects=("n1", "n2"), reason="did it", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cause",
    [
        alarm(Kind.HEALTH, hard=True),
        alarm(Kind.LINES, hard=True),
        alarm(Kind.REPLICA, hard=True),
        alarm(Kind.CRASH, action="evict_and_restart", confidence=0.95),
        alarm(Kind.SILENCE, signature=MACHINE_LOST),
    ],
)
def test_proof_against_a_machine_blocks_it(cause: Alarm) -> None:
    assert machine_faults(cause, {}, ("n1", "n3")) == {"n1": "did it"}, "n3 is no suspect, and n2 does not leave"


@pytest.mark.parametrize(
    "cause",
    [
        alarm(Kind.SILENCE, hard=True),
        alarm(Kind.HANG, hard=True),
        alarm(Kind.SLOW),
        alarm(Kind.HEALTH),
        alarm(Kind.CRASH, code=-11),
        alarm(Kind.CRASH, action="evict_and_restart", confidence=0.8),
        alarm(Kind.CRASH, action="rollback_or_fix_code", group="script", confidence=1.0),
        alarm(Kind.CRASH, klass="dns_ssh_launch", group="infrastructure"),
        alarm(Kind.LOSS),
    ],
)
def test_what_says_nothing_sure_about_a_machine_blocks_nobody(cause: Alarm) -> None:
    assert machine_faults(cause, {}, ("n1", "n2")) == {}
    found = {"n2": "computes wrongly", "n9": "is not evicted"}
    assert machine_faults(cause, found, ("n1", "n2")) == {"n2": "computes wrongly"}, "a probe has found it"


@pytest.mark.parametrize(
    ("host", "id", "gpus", "what"),
    [
        ("renamed", "id1", (), "h1"),
        ("h1", "other", (), ""),  # another machine has its name
        ("h2", "id2", ("GPU-7", "GPU-2"), "GPU-2"),  # the GPU was moved
        ("h2", "id2", ("GPU-7",), ""),
        ("h1", "", ("GPU-1",), ""),  # a node of the controller's own host
    ],
)
def test_whom_an_entry_refuses(host: str, id: str, gpus: tuple[str, ...], what: str) -> None:
    identity = HostIdentity(id=id, gpus=gpus)
    assert matching_entry((ENTRY,), host, identity, 99.0) == ((ENTRY, what) if what else None)
    assert matching_entry((ENTRY,), host, identity, 100.0) is None, "its time is over"


def test_an_entry_by_name_and_one_by_gpu() -> None:
    named = BlockedHost(host="h3", id="h3", reason="noisy", who="ann", at=0.0, until=100.0)
    gpus = BlockedHost(host="h1", gpus=("GPU-1",), reason="bad", run_id="r", at=0.0, until=100.0)
    assert matching_entry((named,), "h3", HostIdentity(id="whatever"), 1.0) == (named, "h3")
    assert matching_entry((gpus,), "h1", HostIdentity(id="id1"), 1.0) is None, "only its GPUs are blocked"


def test_lifting() -> None:
    gpus = BlockedHost(host="h2", gpus=("GPU-1",), reason="bad", at=0.0, until=100.0)
    assert lift_entries((ENTRY, gpus), "h1") == (gpus,)
    assert lift_entries((ENTRY, gpus), "id1") == (gpus,)
    [left] = lift_entries((ENTRY, gpus), "GPU-1")
    assert (left.host, left.gpus) == ("h1", ("GPU-2",)), "the host itself stays blocked"
    assert lift_entries((ENTRY, gpus), "h") == (ENTRY, gpus)


@pytest.mark.parametrize(
    ("fault", "gpus"),
    [
        ("has lost GPU 1", ("uuid1",)),
        ("has lost GPU 11", ("uuid11",)),
        ("has lost the GPU at 0000:3b:00 (Xid 79)", ("uuid1",)),
        ("gemm on cuda:1: a wrong result", ("uuid1", "uuid11", "uuid2")),  # in an order of the job's own
        ("has lost GPU 7", ("uuid1", "uuid11", "uuid2")),
    ],
)
def test_only_the_gpu_that_the_fault_names_is_blocked_with_its_host(fault: str, gpus: tuple[str, ...]) -> None:
    names = (("GPU 1", "0000:3b:00"), ("GPU 11", "0000:3c:00"), ("GPU 2", ""))
    identity = HostIdentity(id="id1", gpus=("uuid1", "uuid11", "uuid2"), gpu_names=names)
    faults = HostFaults(iter(range(1, 9)))
    faults.on_evicted(("n1",), {"n1": fault}, 1)
    ready = Ready(node="n1", host="h1", nproc=1, order=0, identity=identity)
    [block] = faults.block_gone(("n1",), {"n1": ready}, ())
    assert isinstance(block, Block) and block.identity == HostIdentity(id="id1", gpus=gpus)
