"""Hints: what is said where nobody says anything plainly."""

import pytest

from holdfast.core.incident.incident_text import advice_clause
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.core.words.knowing import CATALOG, ROWS, row, said

HINTED = FailureCatalog(
    (
        *ROWS,
        row("data_corrupt", r"(?i)\bshard\b.{0,30}\bdamaged", 3, role="hint"),
        row("gpu_lost_bus", r"(?i)\baccelerator\b.{0,30}\bgone", 3, role="hint"),
        row("framework_runtime_error", r"^\w+Error(?::|$)", 6, frames=r"deepspeed/[^\n]*\Z"),
    ),
    tuple(CATALOG.classes.values()),
)
BUILT_IN = catalog_files.load_built_in()
LIBRARY = "/opt/lib/python3.11/site-packages/deepspeed/runtime/engine.py"


def found(text: str, code: int | None = 1) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=said(text), code=code), HINTED)


def raised(what: str, file: str = "/w/train.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 3, in f\n    g()\n{what}'


def test_a_hint_counts_where_nothing_else_is_known() -> None:
    one = found("loader: shard 7 looks damaged\nsrun: error: n1: task 3: Exited with exit code 1")
    assert (one.klass, one.group, one.action) == ("data_corrupt", "data_storage", "fix_config")
    assert one.confidence < 0.6
    assert one.explanation == "data corrupt, perhaps: nobody says so plainly, what rank 3 says hints at it."
    assert found("all is well").klass == "unknown_child_failure"


@pytest.mark.parametrize(
    "plain", ["Connection closed by peer", "CUDA out of memory", "Watchdog caught collective operation timeout"]
)
def test_who_speaks_plainly_outdoes_it(plain: str) -> None:
    assert found(f"shard 7 looks damaged\n{plain}").klass == found(plain).klass != "data_corrupt"


@pytest.mark.parametrize(("code", "klass"), [(-9, "host_oom_kill"), (139, "process_crash_signal"), (1, "data_corrupt")])
def test_so_does_a_signal(code: int, klass: str) -> None:
    assert found("shard 7 looks damaged", code).klass == klass


@pytest.mark.parametrize("file", ["/w/train.py", LIBRARY])
def test_in_the_message_of_what_may_be_anything(file: str) -> None:
    """Its type says nothing, nor does the library that raised it."""
    assert found(raised("ValueError: shard 7 is damaged", file)).klass == "data_corrupt"
    assert found(raised("RuntimeError: shard 7 is damaged", file)).klass == "data_corrupt"
    assert found(raised("ValueError: shard 7 is fine", file)).klass != "data_corrupt"


@pytest.mark.parametrize("kind", ["OSError", "ValueError", "ShardError"])
def test_what_a_worker_raised_says_more_than_who_passes_it_on(kind: str) -> None:
    wrapper = raised(f"{kind}: Caught {kind} in DataLoader worker process 0.\nOriginal {{}}")
    one = found(wrapper.format(raised(f"{kind}: cannot take shard 200, damaged", "/w/shards.py")))
    assert (one.origin, one.evidence[0]) == ("shards.py:3", f"{kind}: cannot take shard 200, damaged")


def test_a_bug_stays_a_bug() -> None:
    assert found(raised("KeyError: 'shard is damaged'")).klass == "python_exception"


@pytest.mark.parametrize("text", ["accelerator 3 is gone", raised("RuntimeError: accelerator 3 is gone")])
def test_no_machine_is_sent_away_on_a_hint(text: str) -> None:
    one = found(text)
    assert (one.klass, one.action) == ("gpu_lost_bus", "run_diagnostics")


def test_names_of_files_and_functions_are_no_words() -> None:
    frames = 'Traceback (most recent call last):\n  File "/w/No space left on device.py", line 3, in f\n    g()\n'
    assert found(frames + "ZeroDivisionError: division by zero").klass == "python_exception"


def test_nothing_ends_with_a_warning() -> None:
    warning = "/opt/lib/x.py:7: UserWarning: No space left on device"
    assert found(f"{warning}\nConnection closed by peer\n{raised('TypeError: no')}").klass == "python_exception"
    assert found(warning).klass == "disk_full"


def test_the_launcher_names_the_rank_of_what_nobody_explains() -> None:
    srun = "srun: error: r1: task 4: Exited with exit code 1\nsrun: launch/slurm: Terminating StepId=12.0\n"
    assert found(srun + "srun: error: r1: tasks 0-3,5-7: Terminated", None).root_rank == 4
    child = "[rank: 2] Child process with PID 8122 terminated with code 1. Forcefully terminating all other processes"
    assert found(child, None).root_rank == 2


def test_advice_is_a_sentence_and_becomes_a_clause() -> None:
    """Words of a diagnosis stand alone; those of gauges and of the kernel's lines follow what was read."""
    sentences = {hint for klass in BUILT_IN.classes.values() if (hint := klass.hint)}
    sentences |= {hint for row in BUILT_IN.rows if (hint := row.hint)}
    assert len(sentences) > 40
    assert [hint for hint in sentences if not hint[0].isupper() or not hint.endswith(".") or ".." in hint] == []
    clauses = {hint for gauge in catalog_files.load_health() if (hint := gauge.hint)}
    clauses |= {hint for line in catalog_files.load_lines().rows if (hint := line.hint)}
    assert len(clauses) > 5 and [hint for hint in clauses if not hint[0].islower() or hint.endswith(".")] == []
    for hint in sentences | clauses:
        clause = advice_clause(hint)
        assert clause.startswith("; ") and clause[2:] == clause[2:].strip() and not clause.endswith(".")
        assert clause[2].islower() or not hint[1].islower(), hint
    assert advice_clause("") == ""
    assert advice_clause("NCCL_DEBUG=INFO tells more.") == "; NCCL_DEBUG=INFO tells more"


@pytest.mark.parametrize(
    ("what", "klass"),
    [
        ("could not convert string to float: 'a'", "python_exception"),
        ("cannot reshape array of size 12 into shape (3,5)", "shape_dtype_device"),
    ],
)
def test_a_value_that_does_not_fit_is_no_damaged_file(what: str, klass: str) -> None:
    """A script may raise these anywhere; only where a reader of files does, the file is damaged."""
    reader = "/lib/numpy/lib/_npyio_impl.py"
    places = [said(raised(f"ValueError: {what}", file)) for file in ("/w/train.py", reader)]
    classes = [classify_failure(FailureEvidence(lines=lines, code=1), BUILT_IN).klass for lines in places]
    assert classes == [klass, "data_corrupt"]
