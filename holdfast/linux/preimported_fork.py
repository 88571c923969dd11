"""Starts our own programs as forks of a process that has imported them, since a fresh interpreter takes seconds.

`run` is the outermost call of every process that forks in this way. In the child an exception unwinds to `run`, so
that none of the parent's frames remain below the program's, and the program starts as with `python -m`.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec

from holdfast.linux import own_process_settings

KEPT = "HOLDFAST_KEPT"  # in the environment: the numbers of files that were passed on, in their order
FAILED = 127  # exit code of a fork that could not become its program
_OURS = "HOLDFAST_"  # variables that nothing reads while it is imported, and others of that kind
# The interpreter sets LC_CTYPE by itself where no locale is given.
_UNREAD = frozenset({"LC_CTYPE", "KUBECONFIG"})
# As `python -m` does it, but for the working directory: a file there may have the name of a module that we need.
_NOWHERE = os.devnull
_RUN = (
    f"import sys; sys.flags.safe_path or sys.path.__setitem__(0, {_NOWHERE!r}); del sys.argv[0]; "
    "import runpy; runpy._run_module_as_main(sys.argv[0])"
)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run as `python -m module args`, with this environment and folder."""

    module: str
    args: tuple[str, ...]
    env: dict[str, str]
    cwd: str = ""  # "": as it is
    bare: bool = False  # without modules that were imported for other programs: its own are the user's to choose

    def shown_argv(self) -> list[str]:
        """Return the command line that ps and /proc show."""
        return [sys.executable, "-u", "-m", self.module, *self.args]

    def exec_command(self) -> list[str]:
        """Return the command that executes the program without importing anything from the working directory."""
        return [sys.executable, "-u", "-c", _RUN, self.module, *self.args]


class OpenFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors that stay open in a child: stdout, stderr, and `keep`, whose numbers are in HOLDFAST_KEPT."""

    stdout: int
    stderr: int
    keep: tuple[int, ...] = ()

    def kept_env(self) -> dict[str, str]:
        return {KEPT: ",".join(map(str, self.keep))} if self.keep else {}


class ForkedChild(BaseException):
    """Raised in a fresh fork to unwind the parent's frames; `run` catches it and starts the program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.program = program


_born_env: dict[str, str] = {}  # with which this interpreter was started
_born_path: list[str] = []
_others: set[str] = set()  # modules that a bare program is to be without


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run this program; in each forked child, run the program that the child was forked for."""
    _born_env.update(os.environ)
    _born_path.extend(sys.path if sys.flags.safe_path else sys.path[1:])
    program = 0  # the pid of a program that was forked; ranks, which a zygote forks in its turn, have others
    while True:
        try:
            code = main()
        except ForkedChild as reborn:
            main, program = _program_main(reborn.program), os.getpid()
            continue
        except SystemExit as e:
            if program != os.getpid() or not isinstance(e.code, int | None):
                raise
            code = e.code
        if program == os.getpid():
            _end_program(code or 0)
        sys.exit(code)


def _end_program(code: int) -> NoReturn:
    """End a forked program without freeing its imported modules. Their memory is shared with the parent, so freeing
    them would first copy every page. The copies would cost half a second of processor time for each node of a job."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or the program has closed it
            pass
    os._exit(code)


def exclude_modules(modules: set[str]) -> None:
    """Hide these modules from programs forked with `bare`, which are to have none that were imported for other
    programs. The standard library and holdfast are never hidden."""
    _others.update(name for name in modules if name.partition(".")[0] not in {*sys.stdlib_module_names, "holdfast"})


def fork(program: Program, files: OpenFiles, let_go: Callable[[], None], tied: bool) -> int:
    """Fork a program into its own session and return its pid. With `tied`, the child dies with this process.

    This process must have no threads. In the child, `let_go` must close all inherited file objects. Left open, they
    would later close descriptors that the program has reused. No caller up to `run` may catch all exceptions or clean
    up. A program whose module is not imported, or was imported with another environment, runs in a new interpreter. On
    return, ps and /proc show the child's command line.
    """
    assert _born_env, "who forks is below `run`"
    parent = os.getpid()
    shown, show = os.pipe()
    try:
        pid = os.fork()
    except OSError:  # no more processes, or no memory for one
        os.close(shown)
        os.close(show)
        raise
    if pid:
        os.close(show)
        os.read(shown, 1)  # or it has ended, or is being executed afresh
        os.close(shown)
        return pid
    try:
        os.close(shown)
        if tied:
            own_process_settings.die_with_parent(parent)
        let_go()
        _become_program(program, files, show)
        os.close(show)
    except BaseException:  # whatever it is, the parent's frames above are not to hear of it
        sys.excepthook(*sys.exc_info())  # of our own programs, which mask what it holds
        os._exit(FAILED)
    raise ForkedChild(program)


def _become_program(program: Program, files: OpenFiles, show: int) -> None:
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        for fd, standard in ((nothing.fileno(), 0), (files.stdout, 1), (files.stderr, 2)):
            os.dup2(fd, standard)
    own_process_settings.close_all_but({0, 1, 2, show, *files.keep})
    own_process_settings.reset_signals()
    if program.cwd:
        os.chdir(program.cwd)
    shown = [f"{name}={value}" for name, value in program.env.items()]
    if not _can_fork(program) or not own_process_settings.set_command_line(program.shown_argv(), shown):
        for fd in files.keep:
            os.set_inheritable(fd, True)
        os.execve(sys.executable, program.exec_command(), program.env | files.kept_env())
    coerced = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}
    os.environ.clear()
    os.environ.update(coerced | program.env | files.kept_env())


def _can_fork(program: Program) -> bool:
    """Return whether the module is imported, and was imported with the environment that the program needs."""
    return program.module in sys.modules and _imported_with(program.env) == _imported_with(_born_env)


def _imported_with(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_OURS) and name not in _UNREAD}


def _program_main(program: Program) -> Callable[[], int | None]:
    module = sys.modules[program.module]
    for name in _others if program.bare else ():
        sys.modules.pop(name, None)
    sys.argv = [module.__file__ or program.module, *program.args]
    sys.orig_argv = program.shown_argv()
    sys.path[:] = _born_path if sys.flags.safe_path else [_NOWHERE, *_born_path]
    _forget_hooks()
    main: Callable[[], int | None] = module.main
    return main


def _forget_hooks() -> None:
    """Undo what this process, as another program, has set for its own log: a zygote would hand it on to ranks."""
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.captureWarnings(False)
    logging.raiseExceptions = True
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
