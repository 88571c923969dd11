"""What is counted of steps made again, of ranks that have come to their end, and of time without a controller."""

from holdfast.core.incident.incident_text import lost_steps
from holdfast.core.record.job_account import NO_CONTROLLER, START_AND_END, TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import Ledger
from tests.core.test_ledger import CRASH, START, account, entries, spans


def test_steps_are_redone_when_ranks_have_made_them_again_and_not_before() -> None:
    """A script that starts from step 0 has lost 21 steps, but ranks have only made as many again as they say."""
    started = (*START, *CRASH, "36 progress 1 at 35")
    assert account(*started).redone_steps(incident=1) == 1
    again = (*started, "40 progress 8 at 39 from 1 since 35")
    assert account(*again).redone_steps(incident=1) == 8
    assert [(ran.steps, ran.redone) for ran in account(*again).ran] == [(21, 8)]
    late = account(*again, "41 alarm crash n0 rank 0 code -9", "41 progress 9 at 40.5 from 1 since 35")
    assert late.redone_steps(incident=1) == 9, "a step that is told while ranks are stopped was made before"
    further = (*again, "60 progress 31 at 59 from 1 since 35")
    assert account(*further).redone_steps(incident=1) == 21
    assert [(ran.steps, ran.redone) for ran in account(*further).ran] == [(31, 21)]
    assert report_of(account(*further)).restarts[0].redone == 21


def test_steps_that_are_not_in_the_journal_yet_may_be_redone_too() -> None:
    ledger = Ledger()
    for entry in entries(*START, *CRASH, "36 progress 1 at 35"):
        ledger.add(entry)
    assert [ledger.count_redone(step) for step in (1, 8, 21, 30)] == [1, 8, 21, 21]


def test_steps_of_which_nobody_told_were_made_if_the_job_goes_on_after_them() -> None:
    """A node is lost with all that it had to tell, but its peer holds the state of a later step."""
    further = account(*START, *CRASH, "36 progress 26 at 35", "46 progress 30 at 45 from 26 since 35")
    assert [(ran.steps, ran.redone) for ran in further.ran] == [(30, 0)]
    begun = account(*START[:-1], "6 progress 1001 at 5")
    assert [ran.steps for ran in begun.ran] == [1], "an earlier job made what came before"


def test_each_failure_has_as_many_steps_redone_as_it_said_were_lost() -> None:
    """The second comes amid steps that are made again, and has lost only what was made since the first."""
    second = ("40 alarm crash n0 rank 0 code -9", "41 outcome 5 ok", "43 outcome 6 ok", "46 progress 1 at 45")
    first = (*START, *CRASH, "36 progress 1 at 35", "40 progress 8 at 39 from 1 since 35")
    amid = account(*first, *second, "52 progress 7 at 51 from 1 since 45")
    assert [amid.redone_steps(incident=number) for number in (1, 2)] == [8, 7]
    found = account(*first, *second, "70 progress 25 at 69 from 1 since 45")
    assert [lost_steps(record) for record in found.incidents] == [21, 8]
    assert all(f" {lost_steps(record)} steps " in record.sentence for record in found.incidents)
    assert [restart.redone for restart in report_of(found).restarts] == [21, 8]
    assert [(ran.steps, ran.redone) for ran in found.ran] == [(25, 29)]
    held = account(
        *first, "40 order hold", "41 outcome 5 ok", "42 order resume", "43 outcome 6 ok", "46 progress 5 at 45"
    )
    assert [held.redone_steps(incident=1), held.redone_steps(change=1)] == [8, 1]


