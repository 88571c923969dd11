"""A surviving rank's connection to its agent, and the thread that carries out the agent's requests. When the generation
is over, the thread breaks the process groups, because the main thread may be waiting in a collective. If the main
thread is still in the training function, the thread then raises Parting in it. This may happen at any line, so the main
thread takes no lock of ours, except the seal fence's for a moment while it seals a snapshot."""

import _thread
import ctypes
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.client.elastic.agent_hand_over_request import HAND_OVER
from holdfast.wire import survivor_messages, unix_sockets
from holdfast.wire.survivor_messages import PartOrder, RejoinOrder, SurvivorState

_AGAIN_S = 0.05  # until an agent that died is back
_UNWINDS_S = 0.05  # a main thread that waits in a group leaves it by itself within this


class Parting(BaseException):
    """Ends the training function when the generation is over. It may be raised at any line of the main thread."""


class Stay:
    """One call of the function that survives, in one generation. Records whether the rank is still inside the function,
    and whether the agent has told it to leave."""

    def __init__(self, rank: int, generation: int) -> None:
        self.rank, self.generation = rank, generation
        self.inside = True
        self.told = threading.Event()  # that its generation is over
        self.left = threading.Event()
        self.settled = _thread.allocate_lock()  # free once nothing more is raised in the main thread
        self.settled.acquire()


class OrderLine:
    def __init__(self, path: Path, abort_groups: Callable[[], None]) -> None:
        self._path, self._abort_groups = path, abort_groups
        self._main = _thread.get_ident()
        self._stay: Stay | None = None
        self._parked = self._closed = False
        self._orders: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._socket: socket.socket | None = None

    # --- the main thread ---------------------------------------------------------------------------------------

    def enter(self, rank: int, generation: int) -> None:
        """Note that the main thread enters the function that survives; the agent can make it leave from now on."""
        HAND_OVER.reset()
        first, self._stay, self._parked = self._stay is None, Stay(rank, generation), False
        if first:
            _thread.start_new_thread(self._run, ())
        else:
            self._send_state()

    def wait_for_seat(self, rank: int) -> dict[str, str]:
        """Offer this process to the agent for the seat of `rank`; wait for that rank's environment, and return it."""
        self._stay, self._parked = Stay(rank, 0), True
        self._stay.inside = False
        _thread.start_new_thread(self._run, ())
        return self._orders.get()

    def leave(self) -> None:
        assert self._stay is not None
        self._stay.inside = False
        HAND_OVER.finish()  # or it failed meanwhile: nothing is waited for any more
        self._stay.left.set()

    def was_told(self, patience_s: float, failure: BaseException) -> bool:
        """Return whether the function failed because the agent ended the generation; wait `patience_s` for its word."""
        stay = self._stay
        assert stay is not None
        try:
            if not isinstance(failure, Parting) and not stay.told.wait(patience_s):
                return False
            stay.settled.acquire()
            _raise_in_thread(self._main, None)
        except Parting:
            pass  # it was on its way
        return True

    def park(self) -> dict[str, str]:
        """Tell the agent that this rank has left its generation; wait for and return the next one's environment."""
        self._parked = True
        self._send_state()
        return self._orders.get()

    def close(self) -> None:
        self._closed = True
        if (line := self._socket) is not None:
            _hang_up(line)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._closed:
            with suppress(OSError, msgspec.DecodeError):  # the agent is gone; the next one is told again
                self._follow_orders()
            self._socket = None
            time.sleep(_AGAIN_S)

    def _follow_orders(self) -> None:
        with unix_sockets.connect(self._path) as line, line.makefile("rb") as orders:
            self._socket = line
            self._send_state()
            for order in orders:
                self._on_order(survivor_messages.to_rank(order))

    def _on_order(self, order: survivor_messages.SurvivorOrder) -> None:
        stay = self._stay
        match order:
            case RejoinOrder(env=env):
                self._orders.put(env)
            case PartOrder(generation=generation) if stay and generation == stay.generation and not stay.told.is_set():
                if order.hand_over and stay.inside:
                    HAND_OVER.ask(order.hand_over.leaving, order.hand_over.within_s)
                stay.told.set()
                self._abort_groups()
                if not stay.left.wait(_UNWINDS_S) and stay.inside:
                    _raise_in_thread(self._main, Parting)
                stay.settled.release()

    def _send_state(self) -> None:
        stay, line = self._stay, self._socket
        if stay is None or line is None:
            return
        state = SurvivorState(rank=stay.rank, generation=stay.generation, parked=self._parked)
        try:
            line.sendall(survivor_messages.encode(state) + b"\n")
        except OSError:
            _hang_up(line)  # the thread connects again, and then says it


def _hang_up(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _raise_in_thread(thread: int, what: type[BaseException] | None) -> None:
    """Make a thread raise this exception at its next bytecode; None cancels an exception that is still pending."""
    raised = ctypes.py_object(what) if what else ctypes.py_object()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
