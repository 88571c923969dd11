"""The zygote: a process that has imported what ranks need but has touched no GPU; ranks are forked from it.

    python -u -m holdfast.client.boot.zygote --fd N [--ranks N] [--preload MODULE]...

The node's holder of ranks starts the zygote with one end of a packet socket as file N. The zygote always has a child,
the usher, forked in advance. The usher takes the waiting requests, gives each a rank and ends. The kernel then makes
the ranks children of the holder, a subreaper. When there has been no request for a while, the usher forks as many
processes in advance as the node has ranks: the unborn. One that gets a request becomes its rank. So ranks that
start while the processors are busy wait for no fork, and later ranks for one, not two.
"""

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from holdfast.client.boot import import_recorder, release_import_paths
from holdfast.client.boot.forked_rank import RankFiles, await_holder, become_rank
from holdfast.client.boot.script_runner import run_script
from holdfast.client.training.logger_hooks import follow_loggers
from holdfast.client.training.progress import here
from holdfast.linux import own_process_settings
from holdfast.wire.holder_zygote_messages import (
    PACKET_BYTES,
    ForkFailed,
    ForkRank,
    RankForked,
    ZygoteReady,
    encode,
    to_zygote,
)

FIRST_PRELOAD = ("torch",)  # what every script imports before it prints anything
# What DDP and FSDP2 scripts import besides up to the end of their first steps, a checkpoint and a data loader
# included: found by comparing sys.modules. The first alone takes longer than torch, and brings the second.
LATER_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
)
DEFAULT_PRELOAD = (*FIRST_PRELOAD, *LATER_PRELOAD)

_NO_MORE = 3  # exit code of an usher whose socket has ended
_CALM_S = 0.5  # without a request, until ranks are forked in advance: ranks that start just now need the processors
_NEXT_S = 0.005  # while there are such forks, the next request is awaited for so long; a node's requests come together


class RankBirth(NamedTuple):
    """The rank that a freshly forked process will become."""

    request: ForkRank
    files: RankFiles
    go: int  # says when it is the holder's child, and known to it


class UnbornRank(NamedTuple):
    """A process forked in advance, which becomes the rank that it gets a request for."""

    pid: int
    sock: socket.socket  # takes one request and its open files


class ZygoteLink(NamedTuple):
    """The zygote's connection to the holder, and what forked ranks undo: environment variables and stray modules."""

    socket: socket.socket
    holder: int
    coerced: dict[str, str]  # variables that this interpreter and its imports set, and those of a fresh one would
    strays: tuple[str, ...] = ()  # modules that may be of a user's tree
    ranks: int = 0  # that the node has


def warm_up(fd: int, preload: list[str], ranks: int) -> ZygoteLink:
    """Import the modules to preload, then tell the zygote's parent process that the zygote is ready."""
    holder = os.getppid()
    own_process_settings.die_with_parent(holder)
    own_process_settings.close_all_but({0, 1, 2, fd})
    serving = ZygoteLink(socket.socket(fileno=fd), holder, _coerced_locale(), ranks=ranks)
    serving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
    if not sys.flags.safe_path:
        sys.path.pop(0)  # in the place of the working directory; a script has its own folder there
    gc.disable()  # imports make no garbage worth looking for, and a collection would touch every page
    before = frozenset(os.environ)
    skipped = tuple(name for name in preload if not _try_import(name))
    coerced = serving.coerced | {name: value for name, value in os.environ.items() if name not in before}
    if "torch.optim.optimizer" in sys.modules:
        from holdfast.client.training import optimizer_step_count, spawned_child_step_count

        optimizer_step_count.install_hooks(here)
        spawned_child_step_count.follow_spawns()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the holder's to answer
    if opened := own_process_settings.find_open_file("/dev/nvidia"):
        sys.exit(f"holdfast: a preloaded module touched a GPU ({opened}); ranks cannot be forked from here")
    strays = release_import_paths.find_strays()
    gc.collect()
    gc.freeze()
    gc.enable()
    serving.socket.send(encode(ZygoteReady(modules=len(sys.modules), threads=_lasting_threads(), skipped=skipped)))
    return serving._replace(strays=strays, coerced=coerced)


def serve_forks(serving: ZygoteLink) -> RankBirth | None:
    """Fork ranks until the holder closes the socket. Returns None in the zygote, and a RankBirth in each rank."""
    zygote = os.getpid()
    while True:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        go, start = os.pipe()
        usher = os.fork()
        if usher == 0:
            ours.close()
            os.close(start)
            own_process_settings.die_with_parent(zygote)
            birth = _run_usher(serving, theirs, go)
            serving.socket.close()  # in a rank
            theirs.close()
            return birth
        theirs.close()
        os.close(go)
        answers = []
        with ours:
            while answer := ours.recv(PACKET_BYTES):
                answers.append(answer)
        _, status = os.waitpid(usher, 0)  # from here on the ranks are the holder's
        _announce_ranks(serving.socket, answers, start)
        if status != 0:
            if os.waitstatus_to_exitcode(status) == _NO_MORE:
                return None
            sys.exit("holdfast: the zygote lost its usher")  # with requests that nobody will answer


