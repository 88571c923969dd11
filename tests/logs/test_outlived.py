"""What did not end the job: survived, tried again, of an earlier run, or never a fault at all."""

import pytest

from holdfast.core.log_analysis.benign_lines import discount_benign
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis

CATALOG = catalog_files.load_failures()
BOOM = """
Traceback (most recent call last):
  File "/w/train.py", line 3, in f
    y = x / 0
ZeroDivisionError: division by zero
"""
STEPS = "".join(f"step {n} loss 2.5 lr 0.1\n" for n in range(6))
TIMEOUT = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 9 ms"
LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=0, GPU has fallen off the bus."


def judged(text: str) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=parse_lines(list(enumerate(text.split("\n"))), 0)), CATALOG)


def test_what_another_rank_went_on_from_is_no_cause() -> None:
    warned = "3: n1:1:2 [0] NCCL WARN NET/IB : Unable to open device mlx5_9\n"
    steps = "".join(f"0: {line}\n" for line in STEPS.splitlines())
    assert judged(f"{warned}{steps}0: {TIMEOUT}\n").klass == "nccl_timeout"
    assert judged("CUDA out of memory. Tried to allocate 2 GiB\n" + STEPS + BOOM).klass == "python_exception"


def test_what_was_tried_again_is_no_cause() -> None:
    fetch = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out."
    full = BOOM.replace("ZeroDivisionError: division by zero", "OSError: [Errno 28] No space left on device")
    assert judged(f"{fetch}\nRetrying in 1s [Retry 1/5].\n{full}").klass == "disk_full"
    shown = 'Traceback (most recent call last):\n  File "/w/io.py", line 1, in get\n    s.get()\n' + fetch
    assert judged(f"fetch of part 9 failed, retrying\n{shown}\n2026-01-01 10:00:00 part 9 is here\n{BOOM}").klass == (
        "python_exception"
    )
    assert judged(f"Retrying in 4s [Retry 5/5].\n{shown}\n").klass == "hub_network_error"


@pytest.mark.parametrize(
    "banner",
    [
        "##### run 2026-01-02 on n9 #####",
        "=== attempt 2 (n9) ===",
        "SLURM_RESTART_COUNT=1",
        "[ctl] run 2: job resubmitted",
    ],
)
def test_an_earlier_run_is_history(banner: str) -> None:
    assert judged(f"{LOST}\n{banner}\n{BOOM}").klass == "python_exception"
    assert judged(f"{BOOM}{banner}\n{LOST}\n").klass == "gpu_lost_bus"
    assert judged(f"{LOST}\n{banner}\nstarting\n").klass == "gpu_lost_bus", "the new run says nothing of its own"


def test_a_link_that_came_back_sends_no_machine_away() -> None:
    down, up = (
        "kernel: mlx5_core 0000:9a:00.0 ens3f0np0: Link down",
        "kernel: mlx5_core 0000:9a:00.0 ens3f0np0: Link up",
    )
    assert judged(f"{down}\n{TIMEOUT}\n").action == "evict_and_restart"
    assert judged(f"{down}\n{up}\n{TIMEOUT}\n").action == "run_diagnostics"
    assert judged(f"{down}\n{up}\n{BOOM}").klass == "python_exception"


@pytest.mark.parametrize(
    "line",
    [
        "uncorrectable ECC errors (volatile): 0",
        "dcgm-exporter: gpu=2 thermal_violation=0 power_violation=0",
        "# on Xid 79 drain the node",
        "GPU 4 had Xid 94 yesterday, reset done",
        "excluded nodes: n7 (Xid 79)",
        "GPU temperature: 84 C (slowdown threshold 90 C)",
        "thermal throttling detection enabled",
        'DCGM_FI_DEV_XID_ERRORS{gpu="0"} 0',
    ],
)
def test_good_news_of_machines_is_no_news(line: str) -> None:
    assert judged(f"{line}\n{TIMEOUT}\n").klass == "nccl_timeout"
    assert judged(f"{line}\n{BOOM}").klass == "python_exception"


def test_bad_news_is_not_calmed() -> None:
    assert discount_benign(8, "gpu_ecc_memory", "Uncorrectable ECC errors: 2, correctable: 0") == 8
    assert discount_benign(7, "gpu_thermal_power", "temperature above threshold, clock throttled") == 7
    assert discount_benign(9, "gpu_lost_bus", LOST + " recovered: no") == 9
    assert discount_benign(8, "import_dependency", "Error: No module named torch") == 8