def test_ranks_without_a_step_in_common_are_in_the_record_of_what_restarted_them() -> None:
    apart = "rank 0: step 21, rank 1: step 9"
    launched = f'outcome 4 ok apart "{apart}"'
    [record] = account(*START, *CRASH[:-1], f"33 {launched}", "36 progress 1 at 35").incidents
    assert (record.resumed_from, record.apart) == (0, apart) and f"({apart})" in record.sentence
    hold = ("40 order hold", "41 outcome 3 ok", "42 order resume", f"43 {launched}", "46 progress 1 at 45")
    [change] = account(*START, "36 progress 5 at 35", *hold).changes
    assert (change.resumed_from, change.apart, change.held_s) == (0, apart, 1.0)
    assert change.sentence == (
        f"held by somebody: restarted, held for 1.0 s, from step 0, as no step was held for every rank ({apart}):"
        " lost 5 steps and 9.0 s"
    )


def test_a_step_that_is_told_while_nodes_are_probed_was_lost_with_the_others() -> None:
    failed = ("30 progress 21 at 25 from 1 since 5", "30 alarm loss n0 step 19", "31 outcome 3 ok", "33 outcome 4 ok")
    again = ("36 progress 19 at 35", "40 progress 21 at 39 from 19 since 35", "40 alarm loss n0 step 19")
    probed = ("41 outcome 5 ok", "42 progress 23 at 40 from 19 since 35", "60 outcome 6 ok", "61 outcome 7 ok")
    back = ("65 progress 11 at 64", "99 progress 31 at 98 from 11 since 64")
    found = account("0 begin nnodes 1 probes", *START[1:], *failed, *again, *probed, *back)
    assert [(record.good_step, lost_steps(record)) for record in found.incidents] == [(18, 3), (18, 13)]
    assert found.spent_s(TimeUse.PROBE) == 19.0
    assert [restart.redone for restart in report_of(found).restarts] == [3, 13]


def test_what_ranks_do_after_they_left_their_process_group_is_no_training() -> None:
    left = (*START, "15 progress 11 at 14 from 1 since 5", "18 progress 12 at 16 from 1 since 5 parted")
    found = account(*left, now=60.0)
    assert spans(found)[-2:] == [("train", 5, 16, 0), ("end", 16, 60, 0)]
    assert found.lost_s() == {START_AND_END: 5.0 + 44.0}
    ended = account(*left, "60 ended n0", "61 outcome 3 ok")
    assert spans(ended)[-3:] == [("train", 5, 16, 0), ("end", 16, 60, 0), ("stop", 60, 61, 0)]
    again = account(*left, "41 progress 13 at 40 from 1 since 5", now=50.0)
    assert spans(again)[-3:] == [("train", 5, 16, 0), ("end", 16, 40, 0), ("train", 40, 50, 0)]
    failed = account(*left, "30 alarm crash n0 rank 0 code 1", "31 outcome 3 ok", "33 outcome 4 ok", "36 progress 13")
    assert spans(failed)[-5:-3] == [("train", 5, 16, 0), ("end", 16, 30, 0)], "it lost nothing before the failure"


def test_training_ends_when_the_last_rank_makes_its_last_step() -> None:
    """Ranks may have different numbers of batches, as with DDP's join."""
    apart = (*START, "16 progress 12 at 15 from 1 since 5", "48 progress 12 at 15 from 1 since 5 last 47")
    found = account(*apart, "60 ended n0", "61 outcome 3 ok")
    assert spans(found)[-3:] == [("train", 5, 47, 0), ("end", 47, 60, 0), ("stop", 60, 61, 0)]
    assert [(ran.steps, ran.redone) for ran in found.ran] == [(12, 0)] and found.step == 12
    parted = account(*apart, "50 progress 12 at 15 from 1 since 5 last 49 parted", now=60.0)
    assert spans(parted)[-2:] == [("train", 5, 49, 0), ("end", 49, 60, 0)]


def test_training_ends_at_the_last_step_of_a_job_that_ended_well() -> None:
    """A script that only returns says nothing before its end."""
    found = account(*START, "16 progress 12 at 15 from 1 since 5", "60 ended n0", "61 outcome 3 ok")
    assert spans(found)[-3:] == [("train", 5, 15, 0), ("end", 15, 60, 0), ("stop", 60, 61, 0)]


