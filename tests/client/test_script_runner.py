"""Scripts in a forked rank, beside the same scripts in a fresh interpreter: neither may be able to tell."""

import mmap
import os
import py_compile
import signal
import time
from pathlib import Path

import pytest

from holdfast.wire.rank_memory.slot_reader import read_slot
from tests.client.conftest import Zygote, fresh

SAME = {
    "argv": "import sys; print(sys.argv, sys.orig_argv)",
    "main": "print({k: v for k, v in globals().items() if k != '__loader__'}, type(__loader__), __loader__.path)",
    "globals": "print(list(globals())); import __main__; print(__main__.__dict__ is globals())",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "path": "import sys; print(sys.path, sys.flags, sys.executable, sys.prefix)",
    "environment": "import os; print(sorted(os.environ.items())); os.system('env | sort | grep -v ^_=')",
    "folder": "import os; print(os.getcwd())",
    "neighbour": "import neighbour; print(neighbour.__file__)",
    "stdin": "import sys; print(sys.stdin.isatty(), repr(sys.stdin.read()), sys.stdin.encoding)",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr): print(s, s.errors, s.line_buffering)\n"
    "print(sys.stdout.write_through, type(sys.stdout.buffer), file=sys.stderr)",
    "order": "import os, sys\nprint('a', end='')\nos.write(1, b'b')\nprint('c', end='')\nos.system('printf d')",
    "signals": "import signal\nfor s in sorted(signal.valid_signals()): print(s, signal.getsignal(s))\n"
    "print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getitimer(signal.ITIMER_REAL))\n"
    "print([l for l in open('/proc/self/status') if l.startswith(('Sig', 'Shd')) and 'Q' not in l])",
    "files": "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))",
    "command line": "print(open('/proc/self/cmdline').read().split(chr(0)), open('/proc/self/comm').read())",
    "environ file": "print(sorted(open('/proc/self/environ').read().split(chr(0))))",
    "thread": "import threading as t; print(t.current_thread() is t.main_thread(), [x.name for x in t.enumerate()])",
    "faulthandler off": "import faulthandler; print(faulthandler.is_enabled())",
    "umask and limits": "import os, resource; print(os.umask(0), resource.getrlimit(resource.RLIMIT_NOFILE))",
    "leader": "import os; print(os.getsid(0) == os.getpid() == os.getpgrp())",
    "docstring": "'''What this is.'''\nprint(__doc__)",
    "future": "from __future__ import annotations\ndef f(x: nothing): ...\nprint(f.__annotations__)",
    "no future of ours": "def f(x: nothing): ...",
    "encoding": "# -*- coding: latin-1 -*-\nprint('é', '\\udcff')",
    "return": "import atexit; atexit.register(print, 'first in, last out'); atexit.register(print, 'then')",
    "thread at exit": "import threading\nthreading.Timer(0.1, print, ['late']).start()",
    "pool at exit": "import concurrent.futures as f, time\np = f.ThreadPoolExecutor()\n"
    "p.submit(lambda: (time.sleep(.1), print('late')))\nraise SystemExit(4)",
    "exception": "def f(n):\n    raise ValueError(f'no {n}')\nf(3)",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "syntax": "print('never')\nif True print()",
    "import": "import neighbour_that_is_not_there",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError: print('deep')",
    "exit number": "import sys; sys.exit(7)",
    "exit text": "import sys; sys.exit('words')",
    "exit none": "import sys; sys.exit()",
    "exit zero": "import atexit, sys; atexit.register(print, 'bye'); sys.exit(0)",
    "exit true": "raise SystemExit(True)",
    "exit big": "raise SystemExit(1 << 80)",
    "exit negative": "raise SystemExit(-1)",
    "exit object": "raise SystemExit(['a', 'list'])",
    "exit by os": "import os; os._exit(9)",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt by signal": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "terminated": "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
    "aborted": "import os; os.abort()",
    "excepthook": "import sys\nsys.excepthook = lambda t, v, tb: print(t, v, tb, v.__traceback__ is tb)\n1 / 0",
    "bad excepthook": "import sys\ndef hook(t, v, tb): raise TypeError('mine')\nsys.excepthook = hook\n1 / 0",
    "exit in excepthook": "import sys\nsys.excepthook = lambda *a: sys.exit(5)\n1 / 0",
    "atexit on failure": "import atexit as a\na.register(print, 'one')\na.register(lambda: 1 / 0)\nraise OSError",
    "bad str": "class E(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise E",
    "print_exc": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()",
    "closed stdout": "import sys; sys.stdout.close(); raise ValueError",
    "pickle": "import pickle\nclass C: pass\nprint(pickle.loads(pickle.dumps(C())).__class__ is C, pickle.dumps(C()))",
    "dataclass": "from __future__ import annotations\nimport dataclasses, typing\n"
    "@dataclasses.dataclass\nclass D:\n    x: int = 1\nprint(D(), typing.get_type_hints(D))",
    "subprocess": "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(1)']))",
    "child exits": "import os, sys\nif os.fork() == 0: sys.exit(3)\nprint(os.wait()[1])",
}


@pytest.mark.parametrize("name", SAME)
def test_same(bare: Zygote, name: str) -> None:
    folder = bare.folder / name.replace(" ", "_")
    folder.mkdir()
    (folder / "script.py").write_text(SAME[name], encoding="latin-1" if name == "encoding" else "utf-8")
    (folder / "neighbour.py").write_text("x = 1")
    said = bare.run("script.py", "--lr", "é 1", "", cwd=folder, EXTRA="1")
    assert said == fresh(folder, "script.py", "--lr", "é 1", "", EXTRA="1")


