"""Calls a function in a child process with little memory, so that a file from a stranger can crash only the child."""

import faulthandler
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from holdfast.linux import own_process_settings

_NO_MEMORY = 3  # exit code


class ChildEndedError(Exception):
    """Says in a few words how the child ended without an answer."""


def call_in_child(call: Callable[[], bytes], most_bytes: int) -> bytes:
    """Run `call` in a fork of this process and return the result. The child may use `most_bytes` more memory than this
    process does. Raise ChildEndedError if the child fails."""
    answers, answer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(answers)
        _answer(call, most_bytes, answer, parent)
    os.close(answer)
    with open(answers, "rb") as file:
        told = file.read()
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        needs = f"needed more than {most_bytes >> 20:,} MiB of memory"
        raise ChildEndedError(needs if code == _NO_MEMORY else f"ended with {_code_text(code)}")
    return told


def _code_text(code: int) -> str:
    return f"code {code}" if code > 0 else signal.Signals(-code).name


def _answer(call: Callable[[], bytes], most_bytes: int, answer: int, parent: int) -> NoReturn:
    code = 1
    try:
        own_process_settings.reset_signals()
        own_process_settings.die_with_parent(parent)
        own_process_settings.write_no_core()
        faulthandler.disable()  # a crash is told in a word
        gc.disable()  # to look through all that we share with the parent would copy it
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = taken + most_bytes if hard == resource.RLIM_INFINITY else min(taken + most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        with open(answer, "wb") as file:
            file.write(call())
        code = 0
    except MemoryError:
        code = _NO_MEMORY
    except BaseException:  # whatever it is, the parent's frames above are not to hear of it
        sys.excepthook(*sys.exc_info())  # of our own programs, which mask what it holds
    os._exit(code)
