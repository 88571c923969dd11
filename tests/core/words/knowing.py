"""A catalog of a few rows, so that these tests hold the reading and not the knowledge."""

from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog, FailureClass
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import LogLine, parse_lines
from holdfast.model.last_words_diagnosis import Diagnosis

_CLASSES = {
    "gpu_lost_bus": ("infrastructure", "evict_and_restart"),
    "gpu_oom": ("framework", "fix_config"),
    "peer_connection_lost": ("infrastructure", "run_diagnostics"),
    "nccl_timeout": ("unknown", "run_diagnostics"),
    "python_exception": ("script", "rollback_or_fix_code"),
    "data_corrupt": ("data_storage", "fix_config"),
    "disk_full": ("data_storage", "fix_config"),
    "hub_network_error": ("external", "wait_external"),
    "host_oom_kill": ("framework", "fix_config"),
    "shm_exhausted": ("infrastructure", "fix_config"),
    "process_crash_signal": ("framework", "run_diagnostics"),
    "preempted_cancelled": ("preemption", "retry"),
    "framework_runtime_error": ("framework", "rollback_or_fix_code"),
    "unknown_child_failure": ("unknown", "run_diagnostics"),
}


def row(klass: str, pattern: str, weight: int = 5, **more: object) -> CatalogRow:
    return CatalogRow(klass=klass, pattern=pattern, weight=weight, source="ours", **more)  # type: ignore[arg-type]


def coded(klass: str, code: int) -> CatalogRow:
    return CatalogRow(klass=klass, code=code, source="ours", weight=2)


ROWS = (
    row("gpu_lost_bus", r"Xid \([^)]*\): 79\b|fallen off the bus", 9),
    row("gpu_oom", r"CUDA out of memory", 7),
    row("peer_connection_lost", r"Connection (closed|reset) by (?:remote )?peer", 4, role="echo"),
    row("nccl_timeout", r"Watchdog caught collective operation timeout", 4, role="echo"),
    row("preempted_cancelled", r"Sending process \d+ closing signal SIGTERM", 1, role="echo"),
    row("python_exception", r"^(?:TypeError|KeyError|ZeroDivisionError|ValueError|AttributeError)\b", 5),
    row("data_corrupt", r"cannot identify image file", 6, raised="UnidentifiedImageError"),
    row("disk_full", r"No space left on device", 7),
    row("hub_network_error", r"couldn't connect to 'https://", 7),
    row("host_oom_kill", r"Out of memory: Killed process \d+", 9),
    row("preempted_cancelled", r"DUE TO (?:TIME LIMIT|PREEMPTION)", 8),
    coded("host_oom_kill", -9),
    coded("shm_exhausted", -7),
    coded("process_crash_signal", -11),
    coded("process_crash_signal", -6),
    coded("preempted_cancelled", -15),
)
CATALOG = FailureCatalog(
    ROWS, tuple(FailureClass(klass=k, group=g, action=a, title=k.replace("_", " ")) for k, (g, a) in _CLASSES.items())
)


def said(text: str, source: int = 0, rank: int | None = None) -> list[LogLine]:
    return parse_lines(list(enumerate(text.strip("\n").split("\n"))), source, rank)


def judged(*texts: str, code: int | None = None, ranked: bool = False) -> Diagnosis:
    """What is made of these logs; `ranked`: each is one rank's."""
    lines = [one for n, text in enumerate(texts) for one in said(text, n, n if ranked else None)]
    return classify_failure(FailureEvidence(lines=lines, code=code), CATALOG)
