"""Runs a script as `__main__` in this process, in the state of a fresh interpreter."""

import atexit
import builtins
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader

from holdfast.client.boot import zygote_name_clashes
from holdfast.client.training.progress import here


def run_script(argv: Sequence[str], module: bool, path: str = "") -> None:
    """Run `python -u argv...`, or `python -u -m argv...` with `path` in place of the working directory.

    Returns when the script succeeds, so that the interpreter exits normally. A failure is first recorded in the slot,
    then printed; the process then ends at once, without the seconds of interpreter teardown.
    """
    main = _fresh_main()
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if module else []), *argv]
    sys.argv = ["-m" if module else argv[0], *argv[1:]]
    sys.modules["__main__"] = main
    failure: BaseException | None = None
    try:
        if module:
            _add_path(path or os.getcwd())
            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]
        else:
            _run_file(_absolute_path(argv[0]), main)
    except BaseException as e:
        failure = e
    if failure is not None:
        _end_process(failure)
    here.on_returned()  # threads that do not end, or something at exit, may still keep the process


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__loader__ = BuiltinImporter
    vars(main).update(__annotations__={}, __builtins__=builtins)
    return main


def _add_path(path: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, path)
        zygote_name_clashes.forget_shadowed(path)


def _absolute_path(path: str) -> str:
    return os.path.join(os.getcwd(), path)  # not normalised: the interpreter does not do that either


def _run_file(path: str, main: types.ModuleType) -> None:
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__ module
        sys.path.insert(0, path)
        zygote_name_clashes.forget_shadowed(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)  # if it is compiled already
            file.seek(0)
            source = file.read()
    except OSError as e:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {e.errno}] {e.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    _add_path(os.path.dirname(os.path.realpath(path)))
    main.__loader__ = (SourcelessFileLoader if code else SourceFileLoader)("__main__", path)
    vars(main).update(__file__=path, __cached__=None)
    naming = sys.modules.get("holdfast.client.boot.release_traceback_paths")  # imported if names may change
    name = naming.displayed_name(path, source) if naming else path
    exec(code or compile(source, name, "exec", dont_inherit=True), vars(main))


def _end_process(failure: BaseException) -> None:
    failure.__traceback__ = _without_us(failure.__traceback__)
    code = _exit_code(failure)
    if code == 0:
        return
    here.record_failure(_failure_line(failure))
    if not isinstance(failure, SystemExit):
        code = _show_failure(failure)
    elif not isinstance(failure.code, int):
        print(failure.code, file=sys.stderr)
    flushed = _finish_interpreter()
    if type(failure) is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if flushed else 120)


def _exit_code(failure: BaseException) -> int:
    if not isinstance(failure, SystemExit):
        return 1
    if failure.code is None:
        return 0
    if not isinstance(failure.code, int):
        return 1
    return failure.code & 0xFF if -(1 << 63) <= failure.code < 1 << 63 else 0xFF


def _failure_line(failure: BaseException) -> str:
    lines = traceback.format_exception_only(failure)  # survives a __str__ that raises
    return (lines[-1] if isinstance(failure, SyntaxError) else lines[0]).strip().partition("\n")[0]


def _show_failure(failure: BaseException) -> int:
    """Print the exception as the interpreter would, through any hook the script has set; return the exit code."""
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, failure.__traceback__
    try:
        sys.excepthook(type(failure), failure, failure.__traceback__)
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        return _exit_code(e)
    except BaseException as e:
        print("Error in sys.excepthook:", file=sys.stderr)
        e.__traceback__ = _without_us(e.__traceback__)
        sys.__excepthook__(type(e), e, e.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
    return 1


def _without_us(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _finish_interpreter() -> bool:
    """Do what the interpreter does at exit, except its teardown. Return False if output was lost."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        pass  # somebody does not want to wait for threads
    atexit._run_exitfuncs()
    ok = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):  # a full disk; or the script has put something else there
            ok = False
    return ok
