"""Words of another life of the job, of another stage of it, or of somebody else's subject."""

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.core.words.knowing import said

CATALOG = catalog_files.load_failures()
STEPS = "\n".join(f"step {n} loss 2.{n} lr 1e-4" for n in range(5))
RAISED = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    g()\nTypeError: no'


def found(text: str) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=said(text)), CATALOG)


def test_a_job_that_was_stopped_long_ago_has_failed_in_another_life() -> None:
    stop = "[2025-01-01 10:00:00] slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 10:00:00 DUE TO PREEMPTION ***"
    again = "[2025-01-01 {}] resumed from step 80\n" + RAISED
    assert found(f"{stop}\n{again.format('10:40:00')}").klass == "python_exception"
    assert found(f"{stop}\n{again.format('10:00:20')}").klass == "preempted_cancelled", "what came of the stop"


def test_what_nvml_means_depends_on_the_stage() -> None:
    start = found("Failed to initialize NVML: Unknown Error")
    assert (start.klass, start.action) == ("container_runtime", "fix_config")
    midst = found(f"{STEPS}\nFailed to initialize NVML: Unknown Error")
    assert (midst.klass, midst.action) == ("gpu_lost_bus", "run_diagnostics")


def test_a_path_that_was_right_for_long_is_less_surely_wrong() -> None:
    lost = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    g()\n'
    lost += "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-9'"
    many = "\n".join(f"step {n} loss 2.1 lr 1e-4" for n in range(60))
    assert found(f"{many}\n{lost}").confidence < found(lost).confidence


@pytest.mark.parametrize(
    ("line", "klass"),
    [
        ("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "unknown_child_failure"),
        ("n1:1:2 [0] NCCL WARN ConnectionError: proxy refused", "nccl_init_config"),
        ("wandb: ERROR [Errno 28] No space left on device", "disk_full"),
    ],
)
def test_services_are_not_at_fault_for_what_others_say(line: str, klass: str) -> None:
    assert found(line).klass == klass


def test_words_of_clusters_that_say_nothing_of_a_machine() -> None:
    for line in (
        "Tolerations:                 node.kubernetes.io/not-ready:NoExecute op=Exists for 300s",
        "                             node.kubernetes.io/unreachable:NoExecute op=Exists for 300s",
        "Unable to retrieve NVLink information as all links are inActive",
        "clocksource: timekeeping watchdog on CPU12: Marking clocksource 'tsc' as unstable",
        "[  12.000001] IPv6: ADDRCONF(NETDEV_UP): ib0: link is not ready",
        "blk_update_request: I/O error, dev fd0, sector 0",
    ):
        assert found(f"{line}\n{RAISED}").klass == "python_exception", line
        assert found(line).action != "evict_and_restart", line
