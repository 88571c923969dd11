"""Tasks that hang inside the GPU's driver, as the kernel reports them, and those that hang elsewhere."""

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.core.words.knowing import said

CATALOG = catalog_files.load_failures()
HEADS = [
    "INFO: task loader:5403 blocked for more than 120 seconds.",
    "task:nv_open_q       state:D stack:0     pid:1014",
]
LOCK = "mutex_lock+0x1f/0x2f"
WAITS = "uvm_gpu_retain_by_uuid+0x1e/0x40 [nvidia_uvm]"
STARTS = "RmInitAdapter+0xff2/0x1e40 [nvidia]"


def found(*lines: str, kernel: str = "Mar  3 10:00:01 n1 kernel: ") -> Diagnosis:
    return classify_failure(FailureEvidence(lines=said("\n".join(kernel + line for line in lines))), CATALOG)


@pytest.mark.parametrize("head", HEADS)
def test_a_hang_inside_the_driver_is_the_machines(head: str) -> None:
    one = found(head, "Call Trace:", LOCK, WAITS)
    assert (one.klass, one.action, one.node) == ("host_hw_kernel_fault", "evict_and_restart", "n1")


@pytest.mark.parametrize("head", HEADS)
def test_a_hang_while_a_gpu_is_started_is_the_drivers(head: str) -> None:
    one = found(head, "Call Trace:", LOCK, "rmapiLockAcquire+0x294/0x360 [nvidia]", STARTS)
    assert (one.klass, one.action) == ("gpu_driver_gsp_fault", "evict_and_restart")


def test_frames_that_the_kernel_doubts_do_not_count() -> None:
    assert found(HEADS[0], "Call Trace:", LOCK, f"? {WAITS}").action == "run_diagnostics"


def test_a_hang_elsewhere_is_probed() -> None:
    assert found(HEADS[0], "Call Trace:", "nfs4_proc_getattr+0x6c/0x100 [nfsv4]").action == "run_diagnostics"


def test_each_report_has_its_own_frames() -> None:
    elsewhere = found(WAITS, HEADS[0], "Call Trace:", LOCK)
    assert elsewhere.action == "run_diagnostics"
    one = found(HEADS[0], "Call Trace:", LOCK, HEADS[1], "Call Trace:", STARTS)
    assert (one.klass, one.action) == ("gpu_driver_gsp_fault", "evict_and_restart")


def test_what_no_kernel_says_evicts_nobody() -> None:
    assert found(HEADS[0], "Call Trace:", LOCK, WAITS, kernel="").action == "run_diagnostics"
