"""The catalog of last words: complete, true to its samples, of one opinion on each, quick on lines made to hurt."""

import re
import time

import pytest

from holdfast.core.words.rows import Catalog, Row
from holdfast.logs import catalog

CATALOG: Catalog = catalog.load()
SPOKEN = [row for row in CATALOG.rows if row.pattern]
LONG = 100_000  # characters of a line that a row must bear
PATIENCE_S = 30.0  # a pattern that tries every split of such a line takes minutes

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
    "rollback_or_fix_code": "cuda_device_assert shape_dtype_device python_exception nan_divergence",
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


def name(row: Row) -> str:
    return f"{row.klass}-{CATALOG.rows.index(row)}"


def test_every_class_is_there_with_its_group_and_action() -> None:
    wanted = {
        klass: (group, action)
        for group, actions in CONTRACT.items()
        for action, klasses in actions.items()
        for klass in klasses.split()
    }
    assert len(wanted) == 46
    assert {k.klass: (k.group, k.action) for k in CATALOG.classes.values()} == wanted
    assert all(klass.title and klass.hint for klass in CATALOG.classes.values())


def test_no_class_without_rows() -> None:
    assert {row.klass for row in SPOKEN if row.role != "context"} == set(CATALOG.classes)


@pytest.mark.parametrize("row", SPOKEN, ids=name)
def test_a_row_is_whole_and_matches_its_samples(row: Row) -> None:
    assert row.said and row.source
    assert 1 <= row.weight <= 9
    assert all("\n" not in sample and re.search(row.pattern, sample) for sample in row.said)


@pytest.mark.parametrize("row", SPOKEN, ids=name)
def test_the_heaviest_row_of_a_sample_is_of_its_class(row: Row) -> None:
    """Rows that want an exception's type or frames besides are not asked: a sample has none."""
    for sample in row.said:
        others = [o for o in CATALOG.match(sample) if o.klass != row.klass and not o.raised and not o.frames]
        assert not [(o.klass, o.weight, sample) for o in others if o.weight >= row.weight]


def test_exit_codes_speak_once() -> None:
    codes = [row for row in CATALOG.rows if not row.pattern]
    assert all(row.code is not None for row in codes)
    assert len({row.code for row in codes}) == len(codes)
    wanted = {-9: "host_oom_kill", -7: "shm_exhausted", -11: "process_crash_signal", -6: "process_crash_signal"}
    wanted |= {-15: "preempted_cancelled", -1: "preempted_cancelled", -2: "preempted_cancelled"}
    wanted |= {1: "unknown_child_failure"}
    assert wanted.items() <= {row.code: row.klass for row in codes}.items()


def hostile(row: Row) -> list[str]:
    """What the pattern looks for, again and again, and never quite; and much of nothing."""
    almost = [sample[:-3] + " " for sample in row.said[:1]]
    return ["x" + (part * LONG)[:LONG] for part in (*almost, " ", "a.", "Error: ")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", SPOKEN, ids=name)
def test_no_line_takes_long(row: Row) -> None:
    pattern = re.compile(row.pattern)
    for line in hostile(row):
        began = time.perf_counter()
        pattern.search(line)
        assert time.perf_counter() - began < PATIENCE_S


@pytest.mark.parametrize("row", SPOKEN, ids=name)
def test_nothing_is_looked_for_without_end(row: Row) -> None:
    """A dot or a word of any length inside a pattern may run to the end of the line from every start."""
    assert not re.search(r"(?<!\\)\.[*+]|\\S[*+]", row.pattern)
