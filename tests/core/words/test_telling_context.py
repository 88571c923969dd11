"""What stands around an exception or a line, and changes what it means."""

import pytest

from holdfast.core.log_analysis.benign_lines import discount_benign
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.core.words.knowing import said

CATALOG = catalog_files.load_failures()


def judged(text: str) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=said(text)), CATALOG)


def raised(statement: str, exception: str) -> str:
    return f"""
Traceback (most recent call last):
  File "train.py", line 31, in <module>
    main()
  File "train.py", line 12, in main
    {statement}
{exception}
"""


@pytest.mark.parametrize(
    ("statement", "klass"),
    [
        ('optimizer.load_state_dict(ckpt["optimizer"])', "checkpoint_mismatch"),
        ('step = checkpoint["step"]', "checkpoint_mismatch"),
        ('lr = cfg["optimizer"]', "config_argument"),
        ('lr = batch["optimizer"]', "python_exception"),
    ],
)
def test_the_statement_tells_what_has_no_such_key(statement: str, klass: str) -> None:
    assert judged(raised(statement, "KeyError: 'optimizer'")).klass == klass


def test_a_message_over_several_lines_is_read_as_one() -> None:
    words = """RuntimeError:
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase."""
    assert judged(words).klass == "framework_runtime_error"


def test_a_report_of_a_thread_whose_traceback_is_cut_off_says_nothing() -> None:
    report = (
        "RuntimeError: Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n"
    )
    assert judged(report + '  File "a.py", line 3, in f\n    return module(x)').klass == "unknown_child_failure"
    assert judged("RuntimeError: Caught error in sample 88: cannot decode jpeg").klass == "data_corrupt"


def test_a_cause_inside_a_containers_words_outweighs_them() -> None:
    pyxis = "slurmstepd: error: pyxis: "
    failed = f"{pyxis}child 5 failed with error code: 1\n{pyxis}failed to import docker image\n"
    assert judged(failed).klass == "container_runtime"
    assert judged(f"{failed}{pyxis}    Write failed because No space left on device").klass == "disk_full"
    refused = f"{failed}{pyxis}    curl: (22) The requested URL returned error: 401 Unauthorized"
    assert judged(refused).klass == "container_runtime", "no hub is at fault there"


def test_a_broken_switch_outweighs_the_gpu_behind_it() -> None:
    handle = "Unable to determine the device handle for GPU0000:20:00.0: Unknown Error"
    fatal = "nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 41 LTSSM Fault Up"
    assert judged(handle).action == "evict_and_restart"
    assert judged(f"{handle}\n{fatal}").klass == "nvlink_nvswitch_error"


def test_no_such_device_is_not_a_count_of_none() -> None:
    said = "ibv_modify_qp failed (errno 19) (Ib failure: No such device)"
    assert discount_benign(8.0, "ib_rdma_error", said) == 8.0
    assert discount_benign(8.0, "ib_rdma_error", "port errors: no") < 2


def test_what_the_program_accepts_is_no_cause() -> None:
    differ = "Installed CUDA version 11.8 does not match the version torch was compiled with 11.7"
    accepted = f"{differ} but since the APIs are compatible, accepting this combination"
    killed = "[ERROR] [launch.py:322:sigkill_handler] ['python', 'train.py'] exits with return code = -9"
    assert judged(f"{differ}\n{killed}").klass == "cuda_arch_build"
    assert judged(f"{accepted}\n{killed}").klass == "host_oom_kill"


def test_a_pod_that_is_evicted_has_to_go_whatever_was_scarce() -> None:
    scarce = "The node was low on resource: ephemeral-storage. Threshold quantity: 638834513199, available: 43"
    assert judged(scarce).klass == "disk_full"
    assert judged(f"  Warning  Evicted  12m  kubelet  {scarce}").klass == "preempted_cancelled"


def test_a_node_of_others_is_not_ours() -> None:
    drained = "drained: gres/gpu count reported lower than configured (7 < 8)"
    assert judged(f"slurmctld: node cn-88 {drained}").action == "evict_and_restart"
    assert judged(f"slurmctld: node cn-88 (not in this job) {drained}").action == "run_diagnostics"


def test_a_stack_of_c_code_is_no_hang() -> None:
    assert judged("Current thread 0x00007f1e6cb4d740 (most recent call first):").klass == "process_hang"
    said = "Exception raised from ncclCommWatchdog at /w/ProcessGroupNCCL.cpp:1901 (most recent call first):"
    assert judged(said).klass == "nccl_timeout"
