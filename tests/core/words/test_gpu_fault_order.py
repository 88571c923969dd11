"""Xids of one GPU in their order, and those of several at one second."""

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.core.words.knowing import said

CATALOG = catalog_files.load_failures()
TEXT = {
    13: "pid=7, name=python, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 0): Out Of Range Address",
    31: "pid=7, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7f4b_6a000000",
    45: "pid=7, name=python, Ch 00000010",
    62: "2080(3a40) 00000000 00000000",
    94: "pid=7, name=python, Ch 00000008, Contained ECC error",
    109: "pid=7, name=python, Ch 00000010, errorString CTX SWITCH TIMEOUT",
    119: "pid=7, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
    154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    79: "GPU has fallen off the bus.",
}


def xid(number: int, second: int, gpu: str = "3b") -> str:
    return f"Mar  3 10:00:{second:02d} n1 kernel: NVRM: Xid (PCI:0000:{gpu}:00): {number}, {TEXT[number]}"


def found(*lines: str) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=said("\n".join(lines))), CATALOG)


@pytest.mark.parametrize("first", [13, 31])
@pytest.mark.parametrize("then", [62, 94, 109, 119, 154])
def test_a_programs_fault_outweighs_what_follows_it(first: int, then: int) -> None:
    one = found(xid(first, 1), xid(45, 2), xid(then, 4))
    assert (one.klass, one.action) == ("cuda_illegal_access", "run_diagnostics")


@pytest.mark.parametrize("then", [62, 94, 119])
def test_it_explains_neither_other_gpus_nor_later_faults(then: int) -> None:
    assert found(xid(31, 1, "86"), xid(then, 4)).action == "evict_and_restart"
    late = xid(then, 4).replace("10:00", "11:30")
    assert found(xid(31, 1), late).action == "evict_and_restart"
    assert found(xid(then, 1), xid(31, 4)).action == "evict_and_restart", "the first fault is the driver's"


def test_nothing_of_a_programs_takes_a_gpu_off_the_bus() -> None:
    assert found(xid(31, 1), xid(79, 2)).klass == "gpu_lost_bus"


def test_the_clock_of_the_kernel_counts_too() -> None:
    fault, reset = (f"NVRM: Xid (PCI:0000:3b:00): {n}, {TEXT[n]}" for n in (31, 154))
    assert found(f"[ 100.000001] {fault}", f"[ 101.000001] {reset}").klass == "cuda_illegal_access"
    assert found(f"[ 100.000001] {fault}", f"[ 9100.000001] {reset}").klass == "gpu_driver_gsp_fault"
    assert found(f"[  +0.000011] {fault}", f"[  +1.200001] {reset}").klass == "cuda_illegal_access"


def test_gpus_that_fail_at_one_second_share_a_link() -> None:
    link = "Mar  3 10:00:01 n1 kernel: nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"
    assert found(xid(94, 1, "3a"), xid(94, 1, "5d"), link).klass == "nvlink_nvswitch_error"
    assert found(xid(94, 1, "3a"), xid(94, 1, "3a")).klass == "gpu_ecc_memory"
    assert found(xid(94, 1, "3a"), link.replace("10:00:01", "10:20:01")).klass == "gpu_ecc_memory"


def bus(second: int, severity: str = "Uncorrected (Fatal)") -> str:
    return f"Mar  3 10:00:{second:02d} n1 kernel: pcieport 0000:00:02.0: PCIe Bus Error: severity={severity}"


def test_a_lost_gpu_outweighs_what_the_bus_says_of_it() -> None:
    assert found(bus(1), xid(79, 3)).klass == "gpu_lost_bus"
    assert found(bus(1), xid(79, 41)).klass == "host_hw_kernel_fault", "too long before"
    assert found(bus(1)).klass == "host_hw_kernel_fault"
