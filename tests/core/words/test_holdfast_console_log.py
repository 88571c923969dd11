"""A saved console log of holdfast tells the failure that holdfast itself had told."""

import pytest

from holdfast.core.detect.crash import alarm_of
from holdfast.core.incident.incident_text import describe_cause
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.core.log_analysis.log_sieve import WHOLE, sift_log
from holdfast.logs import catalog_files
from holdfast.model.last_words_diagnosis import Diagnosis
from holdfast.model.observation import Exit

CATALOG = catalog_files.load_failures()
ECHO = "[rank 0] RuntimeError: [pair.cc:537] Read error [127.0.0.1]:2966: Connection reset by peer (of a rank that lost"


def console(*incidents: str, ended: bool = True, does: str = "stopping all ranks") -> str:
    """A console log of a run that had these incidents; the last one is still open unless it `ended`."""
    lines = ["holdfast: local fleet: 1 node x 2 ranks on this host", "holdfast: training: first step after 3.5 s"]
    for number, cause in enumerate(incidents, 1):
        lines += ["[rank 0] step 8 loss 3.2", f"holdfast: incident {number}: {cause}; {does}", ECHO]
        if ended or number < len(incidents):
            lines.append(f"holdfast: {cause} at step 8; restarted in place from step 5, lost 0.8 s (stop 0.8)")
            lines.append("[rank 0] step 6 loss 3.3")
    return "\n".join([*lines, "holdfast: done: 1 incident, ETTR 80.0 %; more: holdfast report /runs/r"])


def diagnosis(log: str) -> Diagnosis:
    return classify_failure(FailureEvidence(lines=parse_lines(sift_log(log.encode(), CATALOG), 0)), CATALOG)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("exit", "klass"),
    [
        (Exit(node="n0", generation=1, rank=1, code=-9, at=5.0, starved=False), "unknown_child_failure"),
        (Exit(node="n0", generation=1, rank=1, code=-9, at=5.0, starved=True), "host_oom_kill"),
        (Exit(node="n0", generation=1, rank=1, code=-9, at=5.0, pressed="97 % of memory in use"), "host_oom_kill"),
        (Exit(node="n0", generation=1, rank=1, code=-11, at=5.0), "process_crash_signal"),
        (Exit(node="n0", generation=1, rank=1, code=3, at=5.0), "unknown_child_failure"),
        (
            Exit(node="n0", generation=1, rank=1, code=1, at=5.0, latched="ValueError: bad (3)"),
            "python_exception",
        ),
    ],
)
def test_an_exit_is_what_the_live_judge_says_it_is(exit: Exit, klass: str, ended: bool) -> None:
    alarm = alarm_of(exit, CATALOG)
    assert (alarm.klass or "unknown_child_failure") == klass
    found = diagnosis(console(describe_cause(alarm), ended=ended))
    assert (found.klass, found.root_rank, found.node) == (klass, 1, "n0")
    parked = diagnosis(console(describe_cause(alarm), ended=ended, does="telling 3 ranks to leave the step and stay"))
    assert parked.explanation == found.explanation and parked.root_rank == found.root_rank
    if "sender unknown" in alarm.reason:
        assert "killed by SIGKILL, sender unknown" in found.explanation


@pytest.mark.parametrize(
    ("cause", "klass"),
    [
        ("rank 1 on n1 has stood at step 12 for 4 s: rank 1 is stopped", "process_hang"),
        ("rank 1 on n1 keeps the others waiting, no step seen yet, for 40 s: it stands in f (a.py:3)", "process_hang"),
        ("n1 has been silent for 3 s", "node_failure"),
        ("n1 and n2 have been silent for 3 s", "node_failure"),
        ("n1 has been silent for 3 s, and rank 0 on n0 was killed by SIGKILL (sender unknown)", "node_failure"),
        ("n1 was started anew, and its ranks are gone", "node_failure"),
        ("rank 1 on n1 has a loss of nan since step 7", "nan_divergence"),
    ],
)
def test_other_incidents(cause: str, klass: str) -> None:
    assert diagnosis(console(cause)).klass == klass


def test_of_several_lost_nodes_none_is_the_one() -> None:
    for cause, node in (("n1 has been silent for 3 s", "n1"), ("n1 and n2 have been silent for 3 s", "")):
        found = diagnosis(console(cause))
        assert (found.klass, found.node, found.explanation) == ("node_failure", node, f"Holdfast said: {cause}.")


def test_several_killed_ranks_are_a_kill_of_nobody_in_particular() -> None:
    ranks = "ranks 1-2 on n1 and n2 (which first is not known)"
    found = diagnosis(console(f"{ranks} were killed by SIGKILL (sender unknown)"))
    assert (found.klass, found.root_rank) == ("unknown_child_failure", None)
    assert "killed by SIGKILL, sender unknown" in found.explanation


