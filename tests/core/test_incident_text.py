"""The one sentence that an incident ends in."""

import msgspec
import pytest

from holdfast.core.incident import cause_name, incident_text
from holdfast.core.snapshots import restore_choice
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Change, Record, Remedy, Verdict

RECORD = Record(
    number=1, generation=1, cause="rank 5 on n2 was killed by SIGKILL", kind="crash", klass="host_oom_kill",
    verdict=Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place"),
    good_step=41, good_at=100.0, alarm_at=100.2, stopped_at=100.5, launched_at=100.6, resumed_at=101.2, resumed_from=40,
)  # fmt: skip


def told(**changes: object) -> str:
    return incident_text.incident_sentence(msgspec.structs.replace(RECORD, **changes))


def told_before_phases(**changes: object) -> str:
    """The sentence up to its phases, which are a list of their own."""
    sentence, _, phases = told(**changes).partition(" (detect ")
    assert phases.endswith(")")
    return sentence


def phases_of(**changes: object) -> list[tuple[str, float]]:
    """Each phase, in their order, in tenths of a second."""
    found = incident_text.phases_s(msgspec.structs.replace(RECORD, **changes))
    return [(name, round(seconds, 1)) for name, seconds in found.items()]


KILLED = "rank 5 on n2 was killed by SIGKILL"
BEFORE_START_UP = [("detect", 0.2), ("stop", 0.3), ("launch", 0.1)]


def test_a_restart_in_place() -> None:
    assert told() == (
        "rank 5 on n2 was killed by SIGKILL at step 41; restarted in place from step 40, lost 1 step and 1.2 s"
        " (detect 0.2, stop 0.3, launch 0.1, first step 0.6)"
    )


def test_an_eviction() -> None:
    evict = Verdict(remedy=Remedy.EVICT, reason="evicted", nodes=("n2",))
    assert told_before_phases(verdict=evict, evicted=("n2",), admitted=("n9",)) == (
        f"{KILLED} at step 41; evicted n2, admitted n9 and resumed from step 40, lost 1 step and 1.2 s"
    )
    assert told_before_phases(verdict=evict, evicted=("n2",)) == (
        f"{KILLED} at step 41; evicted n2 and resumed on fewer nodes from step 40, lost 1 step and 1.2 s"
    )


def test_what_was_evicted_on_the_way_is_told_though_the_last_verdict_was_a_restart() -> None:
    assert told_before_phases(evicted=("n2",), admitted=("n9",), failures=3) == (
        f"{KILLED} at step 41, then failed 2 times more before the next step;"
        " evicted n2, admitted n9 and resumed from step 40, lost 1 step and 1.2 s"
    )
    again = msgspec.structs.replace(RECORD, failures=2)
    assert incident_text.describe_again(again) == ", then failed once more before the next step"


def test_another_failure_at_the_last_is_named() -> None:
    last = "rank 1 on n1 exited with code 1 (StateError: call restore() first)"
    gave_up = Verdict(remedy=Remedy.GIVE_UP, reason="the script failed the same way again without progress")
    assert told(failures=3, last_cause=last, verdict=gave_up) == (
        f"{KILLED} at step 41, then failed 2 times more before the next step, the last time because {last};"
        f" gave up: {gave_up.reason}"
    )


def test_a_standby_that_joins_at_a_restart_is_told() -> None:
    assert told_before_phases(admitted=("n9",)) == (
        f"{KILLED} at step 41; restarted in place with n9 admitted from step 40, lost 1 step and 1.2 s"
    )


def test_where_nobody_knows_what_the_script_went_on_from_it_says_so() -> None:
    unknown = "whether the script resumed is not known"
    assert told_before_phases(resumed_from=None) == (
        f"{KILLED} at step 41; restarted in place ({unknown}: at most 41 steps redone), lost 1.2 s"
    )
    assert told_before_phases(resumed_from=None, good_step=1) == (
        f"{KILLED} at step 1; restarted in place ({unknown}: at most 1 step redone), lost 1.2 s"
    )
    assert told_before_phases(resumed_from=None, counted=True) == (
        f"{KILLED} 41 steps after its launch; restarted in place ({unknown}), lost 1.2 s"
    )
    assert told_before_phases(resumed_from=None, evicted=("n2",)) == (
        f"{KILLED} at step 41; evicted n2 and restarted on fewer nodes ({unknown}: at most 41 steps redone), lost 1.2 s"
    )