def test_a_job_that_leaves_its_process_group_amid_redone_work() -> None:
    left = account(*START, *CRASH, "36 progress 16 at 35", "40 progress 18 at 39 from 16 since 35 parted", now=50.0)
    assert spans(left)[-2:] == [("redo", 35, 39, 1), ("end", 39, 50, 0)]


# --- without a controller ---------------------------------------------------------------------------------------------

TRAINED = (*START, "20 progress 16 at 20 from 1 since 5")
TAKEN_OVER = "90 successor 2 alone 27"


def test_ranks_that_trained_on_without_a_controller_trained() -> None:
    found = account(*TRAINED, TAKEN_OVER, "91 progress 87 at 91 from 1 since 5", now=100.0)
    assert spans(found)[-1] == ("train", 5, 100, 0)
    assert [(one.since, one.until) for one in found.unwatched] == [(27, 90)]
    assert not found.at_most and found.step == 87


def test_ranks_that_ended_without_a_controller_trained_up_to_their_last_step() -> None:
    ended = ("90 progress 40 at 44 from 1 since 5 parted", "90 ended n0", "91 outcome 2000001 ok")
    found = account(*TRAINED, TAKEN_OVER, *ended)
    assert spans(found)[-3:] == [("train", 5, 44, 0), ("unwatched", 44, 90, 0), ("stop", 90, 91, 0)]
    assert (found.step, found.incidents, found.at_most) == (40, (), "")
    assert found.lost_s() == {START_AND_END: 6.0, NO_CONTROLLER: 46.0}


def test_a_job_that_was_over_when_somebody_looked_has_lost_nothing_meanwhile() -> None:
    """Its nodes have left a note: the script had ended by itself."""
    ended = ("90 progress 40 at 44 from 1 since 5 parted", "90 ended n0 departed", "91 outcome 2000001 ok")
    found = account(*TRAINED, TAKEN_OVER, *ended)
    assert spans(found)[-3:] == [("train", 5, 44, 0), ("over", 44, 90, 0), ("stop", 90, 91, 0)]
    assert found.lost_s() == {START_AND_END: 6.0} and found.ettr == (44 - 5) / (91 - 46)
    assert found.job_s == 91 - 46


def test_the_last_hour_of_a_job_ends_when_it_is_over() -> None:
    ended = ("9990 progress 4000 at 4005 from 1 since 5 parted", "9990 ended n0 departed", "9991 outcome 2000001 ok")
    found = account(*TRAINED, "9990 successor 2 alone 27", *ended)
    assert spans(found)[-2:] == [("over", 4005, 9990, 0), ("stop", 9990, 9991, 0)]
    assert found.hour_ettr == 1.0
    ended = ("9990 progress 3000 at 3005 from 1 since 5 parted", *ended[1:])
    assert account(*TRAINED, "9990 successor 2 alone 27", *ended).hour_ettr is None, "it had no whole hour"


def test_first_steps_that_were_made_without_a_controller_are_no_start_up() -> None:
    told = ("90 progress 40 at 44 from 1 since 35 parted", "90 ended n0", "91 outcome 2000001 ok")
    found = account(*START[:4], "90 successor 2 alone 27", *told)
    assert spans(found)[2:] == [
        ("start-up", 4, 35, 0),
        ("train", 35, 44, 0),
        ("unwatched", 44, 90, 0),
        ("stop", 90, 91, 0),
    ]


def test_nobody_knows_what_ranks_did_that_are_gone_without_a_word() -> None:
    gone = (TAKEN_OVER, "98 alarm silence n0 since 95")
    found = account(*TRAINED, *gone, now=100.0)
    assert [span[:3] for span in spans(found)][3:6] == [("train", 5, 27), ("unknown", 27, 90), ("train", 90, 98)]
    assert found.at_most and found.ettr == (22 + 63 + 8) / 100
    unseen = account(*START[:4], *gone, now=100.0)
    assert [span[:3] for span in spans(unseen)][2:4] == [("run", 4, 27), ("unknown", 27, 90)], "it may have trained"


