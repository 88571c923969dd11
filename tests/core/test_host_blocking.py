"""Which evictions block a host, and which hosts an entry of the list refuses."""

import pytest

from holdfast.core.incident.incident_case import machine_faults
from holdfast.core.membership.host_blocking import BlockedHost, lift_entries, matching_entry
from holdfast.model.alarm import Alarm, Kind
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
