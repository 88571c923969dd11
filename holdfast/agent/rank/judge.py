"""The judge: a process beside the agent that reads and judges last words, for a script may print whatever it likes.

A pattern that searches holds the interpreter, so no thread would do; and what one takes for a line nobody can promise.
The judge has the catalog at hand, forks for every rank that ended badly, and the fork is killed at its deadline. It is
a fork of the agent itself, made before the agent has any threads, and dies with it.
"""

import gc
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.agent.rank import log_files
from holdfast.agent.system import child_process
from holdfast.config import ConfigError, WordLimits
from holdfast.core.decoding import Content, make_decoder
from holdfast.core.detect.crash import FailureCatalog, alarm_of, alarm_without_words
from holdfast.linux import process_control, python_fork
from holdfast.linux.python_fork import OpenFiles, Program
from holdfast.logs import catalog_files
from holdfast.model.alarm import Alarm
from holdfast.model.signal import Exit
from holdfast.wire import holder_messages, run_files

DEADLINE_S = 2.0  # of a processor, for one rank's words: a hundred times what they take
_PATIENCE_S = 4.0  # by the clock: a busy machine, or a file that cannot be read
_LATE = (signal.SIGPROF, signal.SIGALRM)  # what ends who takes longer
# What is mostly said: the patterns that look at it are compiled once, not in every fork.
_USUAL = (
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in main',
    "ValueError: bad value",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error, socket error",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234",
    "[rank0]: [E101 10:00:00.123 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout",
    "error: failed to load the checkpoint file: No such file or directory",
)
_log = logging.getLogger("holdfast.agent")


class JudgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    exit: Exit
    where: str  # the folder of its output


class JudgeAlarm(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    id: int
    alarm: Alarm
    last: bool  # there is more to come: this is what is known without its words


class JudgeAborted(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """Who was at it has ended, and has not told all."""

    id: int
    late: bool


Answer = JudgeAlarm | JudgeAborted
encode = msgspec.msgpack.Encoder().encode
to_judge = make_decoder(msgspec.msgpack.Decoder(JudgeRequest))
to_agent: Callable[[Content], Answer] = make_decoder(msgspec.msgpack.Decoder(Answer))


def start(node_dir: Path) -> socket.socket:
    """Fork it, and return our end of the line to it; to be called below `python_fork.run`, and without threads."""
    ours, theirs = holder_messages.make_socket_pair()
    end = theirs.detach()
    program = Program(module=__name__, args=(str(node_dir), str(end)), env=dict(os.environ))
    try:
        python_fork.fork(program, OpenFiles(stdout=1, stderr=2, keep=(end,)), ours.close, tied=True)
    except OSError as e:
        _log.warning("there is no judge, and last words are not read: %s", e)
    os.close(end)
    return ours


class JudgeProcess:
    """In its own process: hears whose words are to be judged, and has each judged by a fork."""

    def __init__(self, sock: socket.socket, known: FailureCatalog) -> None:
        self._sock = sock
        self._known = known
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._forks: dict[int, tuple[int, int]] = {}  # by its pidfd: its pid, and what it was asked

    def run(self) -> None:
        """Until there is no agent any more."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._forks:
                    self._on_fork_exit(key.fd)
                elif packet := child_process.receive_packet(self._sock, holder_messages.PACKET_BYTES):
                    self._fork_for(to_judge(packet))
                else:
                    return

    def _fork_for(self, asked: JudgeRequest) -> None:
        judge = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            _log.warning("nobody can be had to judge: %s", e)
            self._send_answer(JudgeAborted(id=asked.id, late=False))
            return
        if pid == 0:
            process_control.die_with_parent(judge)
            _judge_in_fork(self._sock, asked, self._known)
        fd = os.pidfd_open(pid)
        self._forks[fd] = (pid, asked.id)
        self._selector.register(fd, selectors.EVENT_READ)

    def _on_fork_exit(self, fd: int) -> None:
        pid, id = self._forks.pop(fd)
        self._selector.unregister(fd)
        os.close(fd)
        status = os.waitpid(pid, 0)[1]
        if status:
            self._send_answer(JudgeAborted(id=id, late=-os.waitstatus_to_exitcode(status) in _LATE))

    def _send_answer(self, answer: Answer) -> None:
        child_process.send_packet(self._sock, encode(answer))


def _judge_in_fork(sock: socket.socket, asked: JudgeRequest, known: FailureCatalog) -> None:
    """In a fork, which ends here: first what is known without the words, for they may take too long."""
    for number in _LATE:  # by the kernel's own hand: a search that goes on for ever hears nobody
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
    gc.disable()  # to look through all that we share with the judge would copy it
    code = 1
    try:
        exit = msgspec.structs.replace(asked.exit, words=log_files.last_words(Path(asked.where)))
        child_process.send_packet(
            sock, encode(JudgeAlarm(id=asked.id, alarm=alarm_without_words(exit, known), last=False))
        )
        child_process.send_packet(sock, encode(JudgeAlarm(id=asked.id, alarm=alarm_of(exit, known), last=True)))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def load_catalog(limits: WordLimits) -> FailureCatalog:
    """What the user's file says too, if it can still be read: it was when the job started."""
    try:
        known = catalog_files.load_failures(limits)
    except ConfigError as e:
        _log.warning("%s; last words are judged by our own catalog", e)
        known = catalog_files.load_built_in()
    return warm_catalog(known)


def warm_catalog(known: FailureCatalog) -> FailureCatalog:
    alarm_of(Exit(node="", generation=0, rank=0, code=1, at=0.0, words=_USUAL), known)
    return known


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent's, and then ours when it ends
    sock = socket.socket(fileno=int(sys.argv[2]))
    settings = run_files.read_json(Path(sys.argv[1]) / "spec.json", run_files.NodeSpec).settings
    JudgeProcess(sock, load_catalog(settings.words)).run()


if __name__ == "__main__":
    main()
