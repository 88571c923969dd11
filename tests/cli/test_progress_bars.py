"""Progress bars of ranks: rows that are drawn again, and tqdm's own bars of two ranks on a real terminal."""

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.cli.terminal.overwritten_rows import show_newest, split_rows
from holdfast.core.terminal_sanitizer import sanitize_line
from holdfast.wire import program_fork_server
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.terminal import Terminal
from tests.conftest import job_environment, kill_marked

# Two epochs of two batches each, as tqdm writes them: the inner bar is below the outer one, and wiped at its end.
TQDM = (
    b"\repochs 0/2\n\rbatches 0/2\x1b[A\n\rbatches 1/2\x1b[A\n\rbatches 2/2\x1b[A\n\r           \x1b[A\r          \r"
    b"epoch 0 is over\n\repochs 0/2\repochs 1/2\n\rbatches 0/2\x1b[A\n\rbatches 1/2\x1b[A"
)


def show(*chunks: bytes) -> tuple[list[bytes], list[bytes]]:
    """The lines that are complete, and what is to be seen of the others."""
    lines, rows = list[bytes](), [b""]
    for chunk in chunks:
        more, rows = split_rows(rows, chunk)
        lines += [part for line in more for part in show_newest(line)]
    return lines, [part for row in rows if row for part in show_newest(row)]


def test_a_bar_below_another_is_no_new_line() -> None:
    assert show(TQDM) == ([b"epoch 0 is over"], [b"epochs 1/2", b"batches 1/2"])
    moves = [found.end() for found in re.finditer(rb"\x1b\[A", TQDM)]
    parts = [TQDM[start:end] for start, end in pairwise([0, *moves])]
    assert show(*parts) == show(TQDM), "however much comes at a time"
    assert show(TQDM, b"\n\r           \r\x1b[A\repochs 2/2\n") == ([b"epoch 0 is over", b"epochs 2/2"], [])


@pytest.mark.parametrize("end", range(len(TQDM)))
def test_no_piece_of_a_bar_is_lost_or_joined_with_another(end: int) -> None:
    """However the bytes are torn apart: at worst a bar is shown once more."""
    lines, rows = show(TQDM[:end], TQDM[end:])
    assert b"epoch 0 is over" in lines and b"epochs 1/2" in lines + rows
    whole = re.compile(rb"epochs \d/2|batches \d/2|epoch 0 is over")
    seen = [sanitize_line(line) for line in lines + rows]
    assert all(whole.fullmatch(line) for line in seen), seen
    assert len(lines) <= 2


@pytest.mark.parametrize(
    ("written", "lines", "rows"),
    [
        (b"one\ntwo\nthr", [b"one", b"two"], [b"thr"]),
        (b"\r10 %\r20 %\n\n", [b"20 %", b""], []),
        (b"\r90 %\r     \r", [], []),
        (b"\r90 %\r     \rtext\n", [b"text"], []),
        (b"a\nb\nc\x1b[2Ad\n", [b"d"], [b"b", b"c"]),
        (b"\x1b[9Aa\n", [b"a"], []),
        (b"a\n\n\rlowest\x1b[A\x1b[A\rA", [], [b"A", b"lowest"]),
    ],
)
def test_what_is_seen(written: bytes, lines: list[bytes], rows: list[bytes]) -> None:
    assert show(written) == (lines, rows)


JOB = """
import os, sys, time
from tqdm import tqdm
import holdfast
folder, rank, step = sys.argv[1], os.environ["RANK"], 0
for epoch in tqdm(range(4), desc="epochs"):
    for batch in tqdm(range(30), desc="batches", leave=False):
        time.sleep(0.1)
        step += 1
        holdfast.step(step, loss=1 / step)
    tqdm.write(f"epoch {epoch} of rank {rank} is over", file=sys.stderr)
for part in range(101):
    print(f"\\rcopied {part} %", end="", flush=True)
print(flush=True)
"""
BAR = re.compile(r"\[rank ([01])\] (epochs|batches): +\d+%\|[^|]*\| (\d+)/\d+ \[\d\d:\d\d<[^\]]*\]")
OTHER = re.compile(r"\[rank [01]\] (?:epoch \d of rank [01] is over|copied 100 %)|holdfast\S* .*|  .*|")


def find_odd(lines: list[str]) -> list[str]:
    return [line for line in lines if not BAR.fullmatch(line) and not OTHER.fullmatch(line)]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="tqdm is not installed; make test-full has it")
def test_bars_of_tqdm_above_the_footer(tmp_path: Path, warm_server: Path, no_orphans: str) -> None:
    (tmp_path / "job.py").write_text(JOB)
    flags = ["--run-dir", str(tmp_path / "run"), "--no-zygote", "--set", "probe.allow=false", "--nproc-per-node", "2"]
    argv = [sys.executable, "-m", "holdfast", "run", *flags, "job.py", str(tmp_path)]
    env = make_rank_environment(job_environment(HOLDFAST_HOME=str(tmp_path / "home"), TERM="xterm-256color"))
    env |= {program_fork_server.NAMED: str(warm_server)}
    try:
        with Terminal(argv, env=env, cwd=tmp_path, columns=250) as terminal:

            def has_footer_below_bars() -> bool:
                *above, last = terminal.lines() or [""]
                return last.startswith("training  step ") and any("batches:" in line for line in above)

            terminal.until(has_footer_below_bars, "a footer below bars")
            assert terminal.screen.cursor.x == 0
            assert not find_odd(terminal.whole_text()[:-1])
            terminal.until(lambda: terminal.process.poll() is not None, "the end")
            terminal.read()
            assert terminal.process.returncode == 0, terminal.whole_text()
            lines = terminal.whole_text()
    finally:
        kill_marked(no_orphans)
    assert not find_odd(lines)
    for rank in "01":
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        said = [line for line in own if not BAR.fullmatch(line)]
        epochs = [f"[rank {rank}] epoch {epoch} of rank {rank} is over" for epoch in range(4)]
        assert sorted(said) == sorted([*epochs, f"[rank {rank}] copied 100 %"]), "each once"
        assert [line for line in said if "is over" in line] == epochs, "in their order"
        bars = [found for line in own if (found := BAR.fullmatch(line))]
        made = [int(found[3]) for found in bars if found[2] == "epochs"]
        assert made == sorted(made) and made[-1] == 4, "the last state of a bar is left"
        assert 1 <= sum(found[2] == "batches" for found in bars) <= 6, "now and then, not at each of 120 steps"
