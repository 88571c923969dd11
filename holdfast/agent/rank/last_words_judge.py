"""The judge: a process beside the agent that reads a failed rank's last words and finds the cause in them.

A script may print anything, and a pattern may search a line for very long while it holds the interpreter, so a thread
would block the agent. The judge loads the catalog once and has a fork for every rank that ended badly. A fork is killed
at its deadline. The judge is forked from the agent before the agent has any threads, and dies with it.
"""

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from holdfast.agent.rank import last_words
from holdfast.agent.system import child_process
from holdfast.config import ConfigError, WordLimits
from holdfast.core.detect.crash import alarm_of, alarm_without_words
from holdfast.core.incident.full_disks import DISK_FULL, blame_disk
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.decoding import Content, make_decoder
from holdfast.linux import own_process_settings, preimported_fork
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.logs import catalog_files
from holdfast.logs.secret_masking import Masker, argv_secrets, keep_masked_log, make_secret_masker
from holdfast.model.detector_alarm import Alarm
from holdfast.model.observation import Exit
from holdfast.wire import holder_messages, run_and_node_specs

DEADLINE_S = 2.0  # of a processor, for one rank's words: a hundred times what they take
_CALM_S = 1.0  # without a request, until a fork is made for the next one
_ROOM_BYTES = 1 << 16  # of a disk that is full: what is less than this is no room for anybody
_NUMBER = struct.Struct("<q")
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
    secrets: tuple[str, ...] = ()  # that releases have brought into its environment


