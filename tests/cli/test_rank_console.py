"""The console follows log files: what is shown, how it is prefixed, what is skipped."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.run_flags import run_arguments
from holdfast.cli.terminal import rank_console
from holdfast.cli.terminal.rank_console import Console, ConsolePump, ConsoleStyle, say, write_all
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec


@pytest.fixture(autouse=True)
def open_streams() -> Iterator[None]:
    yield
    rank_console._closed.clear()


class Ranks:
    """Log files as ranks write them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder / "said.log"

    def write(self, text: bytes, rank: int = 0, generation: int = 1, stream: str = "stdout") -> Path:
        path = self.folder / "logs" / f"gen-{generation}" / f"rank-{rank}" / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(text)
        return path

    def console(self, nproc: int = 2, shown: Callable[[int], int] = lambda local: 3, **style: object) -> Console:
        made = ConsoleStyle(nproc=nproc, shown=shown, **style)  # type: ignore[arg-type]
        console = Console(self.folder / "logs", made, self.said)
        console._look_at = 0.0
        return console


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_prefixes_are_torchruns_where_its_flags_are_given(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunSpec(
        job=Job(run_id="r", min_nodes=1, max_nodes=1),
        entry=EntryPoint(argv=("x",), role="trainer"),
        settings=Settings(),
        fleet="local",
        nproc=2,
        log_dir=str(ranks.folder / "logs"),
    )
    ranks.write(b"hello\n", rank=3)
    ranks.write(b"", rank=2)
    for words, shown in (([], "[rank 3] hello\n"), (["--role", "trainer"], "[trainer1]:hello\n")):
        args = run_arguments.parse_run_args(["-m", *words, "module"], {})
        rank_console.make_console(args, run, ranks.folder).drain_output()
        assert capfd.readouterr().out == shown


def test_lines_are_prefixed_and_streams_kept_apart(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    ranks.write(b"one\ntwo\nthr")
    ranks.write(b"oops\n", rank=3, stream="stderr")
    shown.show_new_output()
    assert capfd.readouterr() == ("[rank 0] one\n[rank 0] two\n", "[rank 3] oops\n")
    ranks.write(b"ee\n")
    shown.show_new_output()
    assert capfd.readouterr() == ("[rank 0] three\n", "")
    ranks.write(b"the end")
    shown.show_new_output()
    assert capfd.readouterr().out == ""
    shown.drain_output()
    assert capfd.readouterr().out == "[rank 0] the end\n"


def test_streams_that_are_not_wanted_are_not_shown(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console(shown=lambda local: (1, 2)[local], prefix="${role_name} ${local_rank} $$ ${odd}: ", role="r")
    for rank in range(2):
        ranks.write(b"out\n", rank=rank)
        ranks.write(b"err\n", rank=rank, stream="stderr")
    shown.drain_output()
    assert capfd.readouterr() == ("r 0 $ ${odd}: out\n", "r 1 $ ${odd}: err\n")


def test_local_ranks_beside_nodes_of_other_sizes(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """This host has ranks 3 and 4 of a job whose first host has three; after a loss they are ranks 1 and 2."""
    shown = ranks.console(shown=lambda local: 3 if local == 1 else 0, prefix="${rank} ${local_rank}: ")
    for generation, first in ((1, 3), (2, 1)):
        for rank in (first, first + 1):
            ranks.write(b"hear\n", rank=rank, generation=generation)
    shown.drain_output()
    assert capfd.readouterr().out == "4 1: hear\n2 1: hear\n"


def test_local_ranks_of_several_nodes_on_this_host(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console(prefix="${rank} ${local_rank}: ")
    for rank in range(4):
        ranks.write(b"hear\n", rank=rank)
    shown.drain_output()
    assert capfd.readouterr().out == "0 0: hear\n1 1: hear\n2 0: hear\n3 1: hear\n"


def test_our_own_words_come_after_those_of_the_ranks(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    ranks.said.write_text("holdfast: rank 0 died\n")
    ranks.write(b"last words\n", stream="stderr")
    shown.show_new_output()
    assert capfd.readouterr().err == "[rank 0] last words\nholdfast: rank 0 died\n"


def test_a_job_that_is_followed_later_is_not_held_back(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.write(b"step 3\n", generation=2)
    shown = ranks.console()
    shown.skip_to_end()
    ranks.write(b"step 4\n", generation=2)
    shown.show_new_output()
    assert capfd.readouterr().out == "[rank 0] step 4\n"


def test_a_flood_is_skipped_and_counted(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console(bytes_s=50_000)
    path = ranks.write(b"x" * 99 + b"\n")
    shown.show_new_output()
    ranks.write(b"".join(b"%099d\n" % n for n in range(10_000)))
    shown.show_new_output()
    lines = capfd.readouterr().out.splitlines()
    skipped = 1_000_000 - (1 << 14)
    assert lines[1] == f"[rank 0] ... {skipped} bytes not shown here; see {path}"
    assert lines[-1] == f"[rank 0] {9999:099d}"
    assert len(lines) < 200


def test_a_rotated_file_is_read_from_its_start(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    path = ranks.write(b"before\nhalf a li")
    shown.show_new_output()
    path.write_bytes(b"after\n")
    shown.show_new_output()
    assert capfd.readouterr().out == "[rank 0] before\n[rank 0] after\n"


def test_a_progress_bar_is_shown_now_and_then(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_console, "_BAR_S", 0.0)
    shown = ranks.console()
    ranks.write(b"".join(b"\r%d %%" % n for n in range(50)))
    shown.show_new_output()
    assert capfd.readouterr().out == "[rank 0] 49 %\n"
    monkeypatch.setattr(rank_console, "_BAR_S", 60.0)
    ranks.write(b"".join(b"\r%d %%" % n for n in range(50, 101)))
    shown.show_new_output()
    assert capfd.readouterr().out == ""
    ranks.write(b"\n")
    shown.show_new_output()
    assert capfd.readouterr().out == "[rank 0] 100 %\n"


def test_the_unfinished_bar_of_a_killed_rank_comes_before_what_the_next_ranks_print(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = ranks.console()
    ranks.write(b"start\n")
    console.show_new_output()
    ranks.write(b"10%\r11%\r")
    console.show_new_output()
    ranks.write(b"50%\r", rank=1)
    monkeypatch.setattr(rank_console, "_BAR_S", 0.0)
    ranks.write(b"12%\r", rank=1)
    console._look_at = 0.0
    console.show_new_output()
    assert capfd.readouterr().out == "[rank 0] start\n[rank 1] 12%\n"
    ranks.write(b"again\n", generation=2)
    console._look_at = 0.0
    console.show_new_output()
    assert capfd.readouterr().out == "[rank 0] 11%\n[rank 0] again\n", "and what was shown is not shown again"
    console.drain_output()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_end_is_cut(end: bytes, ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    path = ranks.write(b"y" * 300_000 + end)
    shown.show_new_output()
    note = f"... {300_000 - 65_536} bytes of this line not shown here; see {path}"
    assert capfd.readouterr().out == f"[rank 0] {'y' * 65_536} {note}\n"


def test_bytes_that_come_together_hold_nobody_up(ranks: Ranks, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Each removal used to complete the next character: 40,000 of each held a console up for 24 minutes."""
    ranks.write(b"\xe2" * 3_000 + b"\x80\xae" * 3_000 + b"\nnext\n")
    began = time.thread_time()
    ranks.console().drain_output()
    assert time.thread_time() - began < 0.5
    assert capfdbinary.readouterr().out.endswith(b"\n[rank 0] next\n")


def test_generations_that_are_over_are_let_go(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    for generation in range(1, 12):
        ranks.write(b"of %d" % generation, generation=generation)
        shown._look_at = 0.0
        shown.show_new_output()
    assert sorted(shown._file_generation(path) for path in shown._files) == [10, 11]
    shown.drain_output()
    assert capfd.readouterr().out == "".join(f"[rank 0] of {n}\n" for n in range(1, 12))


def test_what_was_seen_before_is_skipped(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.write(b"old\n")
    ranks.said.write_text("holdfast: old\n")
    shown = ranks.console()
    shown.skip_to_end()
    ranks.write(b"new\n")
    shown.drain_output()
    assert capfd.readouterr() == ("[rank 0] new\n", "")


def test_no_log_folder_yet(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    shown.skip_to_end()
    shown.show_new_output()
    shown.drain_output()
    assert capfd.readouterr() == ("", "")


def test_a_console_that_is_gone_is_no_reason_to_fail() -> None:
    read, write = os.pipe()
    os.close(read)
    write_all(write, b"anybody there?")
    write_all(write, b"then not")
    os.close(write)
    assert write in rank_console._closed


def test_a_console_that_cannot_take_it_all_at_once_gets_it_all() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    thread = threading.Thread(target=write_all, args=(write, b"z" * 300_000))
    thread.start()
    got = 0
    while got < 300_000:
        got += len(os.read(read, 1 << 16))
    thread.join()
    os.close(read)
    os.close(write)


def test_say(capfd: pytest.CaptureFixture[str]) -> None:
    say("a sentence")
    assert capfd.readouterr() == ("", "holdfast: a sentence\n")


def test_the_pump_can_be_left(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who never reads holds up the thread, not those who want to leave."""
    held = threading.Event()
    monkeypatch.setattr(rank_console, "write_all", lambda fd, content: held.wait(30))
    ranks.write(b"something\n")
    pump = ConsolePump(ranks.console())
    began_at = time.monotonic()
    pump.await_shown(lambda: time.monotonic() > began_at + 0.2)
    assert pump._thread.is_alive()
    held.set()
    pump.await_shown(lambda: False)
    assert not pump._thread.is_alive()


def test_until_a_rank_has_printed_it_is_looked_at_often(ranks: Ranks) -> None:
    shown = ranks.console()
    ranks.said.write_text("holdfast: something\n")
    shown.show_new_output()
    often_s = shown.pause_s()
    ranks.write(b"first line\n")  # in a folder that was not there: it is found at the very next look
    shown.show_new_output()
    assert shown._files and often_s < 0.05 < shown.pause_s()


def test_ranks_that_lost_their_peer_share_a_line(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ranks.console()
    echo = 'Traceback (most recent call last):\n  File "train.py", line 1\nRuntimeError: Connection closed by peer'
    for rank in (0, 1, 3):
        ranks.write(f"{echo} [127.0.0.1]:{1000 + rank}\nafter {rank}\n".encode(), rank, stream="stderr")
    ranks.write(b"ValueError: the cause\n", 2, stream="stderr")
    shown.show_new_output()
    cause = "[rank 2] ValueError: the cause\n"
    assert capfd.readouterr().err == f"[rank 0] after 0\n[rank 1] after 1\n{cause}[rank 3] after 3\n"
    shown.drain_output()
    where = ranks.folder / "logs" / "gen-1"
    assert capfd.readouterr().err == f"holdfast: ranks 0-1, 3 lost their peer (9 lines in {where})\n"
