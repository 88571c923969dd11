"""A machine leaves only on the word of a witness."""

import pytest

from holdfast.core.log_analysis.action_choice import EVICT
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.core.words.knowing import CATALOG, ROWS, row, said

OURS = catalog_files.load_failures()
SEEN = FailureCatalog(
    (
        *ROWS,
        row("gpu_lost_bus", "card is gone", 8),
        row("gpu_lost_bus", "monitor: no card", 8, witness=True),
    ),
    tuple(CATALOG.classes.values()),
)


def found(text: str, catalog: FailureCatalog = SEEN) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=said(text)), catalog)


def test_what_a_rank_says_evicts_nobody() -> None:
    one = found("card is gone")
    assert (one.klass, one.action) == ("gpu_lost_bus", "run_diagnostics")
    assert one.explanation == (
        "gpu lost bus: somebody said so first."
        " Only the job's own log says so, not kernel, driver, monitor or scheduler: probe first."
    )
    kernel = found("[123.456789] card is gone")
    assert (kernel.klass, kernel.action) == ("gpu_lost_bus", EVICT)
    assert kernel.explanation == "gpu lost bus: somebody said so first. The kernel says so."


def test_who_has_looked_evicts() -> None:
    assert found("monitor: no card").action == EVICT
    assert found("card is gone\nmonitor: no card").action == EVICT, "a witness to what a rank says"
    assert found("n1 kernel: nothing\nn1 kernel: monitor: no card\ncard is gone").action == EVICT


def test_a_witness_on_another_node_is_none() -> None:
    assert found("[pod/n1/c] card is gone\n[pod/n2/c] monitor: no card").action == "run_diagnostics"
    assert found("[pod/n1/c] card is gone\n[pod/n1/c] monitor: no card").action == EVICT


WITNESSES = [
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "nvidia-smi: Remapping Failure Occurred : Yes",
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-03-11T09:12:44 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
    "mlx5_core 0000:12:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
    "n3:1:2 [0] NCCL WARN NET/IB : mlx5_1:1 Got async event : local catastrophic error",
]
RANKS = [
    "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "n7:4711:4840 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.3<50123> with error 12, opcode 0, len 0",
    "n7:1:2 [3] NCCL WARN NET/IB : mlx5_2:1 Got async event : port error",
    "NET/OFI Request 0x7f completed with error. RC: 103. Error: 4120 (Unresponsive receiver)",
    "n3:8:99 [1] NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_1:1",
    "[n4:88:0] ib_mlx5_log.c:171  UCX  ERROR Transport retry count exceeded on mlx5_0:1/IB",
    "srun: error: eio_handle_mainloop: Abandoning IO 60 secs after job shutdown initiated",
    "trainer: expected 8 GPUs but found 4",
]


@pytest.mark.parametrize("text", WITNESSES)
def test_lines_of_witnesses(text: str) -> None:
    assert found(text, OURS).action == EVICT


@pytest.mark.parametrize("text", RANKS)
def test_lines_of_ranks(text: str) -> None:
    assert found(text, OURS).action == "run_diagnostics"


LIMITS = [
    (
        "n1:1:2 [0] misc/ibvwrap.cc:99 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
        "ib_rdma_error",
    ),
    ("NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory errno 12", "ib_rdma_error"),
    ("UCX  ERROR ibv_reg_mr(address=0x7f, length=4096, access=0xf) failed: Cannot allocate memory", "ib_rdma_error"),
    ("NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable", "ib_rdma_error"),
    ("n1:1:2 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device", "shm_exhausted"),
    ("n1:1:2 [0] NCCL WARN Call to socket failed : Too many open files", "os_resource_limit"),
    ("NCCL WARN pthread_create failed: Resource temporarily unavailable", "os_resource_limit"),
    ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "os_resource_limit"),
    ("RuntimeError: can't start new thread", "os_resource_limit"),
    ("OSError: [Errno 28] inotify watch limit reached: No space left on device", "os_resource_limit"),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_4a1b'", "shm_exhausted"),
    ("RuntimeError: unable to write to file </torch_814_1>: No space left on device (28)", "shm_exhausted"),
    ("OSError: [Errno 28] No space left on device: '/scratch/ckpt/step_9'", "disk_full"),
]


@pytest.mark.parametrize(("text", "klass"), LIMITS)
def test_an_errno_of_limits_is_no_machines_fault(text: str, klass: str) -> None:
    one = found(text, OURS)
    assert (one.klass, one.action) == (klass, "fix_config")


def test_who_guesses_has_not_looked() -> None:
    looked = found("Fabric Manager: NVSwitch fatal error on fid 0", OURS)
    advice = found("This is usually caused by a configuration error in the Fabric Manager or NVSwitches.", OURS)
    assert looked.klass == advice.klass == "nvlink_nvswitch_error"
    assert (looked.action, advice.action) == (EVICT, "run_diagnostics")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("botocore: An error occurred (AccessDenied) when calling the PutObject operation", "fix"),
        ("botocore: An error occurred (InternalError) when calling the PutObject operation", "retry"),
        ("requests.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/x", "fix"),
        ("requests.HTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/x", "wait"),
        ("wandb: ERROR Error while calling W&B API: permission denied (<Response [403]>)", "fix"),
        ("wandb: ERROR Error while calling W&B API: internal database error (<Response [500]>)", "wait"),
        ("mlflow.exceptions.RestException: RESOURCE_DOES_NOT_EXIST: No experiment with id=7 exists", "fix"),
        ("OSError: Tunnel connection failed: 403 Forbidden", "wait"),
    ],
)  # fmt: skip
def test_waiting_does_not_help_where_a_service_refuses(text: str, action: str) -> None:
    one = found(text, OURS)
    assert one.action.startswith(action), one
    assert (one.hint == OURS.classes[one.klass].hint) == (action != "fix"), "no advice to wait"


def test_a_service_that_refuses_is_told_so() -> None:
    one = found("botocore: An error occurred (AccessDenied) when calling the PutObject operation", OURS)
    assert one.explanation == (
        "Object store request failed: somebody said so first. The service answers and refuses: waiting does not help."
    )
    other = found("botocore: An error occurred (InternalError) when calling the PutObject operation", OURS)
    assert other.explanation == "Object store request failed: somebody said so first."