def test_the_cost_of_an_incident_begins_when_somebody_watches() -> None:
    told = (TAKEN_OVER, "90 progress 30 at 60 from 1 since 5", "90 alarm left n0 since 85")
    back = ("91 outcome 2000001 ok", "92 outcome 2000002 ok", "93 outcome 2000003 ok nodes n1", "94 ready n1")
    found = account(*TRAINED, *told, *back, "95 outcome 2000004 ok", "97 progress 31 at 96")
    [record] = found.incidents
    assert (record.good_step, record.good_at, record.resumed_at, record.untold) == (30, 90, 96, False)
    assert spans(found)[3:5] == [("train", 5, 60, 0), ("unwatched", 60, 90, 0)]
    assert found.spent_s(TimeUse.DETECT) == 0 and not found.at_most


def test_a_script_that_was_at_its_end_before_the_controller_died_was_at_its_end() -> None:
    parted = (*TRAINED, "25 progress 17 at 21 from 1 since 5 parted", TAKEN_OVER)
    ended = ("90 progress 17 at 21 from 1 since 5 parted", "95 ended n0", "96 outcome 2000001 ok")
    assert spans(account(*parted, *ended))[3:] == [
        ("train", 5, 21, 0),
        ("end", 21, 27, 0),
        ("unwatched", 27, 90, 0),
        ("end", 90, 95, 0),
        ("stop", 95, 96, 0),
    ]


def test_a_planned_restart_after_a_time_without_a_controller_does_not_cost_that_time() -> None:
    held = ("90 progress 30 at 60 from 1 since 5", "91 order hold", "92 outcome 2000001 ok", "94 order resume")
    found = account(*TRAINED, TAKEN_OVER, *held, "95 outcome 2000002 ok", "97 progress 31 at 96")
    [change] = found.changes
    assert (change.good_step, change.good_at, change.resumed_at) == (30, 90, 96)
    assert sum(span.seconds for span in found.spans if span.change) == 6.0 - change.held_s == 4.0
    assert found.lost_s()[NO_CONTROLLER] == 30.0


def test_time_up_to_the_controllers_last_sign_of_life_is_neither_unknown_nor_an_end() -> None:
    """Ranks ended without a controller and nobody told when they made their last step."""
    found = account(*TRAINED, TAKEN_OVER, "92 ended n0", "93 outcome 2000001 ok")
    assert spans(found)[3:] == [
        ("train", 5, 27, 0),
        ("unknown", 27, 90, 0),
        ("end", 90, 92, 0),
        ("stop", 92, 93, 0),
    ]
    assert found.at_most


FAILED_ALONE = "91 alarm crash n0 rank 0 code -9 since 62"
BACK = ("92 outcome 2000001 ok", "93 outcome 2000002 ok")


def test_a_rank_that_failed_without_a_controller_cost_the_time_from_its_last_step() -> None:
    told = (TAKEN_OVER, "91 progress 30 at 60 from 1 since 5", FAILED_ALONE, *BACK)
    found = account(*TRAINED, *told, "96 progress 25 at 95")
    [record] = found.incidents
    assert (record.good_step, record.good_at, record.resumed_at, record.untold) == (30, 60, 95, False)
    assert "lost 6 steps and 35.0 s (detect 31.0," in record.sentence
    assert spans(found)[3:5] == [("train", 5, 60, 0), ("detect", 60, 91, 1)]
    assert not found.at_most and report_of(found).restarts[0].lost_s == 35.0


