"""What the page is told of changes makes the view that it would get whole."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.dash.page_feed import PageFeed, compare_sections
from holdfast.dash.page_source import JobPresence, SourceError
from holdfast.model.decider_events import Begin, Progress
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from tests.core.test_page_view import simulated


class GrowingSource:
    """A journal that grows by a few entries at each look."""

    def __init__(self) -> None:
        self.there = 0
        self.ranks: dict[int, dict[str, Any]] = {}  # what a controller tells of them

    def read_entries(self, after: int) -> Iterable[Entry]:
        return [entry for entry in simulated()[: self.there] if entry.seq > after]

    def look_at_job(self) -> JobPresence:
        return JobPresence()

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        raise SourceError("there is no controller")

    def look_at_rank(self, rank: int) -> dict[str, Any] | None:
        return self.ranks.get(rank)

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        raise SourceError("there is no output")

    def find_archive(self, digest: str) -> Path:
        raise SourceError("there is no archive")


def applied(view: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """As store.js does it."""
    found = dict(view)
    for name, change in changed.items():
        if "$whole" in change:
            found[name] = change["$whole"]
        elif "$fields" in change:
            found[name] = found[name] | change["$fields"]
        else:
            rows = found[name][: change["$length"]]
            for index, row in sorted((int(n), row) for n, row in change["$rows"].items()):
                rows[index : index + 1] = [row]
            found[name] = rows
    return found


numbers = st.integers(0, 3)
values = numbers | st.lists(numbers, max_size=5) | st.dictionaries(st.sampled_from("xyz"), numbers)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), values), st.dictionaries(st.sampled_from("abc"), values))
def test_a_patch_makes_the_next_version(before: dict[str, Any], after: dict[str, Any]) -> None:
    whole = before | after  # sections are never taken away
    assert applied(before, compare_sections(before, whole)) == whole


def test_a_page_that_listens_sees_what_a_new_page_sees() -> None:
    source = GrowingSource()
    feed = PageFeed(source)
    source.there = 3
    feed.refresh_view()
    first = msgspec.json.decode(feed.whole)
    view = first["sections"]
    while source.there < len(simulated()):
        source.there += 25
        feed.refresh_view()
        for patch in feed.patches_since(first["version"]) or ():
            told = msgspec.json.decode(patch)
            view, first["version"] = applied(view, told["changed"]), told["version"]
    assert view == msgspec.json.decode(feed.whole)["sections"]
    assert len(view["incidents"]) == 2
    assert feed.patches_since(feed.version) == []


def test_secrets_of_a_command_line_are_on_no_page() -> None:
    class GivenSource(GrowingSource):
        def read_entries(self, after: int) -> Iterable[Entry]:
            argv = ("job.py", "--hub-token", "ArgTok55aaQQ1", "--wandb_key=ArgKey66bbRR2", "--lr", "0.1")
            for entry in super().read_entries(after):
                event = entry.event
                if isinstance(event, Begin):
                    event = replace(event, release=replace(event.release, argv=argv))
                yield replace(entry, event=event)

    source = GivenSource()
    source.there = 5
    page = PageFeed(source).render()
    assert "--hub-token" in page and "--wandb_key" in page
    assert "ArgTok55aaQQ1" not in page and "ArgKey66bbRR2" not in page


def test_nothing_new_is_no_version_and_who_is_far_behind_begins_anew() -> None:
    source = GrowingSource()
    feed = PageFeed(source)
    for there in range(1, 300):
        source.there = there
        feed.refresh_view()
    version = feed.version
    feed.refresh_view()
    assert feed.version == version
    assert feed.patches_since(1) is None and feed.patches_since(version + 1) is None
    assert len(feed.patches_since(version - 5) or ()) == 5


class LongSource(GrowingSource):
    """A journal of 20,000 entries: reports of progress, each a step further."""

    def read_entries(self, after: int) -> Iterable[Entry]:
        last = next(entry for entry in reversed(simulated()) if isinstance(entry.event, Progress))
        yield from (entry for entry in simulated() if after < entry.seq <= last.seq)
        assert isinstance(last.event, Progress)
        for n in range(max(1, after + 1 - last.seq), 20_000):
            told = msgspec.structs.replace(last.event, step=last.event.step + n, at=last.at + n)
            yield msgspec.structs.replace(last, seq=last.seq + n, at=last.at + n, event=told)


def test_a_long_journal_is_shown_while_it_is_read() -> None:
    """However slowly entries are read, the first of them are shown after a moment."""
    now, seen = 0.0, []

    def clock() -> float:
        nonlocal now
        now += 0.1  # that 1,000 entries take
        return now

    feed = PageFeed(LongSource(), clock)
    while feed.behind:
        feed.refresh_view()
        seen.append(feed._fold.seq)
    assert seen[:2] == [2000, 7000] and len(seen) == 3 and seen[-1] > 20_000
    assert not msgspec.json.decode(feed.whole)["sections"]["reading"]


class PrintingSource(GrowingSource):
    """A run directory with the output of rank 2 alone: a long one, which a terminal would obey."""

    def look_at_rank(self, rank: int) -> dict[str, Any] | None:
        return self.ranks.get(rank)

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        if rank != 2:
            raise SourceError(f"rank {rank} has printed nothing on this host")
        lines = (*(f"out  line {n}" for n in range(90)), "err  \x1b[31mdied\x1b]0;x\x07" + 9999 * "!")
        return (f"generation {generation}", *lines)


def test_a_story_has_what_the_rank_in_question_printed_last() -> None:
    source = PrintingSource()
    source.there = len(simulated())
    feed = PageFeed(source)
    feed.refresh_view()
    crash, loss = feed.tell_story(1), feed.tell_story(2)
    assert crash["generation"] == 1 and crash["ranks"] == [2]
    (log,) = crash["logs"]
    assert log["rank"] == 2 and len(log["lines"]) == 40 and log["lines"][0] == "out  line 51"
    assert log["lines"][-1].startswith("err  died!!!") and len(log["lines"][-1]) <= 500
    assert loss["ranks"] == [0], "the first rank of the node that is named"
    assert loss["logs"] == [{"rank": 0, "absence": "rank 0 has printed nothing on this host"}]
    assert feed.tell_story(1, logged=False)["logs"] == [] and feed.tell_story(9) is None


def test_the_story_of_an_open_incident_has_lines_too() -> None:
    source = PrintingSource()
    opened = next(n for n, entry in enumerate(simulated()) if entry.decision.phase is Phase.STOPPING)
    source.there = opened + 1
    feed = PageFeed(source)
    feed.refresh_view()
    assert [log["rank"] for log in feed.tell_story(1)["logs"]] == [2]
