"""Programs that are forked instead of executed: they cannot tell, and nobody who looks at them can."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.linux.preimported_fork import Program
from tests.cli.driver import gone, until
from tests.conftest import job_environment

pytestmark = pytest.mark.e2e

# What a program finds, but for what must differ: pids, and the age of the interpreter.
CHILD = """
import json, logging, os, signal, sys, threading, traceback, warnings
def main():
    plain = warnings.showwarning.__module__, logging.raiseExceptions, logging.root.level, len(logging.root.handlers)
    files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(),
        "env": dict(os.environ), "signals": {str(n): str(signal.getsignal(n)) for n in (2, 10, 13, 15, 17)},
        "shown": open("/proc/self/cmdline").read(), "shown_env": sorted(open("/proc/self/environ").read().split("\\0")),
        "leads": os.getsid(0) == os.getpid(), "files": files[:-1], "unbuffered": sys.stdout.write_through,
        "stdin": sys.stdin.read(), "frames": len(traceback.extract_stack()),
        "strangers": [name for name in ("msgspec", "stranger") if name in sys.modules],
        "hooks": [*plain, sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__,
                  threading.excepthook is threading.__excepthook__],
        "parent": os.getppid(), "forked": "parent_was_here" in sys.modules}))
    return int(os.environ.get("HOLDFAST_CODE", "0"))
if __name__ == "__main__":
    sys.exit(main())
"""
PARENT = """
import json, os, signal, socket, sys
from holdfast.linux import preimported_fork
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.logs.secret_masking import keep_masked_log, make_secret_masker
import logging, told, types
asked = json.loads(sys.argv[1])
def main():
    sys.modules["parent_was_here"] = sys.modules["stranger"] = types.ModuleType("stranger")
    preimported_fork.exclude_modules({"stranger"})
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    keep_masked_log(logging.StreamHandler(sys.stderr), make_secret_masker())
    ends = socket.socketpair()
    def let_go():
        if asked.get("breaks"): raise KeyError("on purpose")
        for end in ends: end.close()
    out = os.open("out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    env = dict(os.environ) | asked.get("env", {})
    program = Program(module="told", args=("a", "b"), env=env, bare=asked.get("bare", False))
    pid = preimported_fork.fork(program, OpenFiles(stdout=out, stderr=2), let_go, tied=True)
    os.write(2, b"parent\\n")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for end in ends: assert end.fileno() > 0
preimported_fork.run(main)
"""


class Pair:
    """A program, forked by another or started as anybody would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "told.py").write_text(CHILD)
        (folder / "parent.py").write_text(PARENT)

    def forked(self, **asked: Any) -> tuple[int, dict[str, Any]]:
        env = job_environment(PYTHONPATH=f"{job_environment()['PYTHONPATH']}:{self.folder}")
        words = [sys.executable, "-u", "parent.py", json.dumps(asked)]
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr.count("parent\n") == 1, "the fork went on in frames of its parent"
        out = self.folder / "out"
        return int(done.stdout), json.loads(out.read_text() or "{}")

    def executed(self) -> dict[str, Any]:
        env = job_environment(PYTHONPATH=f"{job_environment()['PYTHONPATH']}:{self.folder}")
        words = Program(module="told", args=("a", "b"), env={}).exec_command()
        found = subprocess.check_output(words, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, timeout=60)
        told: dict[str, Any] = json.loads(found)
        return told


@pytest.fixture
def pair(tmp_path: Path, no_orphans: str) -> Pair:
    return Pair(tmp_path)


def test_it_cannot_tell_the_difference(pair: Pair) -> None:
    code, forked = pair.forked()
    executed = pair.executed()
    assert code == 0 and forked["forked"] and not executed["forked"]
    apart = {"forked", "parent", "frames", "strangers", "leads", "orig_argv", "shown"}
    assert forked["orig_argv"] == forked["shown"].split("\0")[:-1] == [sys.executable, "-u", "-m", "told", "a", "b"]
    assert forked["path"][0] == os.devnull, "nothing is imported from the working directory"
    assert {k: v for k, v in forked.items() if k not in apart} == {k: v for k, v in executed.items() if k not in apart}
    assert forked["leads"] and forked["frames"] <= executed["frames"] + 2, "nothing of its parent is below it"


def test_its_exit_code_is_its_own(pair: Pair) -> None:
    assert pair.forked(env={"HOLDFAST_CODE": "7"})[0] == 7


ENDING = """
import atexit, os, sys, threading, time
who = ["parent"]
class Freed:
    def __del__(self, open=open, who=who):
        open(f"freed-{who[0]}", "w").close()
freed = Freed()
def late():
    time.sleep(0.1)
    open("late", "w").close()
def main():
    who[0] = "program"
    atexit.register(lambda: open("left", "w").close())
    if not (child := os.fork()):
        who[0] = "rank"
        sys.exit(0)
    os.waitpid(child, 0)
    threading.Thread(target=late).start()
    sys.exit(5)
"""


def test_it_ends_in_order_but_frees_nothing_and_what_it_forks_ends_as_ever(pair: Pair) -> None:
    (pair.folder / "told.py").write_text(ENDING)
    assert pair.forked()[0] == 5
    left = {path.name for path in pair.folder.iterdir()}
    assert left >= {"late", "left", "freed-rank", "freed-parent"}
    assert "freed-program" not in left, "to free what its parent shares is to copy it"


def test_what_would_have_been_imported_otherwise_is_executed(pair: Pair) -> None:
    code, told = pair.forked(env={"LD_SOMETHING": "1"})
    assert code == 0 and not told["forked"]
    assert told["env"]["LD_SOMETHING"] == "1" and told["argv"][1:] == ["a", "b"] and told["leads"]


def test_a_bare_program_finds_only_its_own_modules(pair: Pair) -> None:
    assert "stranger" in pair.forked()[1]["strangers"]
    (pair.folder / "out").unlink()
    assert "stranger" not in pair.forked(bare=True)[1]["strangers"]


def test_one_that_breaks_on_its_way_ends(pair: Pair) -> None:
    assert pair.forked(breaks=True) == (127, {})


TIED = """
import os, sys, time
from holdfast.linux import preimported_fork
from holdfast.linux.preimported_fork import OpenFiles, Program
import sleeper
def main():
    program = Program(module="sleeper", args=(), env=dict(os.environ))
    files = OpenFiles(stdout=2, stderr=2)
    pids = [preimported_fork.fork(program, files, lambda: None, tied=tied) for tied in (True, False)]
    print(*pids, flush=True)
    time.sleep(60)
preimported_fork.run(main)
"""


def test_one_that_is_tied_dies_with_its_parent(tmp_path: Path, no_orphans: str) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ndef main():\n    time.sleep(60)\n")
    (tmp_path / "parent.py").write_text(TIED)
    words = [sys.executable, "parent.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=job_environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        tied, free = map(int, parent.stdout.readline().split())
        assert not gone(tied) and not gone(free)
        parent.kill()
    until(lambda: gone(tied), "the end of the one that is tied")
    assert not gone(free)
    os.kill(free, 9)