class JudgeAlarm(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    id: int
    alarm: Alarm
    last: bool  # False: this is what is known without the last words, and another alarm follows


class JudgeAborted(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """The judge's message that a fork ended before it sent its last alarm; `late` if it ran past its deadline."""

    id: int
    late: bool


Answer = JudgeAlarm | JudgeAborted
encode = msgspec.msgpack.Encoder().encode
to_judge = make_decoder(msgspec.msgpack.Decoder(JudgeRequest))
to_agent: Callable[[Content], Answer] = make_decoder(msgspec.msgpack.Decoder(Answer))


def start(node_dir: Path) -> socket.socket:
    """Fork the judge; return our end of the socket to it. Call this inside `preimported_fork.run`, without threads."""
    ours, theirs = holder_messages.make_socket_pair()
    end = theirs.detach()
    program = Program(module=__name__, args=(str(node_dir), str(end)), env=dict(os.environ))
    try:
        preimported_fork.fork(program, OpenFiles(stdout=1, stderr=2, keep=(end,)), ours.close, tied=True)
    except OSError as e:
        _log.warning("cannot start the judge, so last words of ranks are not read: %s", e)
    os.close(end)
    return ours


class JudgeFork:
    """A fork of the judge, which takes one request and judges it."""

    def __init__(self, pid: int, taken: int) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.taken = taken  # a pipe from it: the number of the request that it has taken
        self.id: int | None = None  # that number


class JudgeProcess:
    """The judge in its own process. A fork waits for the next request, so that no alarm has to wait for a fork; the
    next one is made in calm, or when a request comes before that."""

    def __init__(self, sock: socket.socket, known: FailureCatalog, mask: Masker, paths: tuple[str, ...] = ()) -> None:
        """`mask` is for what an alarm quotes; it is warmed here, not in every fork. Ranks write to `paths`."""
        self._sock = sock
        self._paths = paths
        self._known = known
        self._mask = mask
        mask("")
        self._selector = selectors.DefaultSelector()
        self._waiting: JudgeFork | None = None
        self._over = False  # the agent is gone

    def run(self) -> None:
        """Serve requests until the agent is gone."""
        self._selector.register(self._sock, selectors.EVENT_READ, self._on_request)
        self._fork_for_next()
        while not self._over:
            found = self._selector.select(None if self._waiting else _CALM_S)
            for key, _ in found:
                if key.fileobj in self._selector.get_map():  # one before it may have dealt with this one as well
                    key.data()
            if not found:
                self._fork_for_next()

    def _fork_for_next(self) -> bool:
        """Fork a process that waits for the next request; return False if there is no memory for it."""
        judge, (taken, take) = os.getpid(), os.pipe()
        try:
            pid = os.fork()
        except OSError as e:
            _log.warning("the judge cannot fork a process to read last words: %s", e)
            os.close(taken)
            os.close(take)
            return False
        if pid == 0:
            own_process_settings.die_with_parent(judge)
            _judge_next(self._sock, take, self._judge_exit)
        os.close(take)
        fork = self._waiting = JudgeFork(pid, taken)
        self._selector.unregister(self._sock)
        self._selector.register(taken, selectors.EVENT_READ, lambda: self._on_taken(fork))
        self._selector.register(fork.pidfd, selectors.EVENT_READ, lambda: self._on_fork_exit(fork))
        return True

    def _on_request(self) -> None:
        """A request came while no fork waits."""
        if self._fork_for_next():
            return
        if packet := child_process.receive_packet(self._sock, holder_messages.PACKET_BYTES):
            self._send_answer(JudgeAborted(id=to_judge(packet).id, late=False))
        else:
            self._over = True

    def _on_taken(self, fork: JudgeFork) -> None:
        self._selector.unregister(fork.taken)
        number = os.read(fork.taken, _NUMBER.size)
        os.close(fork.taken)
        fork.id = _NUMBER.unpack(number)[0] if number else None
        self._waiting = None
        self._selector.register(self._sock, selectors.EVENT_READ, self._on_request)

    def _on_fork_exit(self, fork: JudgeFork) -> None:
        if fork is self._waiting:
            self._on_taken(fork)
        self._selector.unregister(fork.pidfd)
        os.close(fork.pidfd)
        status = os.waitpid(fork.pid, 0)[1]
        if fork.id is not None and status:
            self._send_answer(JudgeAborted(id=fork.id, late=-os.waitstatus_to_exitcode(status) in _LATE))
        self._over = self._over or (fork.id is None and status == 0)

    def _judge_exit(self, asked: JudgeRequest) -> None:
        """In a fork, send an alarm without the last words at once, then an alarm with them. What they quote is masked
        here, where it cannot hold up anybody."""
        for number in _LATE:  # by the kernel's own hand: a search that goes on for ever hears nobody
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
        self._mask.learn(asked.secrets)
        where = Path(asked.where)
        words, said = last_words.last_words(where), last_words.last_line(where)
        exit = msgspec.structs.replace(asked.exit, words=words, said=said)
        for judge, last in ((alarm_without_words, False), (alarm_of, True)):
            alarm = self._mask.mask_alarm(judge(exit, self._known))
            alarm = find_full_disk(alarm, (asked.where, *self._paths)) if last else alarm
            self._send_answer(JudgeAlarm(id=asked.id, alarm=alarm, last=last))

    def _send_answer(self, answer: Answer) -> None:
        child_process.send_packet(self._sock, encode(answer))


def _judge_next(sock: socket.socket, take: int, judge: Callable[[JudgeRequest], None]) -> None:
    """Wait for a request, tell the judge its number, judge it, and end this fork; end with 0 if the agent is gone."""
    gc.disable()  # to look through all that we share with the judge would copy it
    packet = child_process.receive_packet(sock, holder_messages.PACKET_BYTES)
    if not packet:
        os._exit(0)
    code = 1
    try:
        asked = to_judge(packet)
        os.write(take, _NUMBER.pack(asked.id))
        judge(asked)
        code = 0
    finally:
        if code:
            _log.exception("the last words of a rank are not judged:")
        os._exit(code)


def find_full_disk(alarm: Alarm, paths: Iterable[str]) -> Alarm:
    """Return the alarm of a rank that found no room, or that left no words, with the first of these paths whose disk is
    full now."""
    if alarm.klass != DISK_FULL and (alarm.klass or alarm.raised or alarm.evidence or (alarm.code or 0) <= 0):
        return alarm
    for path in paths:
        with contextlib.suppress(OSError):
            disk = os.statvfs(path)
            room = disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0
            if disk.f_blocks and room < _ROOM_BYTES:
                return blame_disk(alarm, path)
    return alarm


def load_catalog(limits: WordLimits) -> FailureCatalog:
    """Load the built-in catalog of failures, with the entries of the user's file if that file can still be read."""
    try:
        known = catalog_files.load_failures(limits)
    except ConfigError as e:
        _log.warning("%s; last words are judged by the built-in catalog alone", e)
        known = catalog_files.load_built_in()
    return warm_catalog(known)


def warm_catalog(known: FailureCatalog) -> FailureCatalog:
    known.index.compile_parts()
    alarm_of(Exit(node="", generation=0, rank=0, code=1, at=0.0, words=_USUAL), known)
    return known


def main() -> None:
    mask = make_secret_masker()
    keep_masked_log(logging.StreamHandler(sys.stderr), mask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent's, and then ours when it ends
    sock = socket.socket(fileno=int(sys.argv[2]))
    node = run_and_node_specs.read_json(Path(sys.argv[1]) / "spec.json", run_and_node_specs.NodeSpec)
    mask.learn(argv_secrets(node.entry.argv))
    JudgeProcess(sock, load_catalog(node.settings.words), mask, (node.entry.cwd, sys.argv[1])).run()


if __name__ == "__main__":
    main()