def _announce_ranks(holder: socket.socket, answers: list[bytes], start: int) -> None:
    """Report the ranks to the holder, then let them run. A rank must not run before the holder knows of it."""
    for answer in answers:
        holder.send(answer)
    try:
        os.write(start, b"." * len(answers))
    except BrokenPipeError:
        pass  # they are dead already
    os.close(start)


def _run_usher(serving: ZygoteLink, answers: socket.socket, go: int) -> RankBirth:
    """Make a rank for every waiting request, then exit. Only the ranks return from this function."""
    unborn: list[UnbornRank] = []
    if serving.ranks and not _has_packet(serving.socket, _CALM_S):
        for _ in range(serving.ranks):
            if (birth := _fork_unborn(serving.socket, answers, go, unborn)) is not None:
                return birth
    packet = serving.socket.recv(PACKET_BYTES)
    if not packet:
        os._exit(_NO_MORE)
    while packet:
        request = to_zygote(packet)
        try:
            files = RankFiles.open(request)
            pid = _give_birth(unborn, packet, files) or os.fork()
            if pid == 0:
                return RankBirth(request, files, go)
            files.close()
            answers.send(encode(RankForked(key=request.key, pid=pid)))
        except OSError as e:
            answers.send(encode(ForkFailed(key=request.key, error=str(e))))
        packet = b""
        if _has_packet(serving.socket, _NEXT_S if unborn else 0.0):
            packet = serving.socket.recv(PACKET_BYTES)
    os._exit(0)


def _has_packet(sock: socket.socket, within_s: float) -> bool:
    return bool(select.select([sock], [], [], within_s)[0])


def _fork_unborn(zygote: socket.socket, answers: socket.socket, go: int, unborn: list[UnbornRank]) -> RankBirth | None:
    """Fork a process that becomes a rank when it gets a request, and add it to `unborn`; without memory for it, do
    nothing. Only such a rank returns a RankBirth. The process ends when the usher closes its socket, or ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        unborn.append(UnbornRank(pid, ours))
        return None
    for sock in (zygote, answers, ours, *(one.sock for one in unborn)):
        sock.close()  # whoever reads at its other end hears of an end that we would keep open
    packet, files, _, _ = socket.recv_fds(theirs, PACKET_BYTES, len(RankFiles._fields))
    if not packet:
        os._exit(0)
    theirs.close()
    return RankBirth(to_zygote(packet), RankFiles(*files), go)


def _give_birth(unborn: list[UnbornRank], packet: bytes, files: RankFiles) -> int:
    """Give a request and its open files to a process forked in advance; return its pid, or 0 if there is none."""
    while unborn:
        one = unborn.pop()
        with one.sock:
            try:
                socket.send_fds(one.sock, [packet], list(files))
            except OSError:
                continue  # somebody has killed it
        return one.pid
    return 0


def _try_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name == name and name in DEFAULT_PRELOAD:
            return True  # not every release of torch has them all, and where they are missing nobody needs them
        print(f"holdfast: {name} is not preloaded: {e!r}", file=sys.stderr)
        return False
    except (Exception, SystemExit) as e:  # it is the user's, and may raise anything
        print(f"holdfast: {name} is not preloaded: {e!r}", file=sys.stderr)
        return False
    return True


def _lasting_threads() -> int:
    """Return how many threads remain after a trial fork. Libraries such as OpenBLAS end their threads at a fork."""
    if own_process_settings.count_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return own_process_settings.count_threads()


def _coerced_locale() -> dict[str, str]:
    started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0] for entry in started_with}
    return {name: os.environ[name] for name in ("LC_CTYPE",) if name in os.environ and name.encode() not in names}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast.client.boot.zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--preload", action="append", default=[])
    return parser.parse_args()


def main() -> None:
    args = _parse_arguments()
    serving = warm_up(args.fd, args.preload, args.ranks)
    if (birth := serve_forks(serving)) is None:
        return
    try:
        become_rank(birth.request, birth.files, serving.coerced, serving.strays)
        await_holder(birth.go, serving.holder)
    except OSError as e:
        print(f"holdfast: the rank could not start: {e}", file=sys.stderr)
        os._exit(127)
    here.begin_rank(import_recorder.watch_imports(os.environ))
    follow_loggers(here)
    # Called from here and not from further down, so that stacks show little of us below the script.
    run_script(birth.request.argv, birth.request.module, birth.request.path)


if __name__ == "__main__":
    main()