def test_a_job_whose_ranks_held_no_step_in_common_is_told_why_it_went_back() -> None:
    why = "as no step was held for every rank (rank 0: step 60, rank 5: step 41)"
    apart = "rank 0: step 60, rank 5: step 41"
    assert told_before_phases(resumed_from=0, apart=apart) == (
        f"{KILLED} at step 41; restarted in place, from step 0, {why}: lost 41 steps and 1.2 s"
    )
    assert told_before_phases(resumed_from=30, apart=apart) == (
        f"{KILLED} at step 41; restarted in place from step 30, {why}, lost 11 steps and 1.2 s"
    )


def test_a_script_that_starts_from_the_beginning_is_not_called_resumed() -> None:
    lost = "but the script started from step 0: lost 41 steps and 1.2 s"
    assert told_before_phases(resumed_from=0) == f"{KILLED} at step 41; restarted in place, {lost}"
    assert told_before_phases(resumed_from=0, evicted=("n2",), admitted=("n9",)) == (
        f"{KILLED} at step 41; evicted n2, admitted n9 and restarted, {lost}"
    )
    before = msgspec.structs.replace(RECORD, resumed_from=-1)
    assert incident_text.is_fresh_start(before) and incident_text.lost_steps(before) == 42, "steps may count from 0"
    assert told_before_phases(resumed_from=0, counted=True) == (
        f"{KILLED} 41 steps after its launch; restarted in place, but the script started from step 0:"
        " lost all steps and 1.2 s"
    )
    nothing = msgspec.structs.replace(RECORD, resumed_from=0, good_step=0)
    assert not incident_text.is_fresh_start(nothing) and incident_text.lost_steps(nothing) == 0
    assert told_before_phases(resumed_from=0, good_step=0) == (
        f"{KILLED} at step 0; restarted in place from step 0, lost 0 steps and 1.2 s"
    )


def test_before_the_first_step_nothing_can_be_redone() -> None:
    text = told_before_phases(good_step=-1, resumed_from=None)
    assert text == f"{KILLED} before any step was seen; restarted in place, lost 1.2 s"


def test_a_loss_has_one_step() -> None:
    cause = "rank 0 on n0 has a loss of nan since step 50"
    assert told_before_phases(cause=cause, kind="loss", good_step=49) == (
        f"{cause} (last good step: 49); restarted in place from step 40, lost 9 steps and 1.2 s"
    )


def test_a_bad_state_that_the_script_restored_is_told() -> None:
    cause = "rank 0 on n0 has a loss of nan since step 29"
    assert told_before_phases(cause=cause, kind="loss", good_step=28, made_step=31, resumed_from=30) == (
        f"{cause} (last good step: 28); restarted in place from step 30, a state that the script saved after its last "
        "good step (remove that checkpoint, or it fails again), lost 1 step and 1.2 s"
    )


def test_failures_are_counted_besides_incidents() -> None:
    again = msgspec.structs.replace(RECORD, failures=4)
    assert incident_text.count_failures([again, RECORD]) == 5


def test_giving_up_says_why() -> None:
    text = told(verdict=Verdict(remedy=Remedy.GIVE_UP, reason="--max-restarts 1 used up", code=137))
    assert text == "rank 5 on n2 was killed by SIGKILL at step 41; gave up: --max-restarts 1 used up"


def test_nothing_negative_is_redone() -> None:
    assert incident_text.lost_steps(msgspec.structs.replace(RECORD, resumed_from=45)) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "exited with code 1"), (-9, "was killed by SIGKILL"), (-35, "was killed by signal 35")],
)
def test_endings(code: int, words: str) -> None:
    assert incident_text.describe_exit(code) == words


def test_causes() -> None:
    crash = Alarm(kind=Kind.CRASH, at=0.0, suspects=("n1",), ranks=(2, 3), reason="failed")
    assert incident_text.describe_cause(crash) == "ranks 2-3 on n1 failed"
    assert incident_text.describe_cause(msgspec.structs.replace(crash, ranks=())) == "n1 failed"
    assert (
        incident_text.describe_cause(msgspec.structs.replace(crash, kind=Kind.SILENCE, suspects=("n1", "n2")))
        == "n1 and n2 failed"
    )


