"""The reference step and the all-to-all of several processes, for real over gloo; the layout, as a plan."""

import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.probes import ProbeRequest, nccl_all_to_all, parallel_reference, probe_team
from holdfast.agent.probes.nccl_all_to_all import probe_exchange
from holdfast.agent.probes.parallel_reference import describe_layout, plan_rounds, probe_seats
from holdfast.agent.probes.probe_team import TeamSeat
from tests.agent.probes import faults
from tests.agent.test_probe_runner import free_port

LIMIT_S = 300.0


def make_seats(world: int, spoiled: int = -1, env: dict[str, str] | None = None) -> list[TeamSeat]:
    return [
        TeamSeat(place=f"seat{rank}", device="cpu", env=(env or {}) if rank == spoiled else {}) for rank in range(world)
    ]


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_every_device_plays_and_every_part_has_several(devices: int) -> None:
    rounds = plan_rounds(devices)
    assert all(len(set(seats)) == len(seats) for seats in rounds)
    assert {seat for seats in rounds for seat in seats} == set(range(devices))
    parts: dict[int, set[int]] = {}
    for seats in rounds:
        for role, seat in enumerate(seats):
            parts.setdefault(parallel_reference._part_of(len(seats), role), set()).add(seat)
    assert all(len(who) >= (2 if devices == 2 else 3) for who in parts.values()), parts


def test_layouts() -> None:
    assert [describe_layout(n, experts=False) for n in (2, 4, 8)] == ["TP2", "TP2 DP2", "TP2 PP2 DP2"]
    assert describe_layout(9, experts=True) == "EP2 PP2 DP2"
    roles = [parallel_reference._roles_of_axis(8, role) for role in range(8)]
    for axis in ("inner", "stage", "replica"):
        assert Counter(role for one in {r[axis] for r in roles} for role in one) == Counter(range(8))
    assert roles[7] == {"inner": (6, 7), "stage": (5, 7), "replica": (3, 7)}


@pytest.mark.parametrize("probe", [parallel_reference, nccl_all_to_all])
def test_a_short_budget_is_kept(probe: Any, tmp_path: Path) -> None:
    (found,) = probe.run(ProbeRequest(level=3, where=tmp_path, left_s=1.0))
    refusal = probe_team.team_refusal(probe_team.find_seats(cores=probe is parallel_reference), 1.0)
    assert found.ok is None and refusal and found.detail == refusal


@pytest.mark.parametrize(("limit_s", "ok"), [(0.05, None), (probe_team.LIMIT_S, False)])
def test_a_team_is_at_fault_only_if_it_had_the_whole_time(
    limit_s: float, ok: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = SimpleNamespace(monotonic=count(step=limit_s).__next__, sleep=lambda _: None)
    monkeypatch.setattr(probe_team, "time", fast)
    (found,) = probe_seats(make_seats(2), small=True, repeats=1, limit_s=limit_s)
    assert (found.ok, found.place) == (ok, "")
    assert "seat0, seat1 " in found.detail and f" {limit_s:g} s" in found.detail


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_device_that_computes_wrongly_is_named(tmp_path: Path) -> None:
    wrong = faults.spoil(tmp_path / "wrong", faults.ALWAYS)
    found = list(probe_seats(make_seats(4, 2, wrong), small=True, repeats=1, limit_s=LIMIT_S))
    assert [(f.ok, f.place) for f in found] == [(False, "seat2")] * 3, found
    sound = list(probe_seats(make_seats(2), small=True, repeats=1, limit_s=LIMIT_S))
    assert all(f.ok and f.digest for f in sound) and len({f.digest for f in sound}) == 3, sound


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bytes_that_change_on_the_way_are_found(tmp_path: Path) -> None:
    wrong = faults.spoil(tmp_path / "wrong", faults.ARRIVES_WRONG)
    found = probe_exchange(make_seats(3, 1, wrong), small=True, limit_s=LIMIT_S)
    assert found.ok is False and found.detail == "bytes changed on the way: seat2 to seat1", found
    assert found.value and len(found.samples) >= 1


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    dies = faults.spoil(tmp_path / "dies", "__import__('os').abort()")
    (found,) = probe_seats(make_seats(2, 1, dies), small=True, repeats=1, limit_s=LIMIT_S)
    assert (found.ok, found.place) == (False, "seat1") and "SIGABRT" in found.detail, found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_together_they_make_the_step_of_one() -> None:
    """Otherwise the collectives would not be those of a training step."""
    words = [sys.executable, "-m", "tests.agent.probes.step_of_one", str(free_port()), "8"]
    team = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(8)]
    ends = [one.communicate(timeout=550)[1] for one in team]
    assert [one.returncode for one in team] == [0] * 8, ends