def test_a_step_that_another_node_tells_after_the_alarm_divides_the_unknown_time() -> None:
    """The node of the failed rank is linked first; the job's step is known when the other one has told its own."""
    told = (TAKEN_OVER, FAILED_ALONE, "91.5 progress 30 at 60 from 1 since 5", *BACK)
    found = account(*TRAINED, *told, "96 progress 31 at 95")
    [record] = found.incidents
    assert (record.good_step, record.good_at, record.resumed_at, record.untold) == (30, 62, 95, False)
    assert spans(found)[3:6] == [("train", 5, 60, 0), ("unwatched", 60, 62, 0), ("detect", 62, 91, 1)]
    assert not found.at_most


def test_a_rank_that_failed_without_a_controller_and_whose_last_step_nobody_tells_cost_the_time_from_its_end() -> None:
    found = account(*TRAINED, TAKEN_OVER, FAILED_ALONE, *BACK, "96 progress 16 at 95")
    [record] = found.incidents
    assert (record.good_at, record.resumed_at, record.untold) == (62, 95, True)
    assert spans(found)[3:6] == [("train", 5, 27, 0), ("unknown", 27, 62, 0), ("detect", 62, 91, 1)]
    assert found.at_most and found.ettr == (22 + 35 + 1) / 96
    early = account(*TRAINED, TAKEN_OVER, FAILED_ALONE.replace("62", "25"), *BACK, "96 progress 16 at 95")
    assert spans(early)[3:5] == [("train", 5, 25, 0), ("detect", 25, 91, 1)], "it failed before the controller did"


def test_counters_take_nothing_back_when_a_rank_failed_without_a_controller() -> None:
    late = (TAKEN_OVER, FAILED_ALONE, "91.5 progress 30 at 60 from 1 since 5", *BACK, "96 progress 31 at 95")
    ledger, shown = Ledger(), dict.fromkeys(TimeUse, 0.0)
    for entry in entries(*TRAINED, *late):
        ledger.add(entry)
        settled = ledger.settle_account(entry.at)
        now = {use: settled.spent_s(use) for use in TimeUse}
        assert all(now[use] >= shown[use] for use in TimeUse)
        shown = now
    assert (shown[TimeUse.UNWATCHED], shown[TimeUse.DETECT]) == (2.0, 29.0)


def test_a_failure_after_the_last_step_of_a_script_costs_the_time_from_that_failure() -> None:
    ending = (*START, "18 progress 12 at 16 from 1 since 5 parted", "30 alarm crash n0 rank 0 code -9 since 29.5")
    found = account(*ending, "31 outcome 3 ok", "33 outcome 4 ok", "36 progress 13 at 35")
    [record] = found.incidents
    assert (record.good_step, record.good_at, record.resumed_at) == (12, 29.5, 35)
    assert spans(found)[3:6] == [("train", 5, 16, 0), ("end", 16, 29.5, 0), ("detect", 29.5, 30, 1)]


def test_a_failure_that_left_nothing_to_do_costs_the_time_from_that_failure() -> None:
    """A script that tells nothing of its end had made its last step, as the next generation shows: it makes none."""
    killed = ("30 progress 21 at 25 from 1 since 5", "30.4 alarm crash n0 rank 0 code -9 since 30", *CRASH[2:])
    found = account(*START, *killed, "34 ended n0", "35 outcome 5 ok")
    [record] = found.incidents
    assert (record.good_step, record.good_at, record.resumed_at) == (21, 30, 34)
    assert spans(found)[3:6] == [("train", 5, 25, 0), ("end", 25, 30, 0), ("detect", 30, 30.4, 1)]


def test_a_release_has_made_the_steps_that_the_journal_has_not_heard_of() -> None:
    ledger = Ledger()
    for entry in entries(*START, *CRASH, "36 progress 16 at 35", "37 progress 18 at 37 from 16 since 35"):
        ledger.add(entry)
    assert [(ran.steps, ran.redone) for ran in ledger.list_releases()] == [(21, 3)]
    assert [(ran.steps, ran.redone) for ran in ledger.list_releases(25)] == [(25, 6)]
    assert ledger.list_releases(10) == ledger.list_releases(), "an older one says nothing"
