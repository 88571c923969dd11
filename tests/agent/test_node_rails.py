"""Rails: which interfaces they are, and the pair test over each of them, for real."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.diagnostics.node_rails import find_rails, rail_environment, rails_finding
from holdfast.agent.diagnostics.probe_and_replay_errands import NodeDiagnosis
from holdfast.core.diagnose.rail_assessment import assess_rails
from holdfast.model.code_release import Release
from holdfast.model.node_errands import PairTestHere
from holdfast.model.probe_findings import Finding
from tests.agent.test_probe_runner import free_port, meeting
from tests.fleet.places import TEMPLATE

ELSEWHERE = "192.0.2.1"  # an address for documents, which no host has


def test_rails_are_those_that_are_named() -> None:
    assert find_rails("eth0, 10.0.0.7,") == ("eth0", "10.0.0.7")
    assert rails_finding("eth0,eth1").names == ("eth0", "eth1")


def test_rails_are_physical_interfaces_that_are_up_and_have_an_address(tmp_path: Path) -> None:
    for name, carrier, device in (("lo", "1", True), ("bond7", "1", False), ("holdfast9", "1", True), ("x", "0", True)):
        net = tmp_path / "sys/class/net" / name
        net.mkdir(parents=True)
        (net / "carrier").write_text(carrier)
        if device:
            (net / "device").mkdir()
    assert find_rails("", tmp_path) == ("lo",)  # as if it were physical: this host has it, and it has an address


def test_nccl_is_kept_to_the_interface_and_its_rdma_device(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth1/device/infiniband/mlx5_3").mkdir(parents=True)
    assert rail_environment("eth1", tmp_path) == {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_IB_HCA": "=mlx5_3"}
    assert rail_environment("eth2", tmp_path) == {"NCCL_SOCKET_IFNAME": "=eth2", "NCCL_IB_DISABLE": "1"}
    assert rail_environment("") == {}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_rail_that_does_not_carry_is_named(tmp_path: Path) -> None:
    port = free_port()
    rails = {"n0": ("127.0.0.2", "127.0.0.3"), "n1": ("127.0.0.4", ELSEWHERE)}
    answers = await asyncio.gather(*(run_end(tmp_path, rank, port, rails[f"n{rank}"]) for rank in range(2)))
    told = dict(zip(rails, answers, strict=True))
    assert all(f.ok for node in rails for f in told[node] if f.place == rails[node][0]), told
    assert "link_bandwidth" in {f.probe for f in told["n1"] if f.place == "127.0.0.4"}
    (result,) = assess_rails({("n0", "n1"): told}, {}, rails)
    assert result.rails == {"n0": "127.0.0.3", "n1": ELSEWHERE}, result
    assert f"n0 rail 127.0.0.3 and n1 rail {ELSEWHERE}: " in result.reason


async def run_end(folder: Path, rank: int, port: int, rails: tuple[str, ...]) -> tuple[Finding, ...]:
    def no_ranks(*args: object) -> dict[str, str]:
        raise AssertionError("no rank runs here")

    async def trusted(release: Release) -> str:
        return ""

    diagnosis = NodeDiagnosis(TEMPLATE, folder, no_ranks, lambda release: TEMPLATE.entry, trusted)
    # The store of a job outlives each meeting; here the first end of each serves one of its own.
    at = msgspec.structs.replace(meeting(rank, port, deadline_s=30.0), serve=True)
    done = await diagnosis.run_errand(PairTestHere(id=1, meeting=at, rails=rails))
    assert done.ok, done
    return done.findings
