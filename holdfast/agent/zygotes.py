"""The holder's zygotes: one to fork ranks from, and one with more modules that replaces the first once it is warm."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.agent.system import child_process
from holdfast.agent.zygote_log import ZygoteLog
from holdfast.core.incident.incident_text import describe_exit
from holdfast.linux import preimported_fork
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.wire import holder_messages, holder_zygote_messages
from holdfast.wire.holder_messages import PreloadZygote, StartRefused, ZygoteWarmed

_TRIES = 2  # of a zygote that ends before it is warm


class Zygote:
    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.threads = 0  # known once it is warm
        self.learned: tuple[str, ...] = ()  # modules of the script that it has imported
        self.forking: set[str] = set()

    @property
    def warm(self) -> bool:
        return self.threads > 0


class ZygotePorts(NamedTuple):
    """Callbacks that zygotes get from their holder."""

    watch: Callable[[socket.socket, Callable[[socket.socket], None]], None]  # call back when there is something to read
    watch_log: Callable[[ZygoteLog], None]  # copy what it gets until nobody can write to it any more
    drop: Callable[[socket.socket], None]  # watch it no longer
    on_forked: Callable[[str, int], None]  # a rank has this pid
    send_agent: Callable[[holder_messages.ToAgent], None]
    close_inherited: Callable[[socket.socket], None]  # in a fork: close what the holder has open, but for this


class Zygotes:
    """Starts and replaces zygotes."""

    def __init__(self, node_dir: Path, ports: ZygotePorts) -> None:
        self._ports = ports
        self._node_dir = node_dir
        self._now: Zygote | None = None
        self._next: Zygote | None = None
        self._retired: set[int] = set()  # ended by themselves presently
        self._preload: PreloadZygote | None = None  # of the one that ranks are forked from
        self._better: PreloadZygote | None = None  # of the next one
        self._tries = 0
        self._ended = ""  # how the last one did that was not meant to
        self._done_without = ""  # why some modules are not in the one that is being made

    @property
    def warm(self) -> bool:
        return self._now is not None and self._now.warm

    @property
    def key(self) -> str:
        """The key of the environment that the zygote was started with; empty if no zygote was asked for."""
        return self._preload.key if self._preload else ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the newest zygote was asked to import."""
        asked = self._better or self._preload
        return asked.names() if asked else ()

    @property
    def forking(self) -> bool:
        return any(z is not None and z.forking for z in (self._now, self._next))

    @property
    def pids(self) -> set[int]:
        return {z.pid for z in (self._now, self._next) if z is not None} | self._retired

    def ensure_zygote(self, preload: PreloadZygote) -> None:
        """Start a zygote with these modules. A warm zygote with the same key is used until the new one is warm."""
        if self._now and self._now.warm and preload.key == self.key:
            self._kill_zygote(self._next)
            self._better, self._next = preload, self._start_zygote(preload)
            return
        for key in sorted(self._now.forking) if self._now else ():
            self._ports.send_agent(StartRefused(key=key, error="another zygote is starting"))
        self._retire_zygote(self._now)
        self._kill_zygote(self._next)
        self._next = self._better = None
        self._preload, self._tries = preload, 1
        self._now = self._start_zygote(preload)

    def fork(self, request: holder_zygote_messages.ForkRank) -> None:
        if self._now is None or not self._now.warm:
            self._ports.send_agent(StartRefused(key=request.key, error="no zygote is ready"))
            return
        self._now.forking.add(request.key)
        try:
            self._now.sock.send(holder_zygote_messages.encode(request))
        except OSError as e:
            self._on_lost(f"cannot be reached ({e})")

    def on_child_exit(self, pid: int, code: int) -> bool:
        """Handle the exit of a child process; return whether it was a zygote of ours."""
        if pid in self._retired:
            self._retired.discard(pid)
            return True
        if self._next and pid == self._next.pid:
            self._kill_zygote(self._next)
            self._next = None
            detail, kept = f"the old zygote stays: the new one {describe_exit(code)}", self._now
            learned = kept.learned if kept else ()
            self._ports.send_agent(ZygoteWarmed(ok=self.warm, detail=detail, key=self.key, learned=learned))
            return True
        if self._now and pid == self._now.pid:
            self._on_lost(describe_exit(code))
            return True
        return False

    def _start_zygote(self, preload: PreloadZygote) -> Zygote:
        ours, theirs = holder_messages.make_socket_pair()
        log = ZygoteLog(self._node_dir / "zygote.log", preload.env)
        self._ports.watch_log(log)  # before the fork, which closes all that is watched
        preloads = [word for module in preload.names() for word in ("--preload", module)]
        end = theirs.detach()
        args = ("--fd", str(end), "--ranks", str(preload.ranks), *preloads)
        program = Program(module="holdfast.client.boot.zygote", args=args, env=preload.env, bare=True)
        files = OpenFiles(stdout=log.far_end, stderr=log.far_end, keep=(end,))
        pid = preimported_fork.fork(program, files, lambda: self._ports.close_inherited(ours), tied=True)
        os.close(log.far_end)
        os.close(end)
        ours.settimeout(10.0)
        self._ports.watch(ours, self._on_packet)
        return Zygote(pid, ours)

    def _kill_zygote(self, old: Zygote | None) -> None:
        if old is not None:
            self._ports.drop(old.sock)
            child_process.signal_group(old.pid, signal.SIGKILL)

    def _retire_zygote(self, old: Zygote | None) -> None:
        """Close a warm zygote's socket, so that it ends by itself. Kill a zygote that is cold or still forks ranks."""
        if old is None or old.forking or not old.warm:
            self._kill_zygote(old)
            return
        self._retired.add(old.pid)
        self._ports.drop(old.sock)

    def _on_lost(self, why: str) -> None:
        lost, self._now, self._ended = self._now, None, why
        self._kill_zygote(lost)
        for key in sorted(lost.forking) if lost else ():
            self._ports.send_agent(StartRefused(key=key, error=f"the zygote {why}"))
        if self._preload and self._tries < _TRIES:
            self._tries += 1
            self._now = self._start_zygote(self._preload)
        else:
            detail = f"the zygote does not stay up (it {why}); see zygote.log"
            self._ports.send_agent(ZygoteWarmed(ok=False, detail=detail, key=self.key, lost=why))

    def _on_packet(self, sock: socket.socket) -> None:
        packet = child_process.receive_packet(sock, holder_messages.PACKET_BYTES)
        if not packet:
            self._ports.drop(sock)  # it is reaped presently
            return
        source = self._next if self._next and self._next.sock is sock else self._now
        if source is None:
            return
        match holder_zygote_messages.from_zygote(packet):
            case holder_zygote_messages.RankForked(key=key, pid=pid):
                source.forking.discard(key)
                self._ports.on_forked(key, pid)
            case holder_zygote_messages.ForkFailed(key=key, error=error):
                source.forking.discard(key)
                self._ports.send_agent(StartRefused(key=key, error=error))
            case holder_zygote_messages.ZygoteReady() as warm:
                self._on_warm(source, warm)
        if self._next and self._next.warm:
            self._swap_zygotes()

    def _on_warm(self, source: Zygote, warm: holder_zygote_messages.ZygoteReady) -> None:
        left_out = f"; could not import {', '.join(warm.skipped)}" if warm.skipped else ""
        detail = f"{warm.modules} modules{left_out}{self._done_without}"
        self._done_without = ""
        if source is self._next and self._now and warm.threads > self._now.threads:
            # Threads do not survive a fork: what they hold stays locked for ever in the rank.
            self._kill_zygote(source)
            self._next, better = None, self._better
            detail = f"the old zygote stays: with more modules the new one had {warm.threads} threads"
            if better and better.learned and set(better.modules) - set(self._preload.modules if self._preload else ()):
                self._done_without = f"; without the script's own imports, because these start threads ({warm.threads})"
                plain = msgspec.structs.replace(better, learned=())
                self._better, self._next = plain, self._start_zygote(plain)
                return
        else:
            asked = self._better if source is self._next else self._preload
            source.learned = tuple(name for name in asked.learned if name not in warm.skipped) if asked else ()
            source.threads, self._tries = max(warm.threads, 1), 1
        learned = source.learned if source.warm or not self._now else self._now.learned
        self._ports.send_agent(ZygoteWarmed(ok=True, detail=detail, key=self.key, lost=self._ended, learned=learned))
        self._ended = ""

    def _swap_zygotes(self) -> None:
        """Replace the zygote with the new one, unless the old one is still forking ranks."""
        if self._now and self._now.forking:
            return
        self._retire_zygote(self._now)
        self._now, self._next = self._next, None
        self._preload = self._better  # one that comes in its place is to have as much