def test_group_set_up_and_restore_are_told_where_ranks_told_them() -> None:
    assert phases_of(grouped_at=100.8, restored_at=101.1) == [
        *BEFORE_START_UP,
        ("imports and groups", 0.2),
        ("restore", 0.3),
        ("first step", 0.1),
    ]
    assert phases_of(restored_at=101.1) == [*BEFORE_START_UP, ("imports and restore", 0.5), ("first step", 0.1)]
    # What a script does between its groups and its restore is no restore.
    assert phases_of(grouped_at=100.8, restoring_at=101.0, restored_at=101.1) == [
        *BEFORE_START_UP,
        ("imports and groups", 0.2),
        ("set-up", 0.2),
        ("restore", 0.1),
        ("first step", 0.1),
    ]
    assert phases_of(restoring_at=101.0, restored_at=101.1) == [
        *BEFORE_START_UP,
        ("imports and set-up", 0.4),
        ("restore", 0.1),
        ("first step", 0.1),
    ]
    # Ranks may have been there before the news that all were launched, and no phase is negative for it.
    assert phases_of(grouped_at=100.55, restored_at=101.1) == [
        *BEFORE_START_UP,
        ("imports and groups", 0.0),
        ("restore", 0.5),
        ("first step", 0.1),
    ]


def test_set_up_ends_where_a_rank_was_last_seen_at_it() -> None:
    """What comes after the groups, or after the restore, is not all of it the first step."""
    assert phases_of(grouped_at=100.8, set_up_at=101.1) == [
        *BEFORE_START_UP,
        ("imports and groups", 0.2),
        ("set-up", 0.3),
        ("first step", 0.1),
    ]
    assert phases_of(set_up_at=101.1) == [*BEFORE_START_UP, ("imports and set-up", 0.5), ("first step", 0.1)]
    assert phases_of(grouped_at=100.8, restoring_at=100.9, restored_at=101.0, set_up_at=101.1) == [
        *BEFORE_START_UP,
        ("imports and groups", 0.2),
        ("set-up", 0.2),
        ("restore", 0.1),
        ("first step", 0.1),
    ]
    assert phases_of(grouped_at=100.8, restored_at=101.1, set_up_at=100.7) == [
        *BEFORE_START_UP,
        ("imports and groups", 0.2),
        ("restore", 0.3),
        ("first step", 0.1),
    ]


CHANGE = Change(
    why="release 2", generation=1, release=2, good_step=41, good_at=100.0, asked_at=100.1, stopped_at=100.4,
    launched_at=110.5, resumed_at=111.0, resumed_from=41, held_s=10.0, grouped_at=110.6, restored_at=110.8,
)  # fmt: skip


def test_phases_of_a_planned_restart_add_up() -> None:
    assert incident_text.describe_phases(CHANGE) == (
        "last step 0.1, stop 0.3, hold 10.0, launch 0.1, imports and groups 0.1, restore 0.2, first step 0.2"
    )
    assert sum(incident_text.phases_s(CHANGE).values()) == pytest.approx(11.0)
    asked_before = msgspec.structs.replace(CHANGE, asked_at=99.0, held_s=0.0, launched_at=100.5)
    assert list(incident_text.phases_s(asked_before)) == [
        "stop",
        "launch",
        "imports and groups",
        "restore",
        "first step",
    ]
    assert sum(incident_text.phases_s(asked_before).values()) == pytest.approx(11.0)


def test_steps_in_doubt_were_made_and_are_lost_too() -> None:
    record = msgspec.structs.replace(RECORD, kind="loss", good_step=40, made_step=42, resumed_from=40)
    assert incident_text.lost_steps(record) == 2
    assert incident_text.describe_step(record) == " (last good step: 40)"


def test_the_script_is_not_blamed_for_states_that_were_left_out() -> None:
    record = msgspec.structs.replace(RECORD, kind="loss", good_step=40, made_step=42, resumed_from=0, restored_at=100.9)
    assert incident_text.is_fresh_start(record) and incident_text.lost_steps(record) == 42
    assert incident_text.why_from_zero(record) == "from step 0, as later states are in doubt"
    own = msgspec.structs.replace(record, restored_at=0.0)  # nobody but the script restores its state
    assert incident_text.is_fresh_start(own) and incident_text.lost_steps(own) == 42
    assert incident_text.why_from_zero(own) == "but the script started from step 0"