PACKAGE = """
import sys
from . import part
print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.orig_argv, sys.path[0], part.__name__)
print(list(globals()))
if len(sys.argv) > 1: raise ValueError(sys.argv[1])
"""


@pytest.mark.parametrize("argv", [["pack"], ["pack", "failing"], ["pack.part"], ["nothing"], ["pack.nothing"]])
def test_same_modules(bare: Zygote, tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in (("__init__", ""), ("__main__", PACKAGE), ("part", "print(__name__)")):
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    said = bare.run(*argv, module=True, cwd=tmp_path)
    assert said == fresh(tmp_path, *argv, module=True)


@pytest.mark.parametrize(
    "script", ["./folder", "folder/__main__.py", "link.py", "gone.py", "./folder/../plain.py", "empty"]
)
def test_same_paths(bare: Zygote, tmp_path: Path, script: str) -> None:
    for path in ("folder/__main__.py", "far/target.py", "plain.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("import sys; print(__name__, __file__, __spec__, sys.argv, sys.path)")
    (tmp_path / "link.py").symlink_to("far/target.py")
    (tmp_path / "empty").mkdir()
    assert bare.run(script, cwd=tmp_path) == fresh(tmp_path, script)


SHADOWED = """
import json, msgspec, textwrap, os, holdfast, sys
print(json.NAME, msgspec.NAME, textwrap.NAME, os.__name__, os.path.join("a", "b"))
from holdfast.client.boot import zygote, forked_rank
print(zygote.encode.__self__.__class__.__module__, sys.modules["msgspec"].__file__)
"""


def test_a_module_of_the_users_own_comes_first(bare: Zygote, tmp_path: Path) -> None:
    """The zygote has imported others of these names, and goes on using them."""
    for name in ("msgspec", "json", "os", "holdfast"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'my {name}'")
    (tmp_path / "textwrap").mkdir()
    (tmp_path / "textwrap" / "__init__.py").write_text("NAME = 'my textwrap'")
    (tmp_path / "signal").mkdir()  # without an __init__: as ever, what is installed comes first
    (tmp_path / "script.py").write_text(SHADOWED)
    said = bare.run("script.py", cwd=tmp_path)
    assert said.out.splitlines() == [
        "my json my msgspec my textwrap os a/b",
        f"msgspec.msgpack {tmp_path}/msgspec.py",
    ], said
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("import json; print(json.NAME)")
    assert bare.run("pack", module=True, cwd=tmp_path).out == "my json\n"


def test_compiled_scripts_run(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(__file__, type(__loader__))")
    py_compile.compile(str(tmp_path / "script.py"), cfile=str(tmp_path / "script.pyc"))
    assert bare.run("script.pyc", cwd=tmp_path) == fresh(tmp_path, "script.pyc")


CHILDREN = """
import multiprocessing as mp, os, sys

class Point:
    def __init__(self, x): self.x = x

def work(point, queue):
    queue.put((point.x * 2, type(point).__name__, sys.argv[1:], os.getcwd(), mp.current_process().name))

if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(Point(21), queue))
    child.start()
    print(queue.get())
    child.join()
    print(child.exitcode, mp.active_children())
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("module", [False, True])
def test_multiprocessing(bare: Zygote, tmp_path: Path, method: str, module: bool) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    name = "script" if module else "script.py"
    said = bare.run(name, method, module=module, cwd=tmp_path)
    assert said.code == 0
    assert said == fresh(tmp_path, name, method, module=module)


def test_faulthandler_shows_the_script(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import faulthandler, os\nfaulthandler.enable()\ndef f(): os.abort()\nf()\n")
    said = bare.run("script.py", cwd=tmp_path)
    assert said.code == -6
    assert 'script.py", line 3 in f' in said.err


def test_each_rank_has_its_own_chance(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import random, multiprocessing as m\nprint(random.random(), m.current_process().authkey)"
    )
    ranks = bare.forks([{}, {}, {}], "script.py", cwd=tmp_path)
    assert len({bare.wait(rank).out for rank in ranks}) == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise ValueError('no', 1)", "ValueError: ('no', 1)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("1 +", "SyntaxError: invalid syntax"),
    ],
)
def test_a_failure_is_known_before_the_rank_ends(
    bare: Zygote, tmp_path: Path, arena: tuple[str, mmap.mmap], script: str, words: str
) -> None:
    slow = "import atexit, time; atexit.register(time.sleep, 60)\n" if script != "1 +" else ""
    (tmp_path / "script.py").write_text(slow + script)
    rank = bare.fork("script.py", cwd=tmp_path, HOLDFAST_SLOT=f"{arena[0]}:0")
    until = time.monotonic() + 20
    while (now := read_slot(arena[1], 0)) is None or not now.failed:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert (now.pid, now.failure) == (rank.pid, words)
    if slow:
        os.kill(rank.pid, signal.SIGKILL)
        assert bare.wait(rank).code == -signal.SIGKILL


@pytest.mark.parametrize("script", ["pass", "import sys; sys.exit(0)", "raise SystemExit"])
def test_a_good_end_is_no_failure(bare: Zygote, tmp_path: Path, arena: tuple[str, mmap.mmap], script: str) -> None:
    (tmp_path / "script.py").write_text(script)
    assert bare.run("script.py", cwd=tmp_path, HOLDFAST_SLOT=f"{arena[0]}:0").code == 0
    now = read_slot(arena[1], 0)
    assert now and not now.failed and now.ending == "returned"
