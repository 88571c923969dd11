"""The report says what the account says, and survives being JSON."""

import msgspec
import pytest
from rich.console import Console

from holdfast.cli.commands.report_command import render_report
from holdfast.core.detect.nonfinite_loss import BAD_LOSS
from holdfast.core.detect.slow import PresentSlowness
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.job_report import Report, report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.model.action import Say
from holdfast.model.detector_alarm import Alarm
from holdfast.model.incident_record import Remedy
from tests.core.test_ledger import START, account, entries
from tests.core.transcript import Scenario


@pytest.mark.parametrize("name", ["silence_after_echoes", "user_code_again", "not_enough_nodes"])
def test_report_of_a_job(name: str) -> None:
    scenario = Scenario(name)
    scenario.play()
    account = fold_entries(scenario.entries)
    report = report_of(account)
    assert report.spent_s.keys() == {use.value for use in TimeUse}
    assert sum(report.spent_s.values()) == pytest.approx(report.wall_s)
    assert report.wall_s - sum(report.lost_s.values()) == pytest.approx(report.spent_s["train"])
    assert (report.ettr, report.incidents, report.code) == (account.ettr, account.incidents, account.code)
    mended = [r.number for r in report.incidents if r.verdict.remedy is not Remedy.GIVE_UP]
    assert [restart.incident for restart in report.restarts] == mended
    for restart in report.restarts:
        assert sum(restart.phases_s.values()) == pytest.approx(restart.lost_s)
    assert sum(ran.generations for ran in report.releases) == report.generation
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_an_older_journal_tells_of_a_lost_standby_by_words_alone() -> None:
    scenario = Scenario("standby_lost")
    scenario.play()
    found = fold_entries(scenario.entries).lost_standbys
    assert found == ("standby n2 lost: has been silent for 3 s",)
    older = []
    for entry in scenario.entries:
        says = (Say(text=action.text) if isinstance(action, Say) else action for action in entry.decision.actions)
        decision = msgspec.structs.replace(entry.decision, actions=tuple(says))
        older.append(msgspec.structs.replace(entry, decision=decision))
    assert fold_entries(older).lost_standbys == found


def test_a_rank_that_was_only_told_to_be_slow_is_in_the_account() -> None:
    slow = 'alarm slow n0 rank 0 said "makes the others wait"'
    hidden, shown = (slow.replace(" said", f" stance {stance} said") for stance in ("observe", "notify"))
    told, tolerated = (found := account(*START, f"19 {hidden}", f"20 {shown}", f"21 {slow}", now=25.0)).slow
    assert (told.at, told.ranks, told.nodes) == (20.0, (0,), ("n0",))
    assert told.text == "rank 0 on n0 makes the others wait"
    assert tolerated.text.startswith("rank 0 on n0 makes the others wait; not acted on, as ")
    present = PresentSlowness(node="n0")
    assert found.describe_slow(1, present) == (f"{tolerated.text} (told 4 s ago)", True)
    assert found.describe_slow(2, present) == ("", False)


def test_what_was_told_is_dated_when_it_was_told_not_when_it_began() -> None:
    slow = 'alarm slow n0 rank 0 since 11 stance notify said "makes the others wait"'
    assert [one.at for one in account(*START, f"20 {slow}", now=25.0).slow] == [20.0]


def test_a_bad_loss_that_was_only_told_is_in_the_account_and_the_report() -> None:
    bad = 'alarm lines n0 rank 0 stance notify said "prints a loss of nan; nothing is done"'
    told = [f"{20 + i} {bad}" for i in range(6)]
    journal = entries(*START, *told)
    for i, entry in enumerate(journal):
        if isinstance(entry.event, Alarm):
            event = msgspec.structs.replace(entry.event, klass=BAD_LOSS)
            journal[i] = msgspec.structs.replace(entry, event=event)
    found = fold_entries(journal)
    assert (len(found.losses), found.slow) == (6, ())
    assert found.losses[0].text == "rank 0 on n0 prints a loss of nan; nothing is done"
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render_report(report_of(found)))
    assert captured.get().count(": rank 0 on n0 prints a loss of nan; nothing is done") == 4
    assert "loss, told 2 times more" in captured.get()