def test_the_last_incident_counts_and_long_logs_keep_it() -> None:
    error = "rank 0 on n0 exited with code 1 (ValueError: bad batch)"
    kill = "rank 1 on n0 was killed by SIGKILL (sender unknown)"
    assert diagnosis(console(error, kill)).root_rank == 1
    assert diagnosis(console(kill, error)).klass == "python_exception"
    steps = "\n".join(f"[rank 0] step {step} and nothing else" for step in range(WHOLE // 30))
    assert diagnosis(f"{steps}\n{console(error, kill)}\n{steps}").root_rank == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_stopped_rank_is_named_and_nobody_else(ended: bool) -> None:
    found = diagnosis(console("rank 1 on n1 has stood at step 12 for 4 s: rank 1 is stopped", ended=ended))
    assert (found.root_rank, found.node, found.group, found.action) == (1, "n1", "unknown", "retry")
    assert found.explanation == "Holdfast said: rank 1 on n1 has stood at step 12 for 4 s: rank 1 is stopped."
    assert "SIGSTOP" in found.hint and found.went_on is ended


def test_what_holdfast_said_is_not_ascribed_to_a_rank() -> None:
    found = diagnosis(console("rank 1 on n1 has a loss of nan since step 7"))
    assert found.explanation == (
        "Loss or gradients are not finite, or diverged: holdfast said so. 1 line is a mere echo of it."
    )
    error = diagnosis(console("rank 0 on n0 exited with code 1 (ValueError: bad batch)"))
    assert (error.root_rank, error.node) == (0, "n0")
    assert error.explanation == ("Exception in the program: rank 0 on n0 said so first. 1 line is a mere echo of it.")


@pytest.mark.parametrize(
    "cause", ["n1 has been silent for 3 s", "n1 is gone, says its fleet (none of its processes is alive)"]
)
def test_a_lost_node_is_the_one_that_left(cause: str) -> None:
    found = diagnosis(console(cause))
    assert (found.klass, found.node, found.action) == ("node_failure", "n1", "evict_and_restart")
    assert found.explanation == f"Holdfast said: {cause}."


STAND = (
    "holdfast: rank 0 on n0 keeps the others waiting at step 20 for 6 s: rank 0 has not come to barrier 26 of group 0"
)


@pytest.mark.parametrize("long", [False, True])
def test_a_stand_that_ended_is_no_failure(long: bool) -> None:
    steps = "\n".join(f"[rank 0] step {step} and nothing else" for step in range(WHOLE // 30 if long else 2))
    over = f"{steps}\n{STAND}\n{steps}\nholdfast: rank 0 went on after 21 s at step 20\n{steps}"
    assert diagnosis(over).confidence == 0
    assert diagnosis(f"{over}\n{STAND}").klass == "process_hang", "another one, which has not ended"
    error = "rank 0 on n0 exited with code 1 (ValueError: bad batch)"
    assert diagnosis(f"{over}\n{console(error)}").klass == "python_exception"


def test_a_run_that_ended_well_has_no_failure() -> None:
    done = "holdfast: done: 0 incidents, ETTR 4.3 %; more: holdfast report /runs/r"
    assert diagnosis(f"{STAND}\nConnectionError: retrying\n{done}").confidence == 0
    assert diagnosis(f"{done}\nValueError: bad batch").klass == "python_exception", "of what came later"


def test_an_incident_that_no_row_knows_is_told_as_holdfast_told_it() -> None:
    found = diagnosis(console("n1 has lost its colour").replace(ECHO, ""))
    assert (found.confidence, found.explanation) == (0, "Holdfast said: n1 has lost its colour.")


def test_several_hung_ranks_are_all_named() -> None:
    found = diagnosis(
        console("rank 1, 2 on n1, n2 keeps the others waiting, no step seen yet, for 9 s: ranks 1, 2 idle")
    )
    assert (found.root_rank, found.node) == (None, "")
    assert "rank 1, 2 on n1, n2" in found.explanation


@pytest.mark.parametrize(
    "cause",
    [
        "ranks 0-1 on n0, n1 have stood at step 11 for 4 s: different collectives under number 12 of group 0: "
        "broadcast on rank 0, all_reduce on rank 1, which cannot end by itself",
        "rank 2 on n1 keeps the others waiting at step 19 for 5 s: rank 2 in all_gather, 3 others in all_reduce, under "
        "number 20 of group 0, which cannot end by itself",
    ],
)
def test_a_deadlock_is_the_scripts_fault(cause: str) -> None:
    found = diagnosis(console(cause))
    assert (found.klass, found.group, found.action) == ("process_hang", "script", "rollback_or_fix_code")
    assert found.explanation == f"Holdfast said: {cause}."


def test_a_rank_that_left_while_the_others_went_on_is_the_scripts_affair_as_the_report_says() -> None:
    cause = "rank 1 on n1 left after step 24 while the others went on"
    found = diagnosis(f"holdfast: {cause}; restarted in place from step 20, lost 4 steps and 3.9 s (detect 1.9)")
    assert (found.group, found.action, found.root_rank, found.node) == ("script", "rollback_or_fix_code", 1, "n1")
    assert found.explanation == f"Holdfast said: {cause}." and "join()" in found.hint and found.went_on


def test_a_job_that_gave_up_did_not_go_on() -> None:
    error = "rank 0 on n0 exited with code 1 (ValueError: bad batch)"
    assert diagnosis(console(error)).went_on
    assert not diagnosis(console(error).replace("restarted in place from step 5", "gave up: again")).went_on
    assert not diagnosis("ValueError: bad batch").went_on


def test_earlier_incidents_are_mentioned() -> None:
    error = "rank 0 on n0 exited with code 1 (ValueError: bad batch)"
    kill = "rank 1 on n0 was killed by SIGKILL (sender unknown)"
    for ended in (True, False):
        said = diagnosis(console(error, kill, ended=ended)).explanation
        assert said.endswith(f"There was 1 incident before it: {error}.")
        said = diagnosis(console(kill, error, kill, ended=ended)).explanation
        assert said.endswith(f"There were 2 incidents before it, the last one: {error}.")
    assert "before it" not in diagnosis(console(kill)).explanation


def test_what_holdfast_says_otherwise_is_no_failure() -> None:
    assert diagnosis(console()).confidence == 0
