"""Makes calls in a thread of its own.

NCCL and torch count the open groups of messages separately for each thread. If a message fails because its receiver has
died, torch leaves the group open, and every communicator that the same thread makes later waits for ever. So messages
over NCCL are posted by a thread that ends with its generation."""

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class _Call(Generic[Result]):
    """One call, and what came of it."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._over = _thread.allocate_lock()
        self._over.acquire()

    def run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as e:  # it is raised where the call was asked for
            self._error = e
        finally:
            self._over.release()

    def wait(self) -> Result:
        self._over.acquire()
        if self._error is not None:
            raise self._error
        return self._result[0]


class CallThread:
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="holdfast messages", daemon=True).start()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call the function in the thread, wait for it, and return its result or raise its exception."""
        call = _Call(function)
        self._calls.put(call)
        return call.wait()

    def close(self) -> None:
        """End the thread after the calls that it was given. Nobody waits for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # and the tensors that it holds
