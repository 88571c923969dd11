"""The footer of a run on a terminal: its words, and a real terminal in which a real job prints."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.terminal.live_footer import JobMeter, count_columns, cut_columns
from holdfast.wire import program_fork_server
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.terminal import Terminal
from tests.conftest import job_environment, kill_marked

NODE = {"node": "n0", "role": "active", "ranks": "0", "phase": ""}
STATUS: dict[str, Any] = {
    "phase": "training", "now": "training", "step": 10, "ettr": 0.971, "incidents": 0, "last_incident": "",
    "nodes": [NODE, NODE | {"node": "n1"}, {"node": "n2", "role": "ready", "ranks": "", "phase": ""}],
}  # fmt: skip


def test_words_of_a_job_that_trains() -> None:
    meter = JobMeter()
    assert meter.describe_job(0.0, STATUS) == ("training", "step 10  ETTR 97.1 %")
    assert meter.describe_job(2.0, STATUS | {"step": 13})[1] == "step 13  1.5 steps/s  ETTR 97.1 %"
    assert meter.describe_job(60.0, STATUS | {"step": 14})[1] == "step 14  ETTR 97.1 %", "a rate is of the last seconds"
    again = STATUS | {
        "step": 9,
        "incidents": 2,
        "failures": 3,
        "last_incident": "rank 1 was\x1b[2J killed",
        "ettr": None,
    }
    assert meter.describe_job(61.0, again)[1] == "step 9  2 incidents (3 failures), last: rank 1 was killed"


def test_words_of_a_job_that_does_not() -> None:
    meter = JobMeter()
    assert meter.describe_job(0.0, {}) == ("starting 0 s", "")
    waits = STATUS | {"phase": "waiting", "now": "1 of 2 are there", "ettr": None}
    assert meter.describe_job(1.0, waits) == ("waiting 0 s", "1 of 2 are there")
    assert meter.describe_job(9.0, waits) == ("waiting 8 s", "1 of 2 are there")
    starts = STATUS | {"phase": "starting", "now": "the ranks run", "ettr": None}
    assert meter.describe_job(10.0, starts)[1] == "the ranks run"
    restores = starts | {"nodes": [NODE | {"phase": "restore"}, *STATUS["nodes"][1:]]}
    assert meter.describe_job(11.0, restores) == ("starting 1 s", "state is being restored on 1 of 2 nodes")
    probes = STATUS | {"phase": "probing", "now": "2 of 3 nodes have answered", "ettr": None}
    assert meter.describe_job(11.5, probes) == ("probing 0 s", "2 of 3 nodes have answered")
    asks = STATUS | {"phase": "held", "asking": "rank 0 failed", "now": "no rank runs"}
    assert meter.describe_job(12.0, asks) == ("held 0 s", "holdfast approve or stop: rank 0 failed  ETTR 97.1 %")
    assert meter.describe_job(14.0, {}) == ("no controller 0 s", "")
    assert meter.describe_job(15.0, STATUS | {"parted": True, "now": "ending"})[0] == "ending 0 s"


@pytest.mark.parametrize(
    ("text", "most", "cut"),
    [
        ("four", 4, "four"),
        ("five!", 4, "fiv…"),
        ("日本語", 6, "日本語"),
        ("日本語", 5, "日本…"),
        ("a\nb", 9, "a b"),
        ("ab", 0, ""),
    ],
)
def test_a_line_fits(text: str, most: int, cut: str) -> None:
    assert cut_columns(text, most) == cut
    assert count_columns(cut) <= most


ASK = "from holdfast.cli.terminal.live_footer import can_have_footer as can; print('can' if can() else 'can not')"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("term", "more", "can"),
    [("xterm", "", "can"), ("dumb", "", "can not"), ("", "", "can not"), ("xterm", "| cat", "can not")],
)
def test_where_there_is_a_footer(term: str, more: str, can: str, tmp_path: Path) -> None:
    argv = ["sh", "-c", f'"$0" -c "{ASK}" {more}; echo over', sys.executable]
    with Terminal(argv, env=job_environment(TERM=term), cwd=tmp_path) as terminal:
        terminal.shows("over")
        assert terminal.lines() == [can, "over"]


COLOUR = """
import sys
from holdfast.cli.terminal.live_footer import FooterLine
line = FooterLine()
line.set_words("training", "step 1")
sys.stdin.readline()
line.close()
line.set_words("training", "step 2")  # by a thread that has asked before
print("closed")
"""


@pytest.mark.e2e
@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_are_a_choice(no_color: str, tmp_path: Path) -> None:
    env = job_environment(TERM="xterm", NO_COLOR=no_color)
    with Terminal([sys.executable, "-c", COLOUR], env=env, cwd=tmp_path, columns=12) as terminal:
        terminal.shows("training  …")
        assert (b"\x1b[32m" in terminal.written) is not bool(no_color)
        assert terminal.screen.cursor.x == 0, "what the terminal echoes is overwritten"
        terminal.type("\n")
        terminal.until(lambda: "closed" in terminal.lines()[-1], "the end")
        assert not any("step 2" in line for line in terminal.lines())


# It prints, shows a progress bar as tqdm does, and is killed once, by itself.
BARS = """
import os, signal, sys, time
import holdfast
folder = sys.argv[1]
again = os.path.exists(f"{folder}/killed")
for step in range(1, 100000):
    print(f"line {step} " + "x" * 40, flush=True)
    sys.stderr.write(f"\\rbar {step} %|" + "#" * 20)
    if step % 20 == 0:
        sys.stderr.write("\\n")
    sys.stderr.flush()
    holdfast.step(step, loss=1 / step)
    time.sleep(0.05)
    if os.path.exists(f"{folder}/kill") and not again:
        open(f"{folder}/killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def watched(run_dir: Path, env: dict[str, str]) -> None:
    """`status -w` in another terminal: one screen, in place, that goes on and ends with Ctrl-C."""
    argv = [sys.executable, "-m", "holdfast", "status", "-w", str(run_dir)]
    with Terminal(argv, env=env, cwd=run_dir.parent) as terminal:
        steps: set[str] = set()

        def moves() -> bool:
            lines = terminal.lines()
            steps.update(re.findall(r"generation 2, step (\d+)", " ".join(lines)))
            return len(steps) > 2 and any("rank 0 on n0 was killed" in line for line in lines)

        terminal.until(moves, "three steps of the second generation")
        assert sum("generation 2" in line for line in terminal.whole_text()) == 1, "in place"
        terminal.type("\x03")
        terminal.until(lambda: terminal.process.poll() is not None, "the end")
        terminal.read()
        assert terminal.process.returncode == 130
        assert "Traceback" not in terminal.written.decode()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_job_on_a_terminal(tmp_path: Path, warm_server: Path, no_orphans: str) -> None:
    (tmp_path / "job.py").write_text(BARS)
    flags = ["--run-dir", str(tmp_path / "run"), "--no-zygote", "--set", "probe.allow=false"]
    argv = [sys.executable, "-m", "holdfast", "run", *flags, "job.py", str(tmp_path)]
    env = make_rank_environment(job_environment(HOLDFAST_HOME=str(tmp_path / "home"), TERM="xterm-256color"))
    env |= {program_fork_server.NAMED: str(warm_server)}
    try:
        with Terminal(argv, env=env, cwd=tmp_path) as terminal:

            def at() -> str:
                shown: str = terminal.screen.display[terminal.screen.cursor.y]
                return shown

            def footer(*words: str) -> None:
                """Wait until the line that the cursor is in, below all others, has these words."""
                terminal.until(lambda: all(re.search(word, at()) for word in words), f"a footer with {words}")
                assert terminal.screen.cursor.x == 0 and at().rstrip() == terminal.lines()[-1]

            footer("^training  step [0-9]+  [0-9.]+ steps/s  ETTR [0-9.]+ %")
            (tmp_path / "kill").touch()
            footer("^training  ", "1 incident, last: rank 0 on n0 was killed")
            watched(tmp_path / "run", env)
            assert sum(line.startswith("training  ") for line in terminal.whole_text()) == 1, "it leaves no traces"
            terminal.resize(40)  # what was drawn a moment before may wrap, as in every terminal
            terminal.written = b""

            def widths() -> list[int]:
                shown = re.findall(rb"training[^\r]*", terminal.written.replace(b"\x1b[m", b""))
                return [count_columns(line.decode()) for line in shown[:-1]]  # the last may not be whole

            terminal.until(lambda: sum(width <= 39 for width in widths()) > 2, "the footer anew")
            assert widths() == sorted(widths(), key=lambda width: width <= 39), "once it fits it does"
            terminal.resize(80)
            terminal.type("\x03")
            terminal.until(lambda: terminal.process.poll() is not None, "the end")
            terminal.read()
            assert terminal.process.returncode == 130
            lines = terminal.whole_text()
    finally:
        kill_marked(no_orphans)
    assert "more: holdfast report" in "".join(lines[-6:])
    assert terminal.screen.cursor.x == 0 and not terminal.lines()[-1].startswith("training ")
    printed = [line for line in lines if "] line " in line and len(line) > 45]
    assert len(printed) > 20
    assert all(re.fullmatch(r"\[rank 0\] line \d+ x{40}", line) for line in printed)
    bars = [line for line in lines if "] bar " in line]
    assert bars and all(re.fullmatch(r"\[rank 0\] bar \d+ %\|#{20}", line) for line in bars)
