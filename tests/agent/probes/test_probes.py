"""Every probe, for real, on the processor."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.agent.probes import (
    PROBES,
    ProbeRequest,
    choose_probes,
    clock_sanity,
    device_exchange,
    disk,
    shm,
    sustained_load,
    tcp_loopback,
)
from holdfast.agent.probes.exact_gemm import integer_matrix, wrong_rows
from holdfast.agent.probes.heat_reader import GpuHeat
from holdfast.agent.probes.minigpt_model import MiniGptForm, train_step
from holdfast.agent.probes.probe_tools import CPU, float_tensor, integer_tensor, tensor_digest
from holdfast.agent.probes.reference_step import forms_of_size
from holdfast.core.diagnose.probe_assessment import ProbeAssessment, assess_probes
from holdfast.model.probe_findings import Finding

TEAMS = ("group_all_to_all", "parallel_reference")  # a node that shares its machine has no time for these


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)  # twenty runs take a minute on quiet processors, and ten where others work
@pytest.mark.parametrize("times", [2, 20])
def test_clean_runs_find_nothing_and_agree_bit_for_bit(tmp_path: Path, times: int) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.agent.probes.many", str(times), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=880,
    )
    runs = [msgspec.json.decode(line, type=list[Finding]) for line in told.stdout.splitlines()]
    assert len(runs) == times
    assert {f.probe for f in runs[0]} == {probe.name for probe in PROBES}
    cannot = {f.probe for run in runs for f in run if f.ok is None}
    assert cannot == (set() if torch.cuda.is_available() else {"copy_speed", "all_to_all", *TEAMS})
    assert assess_probes({f"n{number}": run for number, run in enumerate(runs)}, {}) == ProbeAssessment()
    assert not list(tmp_path.iterdir())


def asked(where: Path) -> ProbeRequest:
    return ProbeRequest(level=1, where=where, small=True)


def test_probes_of_the_host(tmp_path: Path) -> None:
    for probe in (clock_sanity, disk, shm, tcp_loopback):
        (found,) = probe.run(asked(tmp_path))
        assert found.ok, found


def test_a_disk_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    (found,) = disk.run(asked(tmp_path / "gone"))
    assert found.ok is False and os.strerror(errno.ENOENT) in found.detail


def test_a_disk_that_returns_something_else_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.probes.disk.os.urandom", lambda size: Forgetful(size))
    (found,) = disk.run(asked(tmp_path))
    assert found.ok is False and found.detail.startswith(f"{tmp_path}: ") and "written" in found.detail


class Forgetful(bytes):
    """What was written is never what is read."""

    def __ne__(self, other: object) -> bool:
        return True


def test_a_clock_that_runs_back_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100, 50, *range(200, 400)])
    monkeypatch.setattr("holdfast.agent.probes.clock_sanity.time.monotonic_ns", lambda: next(readings))
    (found,) = clock_sanity.run(asked(tmp_path))
    assert found.ok is False and " 50 ns " in found.detail


def test_a_clock_that_is_read_late_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others want the processor too, much may pass between the readings of two clocks."""
    real, late = time.clock_gettime, iter([True, True, False, True] * 100)

    def read(which: int) -> float:
        found = real(which)
        if next(late):
            time.sleep(0.005)
        return found

    monkeypatch.setattr("holdfast.agent.probes.clock_sanity.time.clock_gettime", read)
    (found,) = clock_sanity.run(asked(tmp_path))
    assert found.ok, found


def test_a_clock_that_goes_wrong_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, began = time.clock_gettime, time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    monkeypatch.setattr(
        "holdfast.agent.probes.clock_sanity.time.clock_gettime", lambda which: real(which) + 0.1 * (real(which) - began)
    )
    (found,) = clock_sanity.run(asked(tmp_path))
    assert found.ok is False and "raw" in found.detail


@pytest.mark.parametrize("probe", [disk, sustained_load])
def test_a_probe_that_comes_to_its_work_late_still_does_some(probe: Any, tmp_path: Path) -> None:
    """Its time is over before it has begun: it may be short, but not broken, which would be the node's fault."""
    (found,) = probe.run(msgspec.structs.replace(asked(tmp_path), small=False, left_s=1e-9))
    assert found.ok and found.value and len(found.samples) == 1


def test_numbers_are_the_same_in_every_version() -> None:
    # These are what goldens are made of: a change here makes all of them worthless.
    assert integer_tensor((4,), CPU, 1).tolist() == integer_tensor((3, 4), CPU, 1).flatten()[:4].tolist()
    assert tensor_digest(integer_tensor((5000,), CPU, 7)) == "ab2007c1e9698a00acacbe9e5bbd591d"
    assert tensor_digest(float_tensor((5000,), CPU, 7)) == "e6fe8386823463f9cd8c007fb5245e3a"
    numbers = float_tensor((10_000,), CPU, 3)
    assert -1 <= numbers.min() < -0.99 and 0.99 < numbers.max() <= 1 and abs(numbers.mean()) < 0.02


@pytest.mark.parametrize(("size", "most", "limit"), [(1024, 8, 1 << 24), (1024, 1, 256)])
def test_integer_products_are_exact_in_their_type(size: int, most: int, limit: int) -> None:
    a, b = integer_matrix(size, most, 1).abs().double(), integer_matrix(size, most, 2).abs().double()
    exact = torch.matmul(integer_matrix(size, most, 1).double(), integer_matrix(size, most, 2).double())
    assert exact.abs().max() < limit
    if most > 1:
        assert torch.matmul(a, b).max() < limit, "no sum on the way may be larger, whatever the order"


@pytest.mark.parametrize("wrong", [1.0, -3.0, float("nan"), float("inf"), 2.0**-16])
def test_one_wrong_number_of_a_product_is_found_with_its_row(wrong: float) -> None:
    a, b = integer_matrix(64, 8, 1), integer_matrix(64, 8, 2)
    product = torch.matmul(a.float(), b.float())
    assert wrong_rows(product, a, b) == []
    product[17, 5] += wrong
    assert wrong_rows(product, a, b) == [17]


@pytest.mark.parametrize("form", forms_of_size(64, 2, 16), ids=str)
def test_the_reference_step_is_a_step_of_training(form: MiniGptForm) -> None:
    first, again = train_step(form, CPU), train_step(form, CPU)
    assert tensor_digest(*first) == tensor_digest(*again)
    assert all(tensor.dtype is form.dtype for tensor in first[1:])
    grads, params = first[1 : 1 + len(first) // 2], first[1 + len(first) // 2 :]
    assert 4 < float(first[0]) < 12 and len(grads) == len(params) > 10
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_a_digest_sees_every_bit() -> None:
    tensor = float_tensor((100,), CPU, 1)
    before = tensor_digest(tensor)
    tensor.view(torch.int32)[50] ^= 1
    assert tensor_digest(tensor) != before
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


def test_all_to_all_among_devices() -> None:
    found = device_exchange.exchange_among([CPU, CPU, CPU], 1 << 16)
    assert found.ok and found.value and len(found.samples) == 20


def test_without_a_gpu_nothing_is_known_of_its_heat() -> None:
    heat = GpuHeat(0)
    heat.read()
    assert heat.describe_gpu(0) == (False, [])


def test_probes_are_chosen_by_level_and_name() -> None:
    assert [p.name for p in choose_probes(1)] == [p.name for p in PROBES if p.level == 1]
    assert [p.name for p in choose_probes(3, only="load,gemm", skip="gemm")] == ["load"]
    assert choose_probes(1, only="load") == []
