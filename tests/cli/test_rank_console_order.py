"""The console shows in order what ranks print and what is said about them, however late it looks."""

import time
from pathlib import Path

import pytest

from tests.cli.test_rank_console import Ranks


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


KILLED = "rank 0 on n0 was killed by SIGKILL (sender unknown)"
BROKE = f"holdfast: incident 1: {KILLED}; stopping all ranks\n"
AGAIN = f"holdfast: incident 1, failure 2 without a step in between: {KILLED}; stopping all ranks\n"
BACK = f"holdfast: {KILLED} at step 2; restarted in place from step 2, lost 1 s\n"
DONE = "holdfast: done: 1 incident\n"


def order_of(shown: str) -> list[str]:
    return [line.removeprefix("[rank 0] ").removeprefix("holdfast: ")[:18] for line in shown.splitlines()]


def test_what_happened_first_is_shown_first_however_late_the_console_looks(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = ranks.console()
    ranks.write(b"step 2\n", stream="stderr")
    shown.show_new_output()
    ranks.write(b"step 3\n", stream="stderr")
    ranks.write(b"step 3 again\n", generation=2, stream="stderr")
    ranks.said.write_text(BROKE + BACK + DONE)
    shown.show_new_output()
    made = ["step 2", "step 3", "incident 1: rank 0", "rank 0 on n0 was k", "step 3 again", "done: 1 incident"]
    assert order_of(capfd.readouterr().err) == made


def test_what_ranks_print_waits_for_the_sentence_about_their_restart(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = ranks.console()
    ranks.said.write_text(BROKE)
    shown.show_new_output()
    ranks.write(b"loading\n", generation=2, stream="stderr")
    now[0] += 1.0
    shown.show_new_output()
    assert order_of(capfd.readouterr().err) == ["incident 1: rank 0"]
    now[0] += 2.9
    shown.show_new_output()
    assert capfd.readouterr().err == ""
    now[0] += 0.2
    shown.show_new_output()
    assert order_of(capfd.readouterr().err) == ["loading"], "nobody waits for ever"
    ranks.write(b"cannot load\n", generation=2, stream="stderr")
    with ranks.said.open("a") as said:
        said.write(AGAIN)
    shown.show_new_output()
    assert order_of(capfd.readouterr().err) == ["cannot load", "incident 1, failur"], "last words come first"
    ranks.write(b"step 3\n", generation=3, stream="stderr")
    now[0] += 1.0
    shown.show_new_output()
    with ranks.said.open("a") as said:
        said.write(BACK)
    shown.show_new_output()
    ranks.write(b"step 4\n", generation=3, stream="stderr")
    shown.show_new_output()
    assert order_of(capfd.readouterr().err) == ["rank 0 on n0 was k", "step 3", "step 4"]


RAISED = b'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    main()\n%s\n'
LOST = RAISED % b"RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:17838"
BUG = RAISED % b"KeyError: 'hidden_size'"


def test_the_closing_line_comes_after_all_that_ranks_have_printed(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = ranks.console()
    ranks.said.write_text(BROKE)
    for generation in (1, 2):
        for rank in (0, 1):
            ranks.write(BUG, rank, generation, "stderr")
        ranks.write(b"half a line", 1, generation, "stderr")
        shown._look_at = 0.0
        shown.show_new_output()
    with ranks.said.open("a") as said:
        said.write("holdfast: ended with code 93: 1 incident\n")
    shown.show_new_output()
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "holdfast: ended with code 93: 1 incident"
    assert [line[:25] for line in lines].count("[rank 1] KeyError: 'hidde") == 2, lines
    assert lines.count("[rank 1] half a line") == 2, lines
    shown.drain_output()
    assert capfd.readouterr().err == ""


def test_what_an_ended_generation_has_said_comes_before_the_next_ones_first_line(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = ranks.console()
    ranks.said.write_text(BROKE)
    ranks.write(b"step 2\n", stream="stderr")
    ranks.write(LOST, rank=1, stream="stderr")
    shown.show_new_output()
    ranks.write(b"step 3\n", generation=2, stream="stderr")
    with ranks.said.open("a") as said:
        said.write(BACK)
    shown.show_new_output()
    made = ["step 2", "incident 1: rank 0", "[rank 1] RuntimeEr", "rank 0 on n0 was k", "step 3"]
    assert order_of(capfd.readouterr().err) == made


def test_a_traceback_that_begins_on_the_line_of_a_bar_is_folded_all_the_same(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = ranks.console()
    ranks.write(b"step 2\n", rank=1, stream="stderr")
    prefixed = b"".join(b"[rank0]: " + line for line in LOST.splitlines(keepends=True))
    ranks.write(b"\r 5%|#   | 1/20\r90%|### | 18/20" + prefixed, stream="stderr")
    path = ranks.write(b"\r95%|### | 19/20" + LOST, stream="stderr")
    shown.drain_output()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines[:3]) == ["[rank 0] 90%|### | 18/20", "[rank 0] 95%|### | 19/20", "[rank 1] step 2"], lines
    told = "[rank 0] RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:17838"
    assert lines[3:] == [f"{told} (of a rank that lost another; 8 lines in {path})"]
