"""Processes of probes, held from outside: a wrong bit among four nodes; probes that hang, die or fill the memory."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from holdfast.agent.diagnostics import probe_runner
from holdfast.agent.diagnostics.probe_runner import ProbeTerms, run_link, run_probes
from holdfast.agent.probes import SKIPPED
from holdfast.core.diagnose.probe_assessment import ProbeAssessment, assess_probes, starved_nodes
from holdfast.model.probe_findings import Finding, PairMeeting
from tests.agent.probes import faults

pytestmark = pytest.mark.e2e
BITS = ("gemm_bits", "reference")
PLAIN = ProbeTerms(nice=0)  # beside other tests a niced process may wait for long


async def probed(level: int, where: Path, only: tuple[str, ...] = (), terms: ProbeTerms | None = None) -> list[Finding]:
    probes = run_probes(level, 2.0, sys.executable, where, only=only, terms=terms or PLAIN)
    return [finding async for finding in probes]


@pytest.mark.slow
async def test_a_node_of_the_local_fleet_keeps_its_budget(tmp_path: Path) -> None:
    found = await probed(3, tmp_path)
    assert not [f for f in found if f.ok is False]
    assert {f.probe for f in found if f.digest} >= {"gemm_bits", "attention_bits", "reference"}
    assert not [f for f in found if f.detail == SKIPPED]


async def test_a_budget_that_is_used_up_is_said(tmp_path: Path) -> None:
    probes = run_probes(2, 0.01, sys.executable, tmp_path)
    found = {f.probe: f async for f in probes}
    assert found["clock"].ok and found["load"].ok is None and found["load"].detail == SKIPPED


@pytest.mark.slow
async def test_a_wrong_bit_on_one_node_of_four_is_found(tmp_path: Path) -> None:
    bad = ProbeTerms(nice=0, env=faults.spoil(tmp_path / "bad", faults.ALWAYS))
    terms = [None, None, bad, None]
    runs = await asyncio.gather(*(probed(3, tmp_path, BITS, one) for one in terms))
    judged = assess_probes({f"n{number}": run for number, run in enumerate(runs)}, {})
    assert list(judged.bad) == ["n2"], judged
    assert "gemm_bits" in judged.bad["n2"]
    assert assess_probes({f"n{number}": runs[number] for number in (0, 1, 3)}, {}) == ProbeAssessment()


@pytest.mark.slow
@pytest.mark.parametrize(("call", "probe"), [(2, "gemm_bits"), (20, "reference")])
async def test_a_fault_that_comes_once_needs_no_neighbour(tmp_path: Path, call: int, probe: str) -> None:
    found = await probed(
        3, tmp_path, (probe,), ProbeTerms(nice=0, env=faults.spoil(tmp_path / "bad", faults.once(call)))
    )
    failed = [f for f in found if f.ok is False]
    assert [f.probe for f in failed] == [probe] * len(failed) and failed


@pytest.mark.slow
async def test_exact_products_need_neither_gold_nor_neighbours(tmp_path: Path) -> None:
    found = await probed(1, tmp_path, ("gemm",), ProbeTerms(nice=0, env=faults.spoil(tmp_path / "bad", faults.once(1))))
    assert [(f.ok, f.form) for f in found] == [(False, "float32 256"), (True, "bfloat16 256")]
    assert found[0].detail.startswith("1 of 256 ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faults.HANG, "within 3 s"),
        (faults.ABORT, "SIGABRT"),
        (faults.RAISE, "RuntimeError: this machine is not well"),
        (faults.EAT, " GB "),
    ],
)
async def test_a_probe_that_breaks_is_a_finding_and_the_next_one_runs(tmp_path: Path, fault: str, said: str) -> None:
    terms = ProbeTerms(
        nice=0,
        env=faults.spoil(tmp_path / "bad", fault),
        hang_s=3.0 if fault == faults.HANG else 60.0,
        memory_bytes=1 << 30,
    )
    probes = run_probes(1, 19.0, sys.executable, tmp_path, only=("clock", "disk", "shm"), terms=terms)
    found = [finding async for finding in probes]
    assert [(f.probe, f.ok) for f in found] == [("clock", True), ("disk", False), ("shm", True)]
    assert said in found[1].detail


async def test_its_last_words_are_masked_before_they_are_cut(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{'x' * 280} password=correct-horse-battery' >&2\nexit 3\n")
    python.chmod(0o755)
    (found,) = [f async for f in run_probes(1, 2.0, str(python), tmp_path, terms=PLAIN)]
    assert found.ok is False and found.detail.startswith("xxx") and "corr" not in found.detail


async def test_an_interpreter_that_cannot_start_is_a_finding(tmp_path: Path) -> None:
    for python in (str(tmp_path / "no-python"), "/bin/false"):
        found = [f async for f in run_probes(1, 2.0, python, tmp_path)]
        assert [(f.probe, f.ok) for f in found] == [("start", False)]


async def test_who_stops_listening_leaves_no_process_behind(tmp_path: Path) -> None:
    terms = ProbeTerms(nice=0, env=faults.spoil(tmp_path / "bad", faults.HANG))
    probes = run_probes(1, 2.0, sys.executable, tmp_path, only=("clock", "disk"), terms=terms)
    async for _ in probes:
        break
    await probes.aclose()  # type: ignore[attr-defined]
    # That nothing outlives the test is looked at for every end-to-end test.


@pytest.mark.slow
async def test_two_ends_meet_and_the_link_is_sound() -> None:
    port = free_port()
    ends = await asyncio.gather(*(run_link(meeting(rank, port), sys.executable, terms=PLAIN) for rank in range(2)))
    for found in ends:
        assert [f.probe for f in found] == ["link", "link_latency", "link_bandwidth", "link_integrity", "link_loss"]
        assert all(f.ok for f in found), found
        assert next(f for f in found if f.probe == "link_bandwidth").value


@pytest.mark.slow
async def test_who_waits_in_vain_says_so() -> None:
    alone = [meeting(0, free_port(), deadline_s=3.0), meeting(1, free_port(), deadline_s=3.0)]
    for (found,) in await asyncio.gather(*(run_link(one, sys.executable, terms=PLAIN) for one in alone)):
        assert (found.probe, found.ok) == ("link", False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def meeting(rank: int, port: int, deadline_s: float = 60.0) -> PairMeeting:
    return PairMeeting(
        rank=rank,
        world=2,
        host="127.0.0.1",
        port=port,
        name="test",
        serve=True,
        seconds=0.2,
        deadline_s=deadline_s,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [(19, 1, 9.0, True), (0, 12, 1.5, None)])
async def test_a_probe_that_is_given_no_processor_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[int, int, float, bool | None]
) -> None:
    """One that is starved because it is niced is tried again, and then has a result."""
    nice, hogs, limit_s, ok = case
    monkeypatch.setattr(probe_runner, "START_S", limit_s)
    cpu = min(os.sched_getaffinity(0))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec taskset -c {cpu} {sys.executable} "$@"\n')
    python.chmod(0o755)
    spin = [
        sys.executable,
        "-c",
        f"import os, signal\nsignal.alarm(90)\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass",
    ]
    spinning = [await asyncio.create_subprocess_exec(*spin, start_new_session=True) for _ in range(hogs)]
    try:
        await asyncio.sleep(2.0 + hogs / 20)
        terms = ProbeTerms(nice=nice)
        [found] = [f async for f in run_probes(1, 2.0, str(python), tmp_path, only=("clock",), terms=terms)]
    finally:
        for hog in spinning:
            hog.kill()
            await hog.wait()
    assert (found.ok, found.starved) == (ok, ok is None), found
    judged = assess_probes({"n1": [found]}, {})
    assert judged.bad == {} and bool(starved_nodes({"n1": [found]})) is (ok is None)
    assert ok or "waited for a processor" in found.detail