def test_phases_of_all_rounds_are_told_and_add_up() -> None:
    earlier = {"stop": 0.1, "launch": 0.5, "failed start": 0.4}
    record = msgspec.structs.replace(
        RECORD, failures=2, again_at=101.2, stopped_at=101.4, launched_at=101.5, resumed_at=102.0, earlier_s=earlier
    )
    told_of = "detect 0.2, stop 0.3, launch 0.6, failed start 0.4, first step 0.5"
    assert incident_text.describe_phases(record) == told_of
    assert sum(incident_text.phases_s(record).values()) == pytest.approx(2.0)


def test_ranks_with_the_same_bad_loss_are_named_together() -> None:
    bad = Alarm(kind=Kind.LOSS, at=1.0, suspects=("n0", "n1"), ranks=(0, 1), reason="has a loss of nan since step 30")
    assert incident_text.describe_cause(bad) == "ranks 0-1 on n0 and n1 have a loss of nan since step 30"
    many = msgspec.structs.replace(bad, ranks=tuple(range(64)))
    assert incident_text.describe_cause(many).startswith("ranks 0-63 on n0 and n1 have")


def test_costs_are_booked_by_what_is_known() -> None:
    killed = Alarm(kind=Kind.CRASH, at=1.0, suspects=("n0",), ranks=(0,), code=-9, reason="was killed by SIGKILL")
    assert cause_name.cause_label(killed) == "SIGKILL of unknown sender"
    words = msgspec.structs.replace(killed, code=1, klass="host_oom_kill", confidence=0.59, title="Host out of memory")
    assert cause_name.cause_label(words) == "SIGKILL of unknown sender", "a child was killed, and nobody says by whom"
    counted = msgspec.structs.replace(words, code=-9, confidence=0.8)
    assert cause_name.cause_label(counted) == "host out of memory"
    scarce = msgspec.structs.replace(words, code=-9, confidence=0.6, pressed="memory pressure was 43 %")
    assert cause_name.cause_label(scarce) == "probable OOM kill"
    assert cause_name.cause_label(msgspec.structs.replace(killed, code=-11)) == "killed by SIGSEGV"
    guessed = msgspec.structs.replace(words, klass="cuda_error", title="CUDA error, of the driver", confidence=0.55)
    assert cause_name.cause_label(guessed) == "CUDA error (55% sure)"
    assert cause_name.cause_label(msgspec.structs.replace(guessed, confidence=0.7)) == "CUDA error"
    assert cause_name.record_label(RECORD) == "host oom kill", "as journals from before have it"
    assert cause_name.record_label(msgspec.structs.replace(RECORD, klass="")) == "crash"


def test_a_step_is_named_once() -> None:
    cause = "rank 1 on n0 has stood at step 41 for 3 s: rank 1 is stopped"
    record = msgspec.structs.replace(RECORD, kind="hang", cause=cause)
    assert incident_text.describe_step(record) == ""
    assert told(kind="hang", cause=cause).startswith(f"{cause}; ")
    record = msgspec.structs.replace(record, cause=cause.replace("41", "4"))
    assert incident_text.describe_step(record) == " at step 41"


def test_a_rank_that_left_names_its_step_and_the_report_adds_none() -> None:
    for cause in ("rank 1 on n0 left after step 24", "rank 1 on n0 left before any step was seen"):
        record = msgspec.structs.replace(RECORD, cause=f"{cause} while the others went on", good_step=24)
        assert incident_text.describe_step(record) == ""
        assert incident_text.incident_sentence(record).startswith(f"{record.cause}; restarted")


def test_steps_counted_since_the_launch_are_no_numbers() -> None:
    assert incident_text.describe_place(26, counted=True) == "26 steps after its launch"
    cause = "rank 1 on n0 has stood 26 steps after its launch for 3 s: rank 1 is stopped"
    assert told(kind="hang", cause=cause, counted=True, good_step=26).startswith(f"{cause}; restarted")


def test_a_script_is_not_blamed_for_copies_that_are_behind() -> None:
    assert restore_choice.advise_apart("rank 0: step 639, rank 1: step 493") == (
        "no state in memory can be restored, as no step is held for every rank (rank 0: step 639, rank 1: step 493);"
        " either copies on peers were behind, or ranks do not make and save() the same steps together:"
        " then have each step wait for all, as DDP's does"
    )
