"""The catalog of last words: complete, true to its samples, of one opinion on each, quick on lines made to hurt."""

import io
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.logs import catalog_files
from holdfast.logs.learned_words import load_learned
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs
from holdfast.model.last_words_diagnosis import Diagnosis

CATALOG: FailureCatalog = catalog_files.load_failures()
SPOKEN = [row for row in CATALOG.rows if row.pattern]
SPOKEN_OF = {klass: [row for row in SPOKEN if row.klass == klass] for klass in CATALOG.classes}

# whose fault it is by default, and what to do: the contract of the diagnosis
INFRASTRUCTURE = {
    "evict_and_restart": "gpu_ecc_memory gpu_lost_bus gpu_driver_gsp_fault nvlink_nvswitch_error gpu_thermal_power "
    "host_hw_kernel_fault node_failure ib_rdma_error",
    "fix_config": "driver_runtime_mismatch nccl_init_config rendezvous_timeout port_conflict dns_ssh_launch "
    "container_runtime shm_exhausted os_resource_limit",
    "run_diagnostics": "peer_connection_lost",
}
FRAMEWORK = {
    "fix_config": "gpu_oom host_oom_kill dataloader_worker_died cuda_arch_build",
    "run_diagnostics": "cuda_illegal_access cuda_launch_or_lib_error process_crash_signal process_hang",
    "rollback_or_fix_code": "torch_compile_error framework_runtime_error",
}
SCRIPT = {
    "rollback_or_fix_code": "cuda_device_assert shape_dtype_device python_exception nan_divergence states_in_doubt",
    "fix_config": "import_dependency config_argument file_not_found permission_denied checkpoint_mismatch",
}
DATA = {"fix_config": "data_corrupt checkpoint_corrupt disk_full", "retry": "storage_io_error object_store_error"}
CONTRACT = {
    "infrastructure": INFRASTRUCTURE,
    "framework": FRAMEWORK,
    "script": SCRIPT,
    "data_storage": DATA,
    "external": {"wait_external": "hub_network_error tracker_service_error"},
    "preemption": {"retry": "preempted_cancelled"},
    "unknown": {"run_diagnostics": "nccl_timeout unknown_child_failure"},
}


by_class = pytest.mark.parametrize("rows", SPOKEN_OF.values(), ids=list(SPOKEN_OF))


def wrong(rows: list[CatalogRow], is_wrong: Callable[[CatalogRow], object]) -> list[str]:
    """The rows of which this is true, as they stand in the catalog."""
    return [f"pattern = '{row.pattern}'" for row in rows if is_wrong(row)]


def test_every_class_is_there_with_its_group_and_action() -> None:
    wanted = {
        klass: (group, action)
        for group, actions in CONTRACT.items()
        for action, klasses in actions.items()
        for klass in klasses.split()
    }
    assert len(wanted) == 47
    assert {k.klass: (k.group, k.action) for k in CATALOG.classes.values()} == wanted
    assert all(klass.title and klass.hint for klass in CATALOG.classes.values())


def test_no_class_without_rows() -> None:
    assert {row.klass for row in SPOKEN if row.role != "context"} == set(CATALOG.classes)


@by_class
def test_a_row_is_whole_and_matches_its_samples(rows: list[CatalogRow]) -> None:
    def is_wrong(row: CatalogRow) -> bool:
        matches = all("\n" not in sample and re.search(row.pattern, sample) for sample in row.all_samples)
        return not (row.all_samples and row.source and 1 <= row.weight <= 9 and matches)

    assert not wrong(rows, is_wrong)


@by_class
def test_the_heaviest_row_of_a_sample_is_of_its_class(rows: list[CatalogRow]) -> None:
    """Rows that want an exception's type or frames besides are not asked: a sample has none."""
    for row, sample in [(one, sample) for one in rows for sample in one.all_samples]:
        others = [o for o in CATALOG.match_line(sample) if o.klass != row.klass and not o.raised and not o.frames]
        others = [o for o in others if not (o.stage and row.stage and o.stage != row.stage)]
        assert not [(o.klass, o.weight, row.pattern, sample) for o in others if o.weight >= row.weight]


def test_exit_codes_speak_once() -> None:
    codes = [row for row in CATALOG.rows if not row.pattern]
    assert all(row.code is not None for row in codes)
    assert len({row.code for row in codes}) == len(codes)
    wanted = {-9: "host_oom_kill", -7: "shm_exhausted", -11: "process_crash_signal", -6: "process_crash_signal"}
    wanted |= {-15: "preempted_cancelled", -1: "preempted_cancelled", -2: "preempted_cancelled"}
    wanted |= {1: "unknown_child_failure"}
    assert wanted.items() <= {row.code: row.klass for row in codes}.items()


def hostile(row: CatalogRow, chars: int) -> list[str]:
    """What the pattern looks for, again and again, and never quite; and much of nothing."""
    almost = [sample[:-3] + " " for sample in row.all_samples[:1]]
    return ["x" + (part * chars)[:chars] for part in (*almost, " ", "a.", "Error: ")]


# A pattern that runs to the end of such a line from every start takes longer; ours take a fifth of it at most.
LENGTHS = [(12_000, 0.3), pytest.param(100_000, 30.0, marks=pytest.mark.slow)]


@by_class
@pytest.mark.parametrize(("chars", "limit_s"), LENGTHS)
def test_no_line_takes_long(rows: list[CatalogRow], chars: int, limit_s: float) -> None:
    def is_wrong(row: CatalogRow) -> bool:
        pattern = re.compile(row.pattern)
        return any(taken_s(pattern, line) > limit_s for line in hostile(row, chars))

    assert not wrong(rows, is_wrong)


def taken_s(pattern: re.Pattern[str], line: str) -> float:
    """Of the processor's time, which does not count what others do meanwhile."""
    began = time.thread_time()
    pattern.search(line)
    return time.thread_time() - began


@by_class
def test_nothing_is_looked_for_without_end(rows: list[CatalogRow]) -> None:
    """A dot or a word of any length inside a pattern may run to the end of the line from every start."""
    assert not wrong(rows, lambda row: re.search(r"(?<!\\)\.[*+]|\\S[*+]", row.pattern))


def judged(*lines: str) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=parse_lines(list(enumerate(lines)), 0, None)), CATALOG)


def test_a_line_that_several_rows_know_is_one_echo() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79 GiB"
    late = (
        "[rank5]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1234, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
    )
    found = judged(oom, late)
    assert (found.klass, found.echoes) == ("gpu_oom", 1) and "1 line is a mere echo" in found.explanation


@pytest.mark.parametrize(
    ("said", "klass"), [("bad sample 17", "python_exception"), ("corrupt sample 17 of a shard", "data_corrupt")]
)
def test_what_a_script_raises_about_a_sample_is_no_file_that_cannot_be_read(said: str, klass: str) -> None:
    where = '  File "/me/train.py", line 3, in <module>'
    assert judged("Traceback (most recent call last):", where, "    check(batch)", f"ValueError: {said}").klass == klass


WRITER = (
    "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
    "RuntimeError: [enforce fail at inline_container.cc:595] . PytorchStreamWriter failed writing file data/137: "
    "file write failed",
)
NAMED = "OSError: [Errno 28] No space left on device: '/scratch/x'"


@pytest.mark.parametrize("line", WRITER)
def test_torchs_words_alone_make_nobody_sure_of_a_full_disk(line: str) -> None:
    """A quota, a limit of file sizes or a writer that was killed look the same."""
    alone, beside = diagnosed(line), diagnosed(f"{NAMED}\n{line}")
    assert (alone.klass, beside.klass) == ("disk_full", "disk_full")
    assert alone.confidence == alone.most_sure == 0.55 and beside.confidence > 0.8 and beside.most_sure == 1.0
    assert alone.title.endswith(", perhaps") and not beside.title.endswith(", perhaps")
    assert alone.hint != beside.hint


@pytest.mark.parametrize("line", WRITER)
def test_nor_do_learned_words(line: str) -> None:
    lines = b"step 9\nsaving checkpoint\n" + line.encode() + b"\nthe disk may be out of space\n"
    log = RankLog(open=lambda: io.BytesIO(lines), rank=0)
    found = diagnose_logs([log], ProcessEnds(), CATALOG, learned=load_learned())
    assert found.klass != "disk_full" or found.confidence <= 0.55


def diagnosed(text: str) -> Diagnosis:
    lines = parse_lines(list(enumerate(text.split("\n"))), 0)
    return classify_failure(FailureEvidence(lines=lines), CATALOG)


BARE_KILLS = (
    "Killed",
    "process killed by signal 9",
    "exitcode  : -9 (pid: 1822)",
    "train.sh: line 12:  4242 Killed                  python train.py",
    "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
    "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' died with <Signals.SIGKILL: 9>.",
    "E1115 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 2 (pid: 1822) of "
    "binary: /usr/bin/python3",
    "mpirun noticed that process rank 3 with PID 0 on node node1 exited on signal 9 (Killed).",
)
KERNEL = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=1822,uid=0"


def with_words(*lines: str, **ends: Any) -> Diagnosis:
    log = RankLog(open=lambda: io.BytesIO("\n".join(lines).encode()), rank=0)
    return diagnose_logs([log], ProcessEnds(**ends), CATALOG, learned=load_learned())


@pytest.mark.parametrize("line", BARE_KILLS)
def test_a_signal_9_alone_makes_nobody_sure_of_its_sender(line: str) -> None:
    for found in (diagnosed(line), with_words("step 9 loss 2.1", "saving checkpoint to storage", line)):
        who = "A process" if found.root_rank is None else f"Rank {found.root_rank}"
        told = "sender unknown; host out of memory is the usual reason, and nothing here shows it."
        assert found.klass == "host_oom_kill" and found.confidence <= found.most_sure <= 0.5
        assert found.explanation == f"{who} was killed by SIGKILL, {told}"
        assert found.hint in {row.hint for row in CATALOG.rows if row.klass == found.klass and row.most_sure < 0.5}


@pytest.mark.parametrize("line", BARE_KILLS)
def test_the_kernels_word_or_pressure_does(line: str) -> None:
    assert with_words(line, KERNEL).confidence > 0.7
    starved = with_words(line, starved=True)
    assert (starved.klass, starved.confidence > 0.5, starved.title) == ("host_oom_kill", True, "Host out of memory")
    pressed = with_words(line, pressed="memory pressure was 43 %")
    assert (pressed.klass, pressed.title) == ("host_oom_kill", "Host out of memory")
    assert with_words(line, starved=False).klass == "unknown_child_failure"
