"""The holder: parent and subreaper of agent, zygote and ranks; it keeps what must outlive an agent, and no opinions."""

import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from holdfast.agent import kernel
from holdfast.wire import holding, spec, zygote
from holdfast.wire.holding import (
    Exec,
    Forget,
    Held,
    Kill,
    Listing,
    Over,
    Preload,
    Quit,
    Refused,
    Started,
    Sweep,
    Swept,
    Warmed,
)
from holdfast.wire.slot import SLOT_BYTES

_AGENT_TRIES = 10  # starts in a row that lived less than _AGENT_LIVED_S
_AGENT_LIVED_S = 5.0
_ZYGOTE_TRIES = 2
_END_S = 10.0
_SWEEP_S = 5.0
_SWEEP_STEP_S = 0.01


class Holder:
    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.spec = spec.read(node_dir / "spec.json", spec.NodeSpec)
        self.ranks: dict[str, Held] = {}
        self.code: int | None = None  # set: leave with this code
        arena = os.memfd_create("holdfast-slots")
        os.ftruncate(arena, SLOT_BYTES * self.spec.nproc)
        self.arena = f"/proc/{os.getpid()}/fd/{arena}"
        self._unclaimed: dict[int, tuple[int, float]] = {}  # ended before the zygote had told us whose they were
        self._agent: tuple[int, socket.socket] | None = None
        self._agent_at = 0.0
        self._agent_tries = 0
        self._zygote: tuple[int, socket.socket] | None = None
        self._zygote_tries = 0
        self._preload: Preload | None = None
        self._warm = False
        self._forking: set[str] = set()
        self._sweep_until: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._leave(128 + signal.SIGTERM))
        signal.signal(signal.SIGINT, lambda *_: self._leave_with_grace())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(wake, selectors.EVENT_READ, self._woken)
        (self.node_dir / "holder.pid").write_text(f"{os.getpid()}\n")
        self._start_agent()
        while self.code is None:
            for key, _ in self._selector.select(None if self._sweep_until is None else _SWEEP_STEP_S):
                key.data(key.fileobj)
            if self._sweep_until is not None:
                self._sweep(self._sweep_until)
        self._end_all()
        return self.code

    def _leave(self, code: int) -> None:
        self.code = code if self.code is None else self.code

    def _leave_with_grace(self) -> None:
        """Somebody on this host wants the node to leave: the agent ends its ranks as they should be ended."""
        if self._agent:
            os.kill(self._agent[0], signal.SIGINT)
        else:
            self._leave(128 + signal.SIGINT)

    def _woken(self, wake: socket.socket) -> None:
        wake.recv(4096)
        self._reap()

    # --- the agent ---------------------------------------------------------------------------------------------

    def _start_agent(self) -> None:
        self._agent_tries = 0 if time.monotonic() - self._agent_at > _AGENT_LIVED_S else self._agent_tries + 1
        if self._agent_tries >= _AGENT_TRIES:
            self._leave(1)
            return
        time.sleep(0.1 * self._agent_tries)
        self._agent_at = time.monotonic()
        ours, theirs = holding.pair()
        log = os.open(self.node_dir / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        argv = [sys.executable, "-m", "holdfast.agent.main", str(self.node_dir), str(theirs.fileno())]
        pid = _start(argv, dict(os.environ), None, (log, log), keep=theirs.fileno())
        os.close(log)
        theirs.close()
        ours.settimeout(10.0)
        self._agent = (pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, self._asked)
        self._tell(Listing(ranks=tuple(self.ranks.values()), arena=self.arena, warm=self._warm))

    def _tell(self, message: holding.ToAgent) -> None:
        if self._agent:
            try:
                self._agent[1].send(holding.encode(message))
            except OSError:
                pass  # the agent is gone; the next one gets the listing

    def _asked(self, sock: socket.socket) -> None:
        packet = _receive(sock)
        if not packet:
            self._drop(sock)  # it is reaped presently
            return
        match holding.to_holder(packet):
            case Exec() as request:
                self._exec(request)
            case zygote.Fork() as request:
                self._fork(request)
            case Preload() as request:
                self._preload, self._zygote_tries = request, 0
                self._start_zygote()
            case Kill(key=key, signal=number):
                if key in self.ranks and self.ranks[key].code is None:
                    _signal_group(self.ranks[key].pid, number)
            case Forget(key=key):
                if key in self.ranks and self.ranks[key].code is not None:
                    del self.ranks[key]
            case Sweep():
                self._sweep_until = time.monotonic() + _SWEEP_S
            case Quit(code=code):
                self._leave(code)

    # --- ranks -------------------------------------------------------------------------------------------------

    def _exec(self, request: Exec) -> None:
        logs: list[int] = []
        try:
            for path in (request.stdout, request.stderr):
                logs.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            pid = _start(list(request.argv), request.env, request.cwd, (logs[0], logs[1]))
        except OSError as e:
            self._tell(Refused(key=request.key, error=str(e)))
        else:
            self._started(request.key, pid)
        finally:
            for fd in logs:
                os.close(fd)

    def _started(self, key: str, pid: int) -> None:
        self.ranks[key] = Held(key=key, pid=pid)
        self._tell(Started(key=key, pid=pid))
        if pid in self._unclaimed:
            self._over(key, *self._unclaimed.pop(pid))

    def _over(self, key: str, code: int, at: float) -> None:
        self.ranks[key] = msgspec.structs.replace(self.ranks[key], code=code, at=at)
        if code != 0:
            _signal_group(self.ranks[key].pid, signal.SIGKILL)
        self._tell(Over(rank=self.ranks[key]))

    def _sweep(self, until: float) -> None:
        """Kill what nobody owns any more; what it leaves behind in turn is our child by the next look."""
        self._reap()
        keep = {rank.pid for rank in self.ranks.values() if rank.code is None}
        keep |= {owner[0] for owner in (self._agent, self._zygote) if owner}
        left = [pid for pid in kernel.children() if pid not in keep]
        if left and time.monotonic() < until:
            _kill_all(left)
            return
        self._sweep_until = None
        self._tell(Swept(left=tuple(left)))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended(pid, os.waitstatus_to_exitcode(status), time.time())

    def _ended(self, pid: int, code: int, at: float) -> None:
        key = next((r.key for r in self.ranks.values() if r.pid == pid and r.code is None), None)
        if key is not None:
            self._over(key, code, at)
        elif self._agent and pid == self._agent[0]:
            self._drop(self._agent[1])  # unheard: what it still asked for, its successor will be told to do again
            self._agent = None
            if self.code is None:
                self._start_agent()
        elif self._zygote and pid == self._zygote[0]:
            self._zygote_lost(f"it ended with code {code}")
        elif self._forking:
            self._unclaimed[pid] = (code, at)

    # --- the zygote --------------------------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        self._close_zygote()
        assert self._preload is not None
        self._zygote_tries += 1
        ours, theirs = holding.pair()
        log = os.open(self.node_dir / "zygote.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        argv = [sys.executable, "-u", "-m", "holdfast.client.zygote", "--fd", str(theirs.fileno())]
        for module in self._preload.modules:
            argv += ["--preload", module]
        pid = _start(argv, self._preload.env, None, (log, log), keep=theirs.fileno())
        os.close(log)
        theirs.close()
        ours.settimeout(10.0)
        self._zygote = (pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, self._zygote_said)

    def _close_zygote(self) -> None:
        if self._zygote:
            pid, sock = self._zygote
            self._zygote, self._warm = None, False
            self._drop(sock)
            _signal_group(pid, signal.SIGKILL)

    def _drop(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._selector.unregister(sock)
            sock.close()

    def _zygote_lost(self, why: str) -> None:
        self._close_zygote()
        for key in sorted(self._forking):
            self._tell(Refused(key=key, error=f"the zygote went away: {why}"))
        self._forking.clear()
        self._unclaimed.clear()
        if self._zygote_tries < _ZYGOTE_TRIES:
            self._start_zygote()
        else:
            self._tell(Warmed(ok=False, detail=f"the zygote does not stay up ({why}); see zygote.log"))

    def _fork(self, request: zygote.Fork) -> None:
        if not self._zygote or not self._warm:
            self._tell(Refused(key=request.key, error="there is no zygote"))
            return
        self._forking.add(request.key)
        try:
            self._zygote[1].send(zygote.encode(request))
        except OSError as e:
            self._zygote_lost(str(e))

    def _zygote_said(self, sock: socket.socket) -> None:
        packet = _receive(sock)
        if not packet:
            self._drop(sock)
            return
        match zygote.from_zygote(packet):
            case zygote.Forked(key=key, pid=pid):
                self._started(key, pid)
                self._forked(key)
            case zygote.ForkFailed(key=key, error=error):
                self._forked(key)
                self._tell(Refused(key=key, error=error))
            case zygote.Warm() as warm:
                self._warm, self._zygote_tries = True, 0
                left_out = f"; could not import {', '.join(warm.skipped)}" if warm.skipped else ""
                self._tell(Warmed(ok=True, detail=f"{warm.modules} modules{left_out}"))

    def _forked(self, key: str) -> None:
        self._forking.discard(key)
        if not self._forking:
            self._unclaimed.clear()  # nobody will ask for these any more, and their pids may come again

    # --- the end -----------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Nothing below us may outlive us, however deep it was started."""
        until = time.monotonic() + _END_S
        while (left := kernel.children()) and time.monotonic() < until:
            _kill_all(left)
            self._reap_quietly()
            time.sleep(0.01)
        (self.node_dir / "holder.pid").unlink(missing_ok=True)

    def _reap_quietly(self) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _start(
    argv: list[str], env: dict[str, str], cwd: str | None, logs: tuple[int, int], keep: int | None = None
) -> int:
    """Start a program in a session of its own that dies with us; we reap it ourselves."""
    process = subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=logs[0],
        stderr=logs[1],
        start_new_session=True,
        pass_fds=() if keep is None else (keep,),
        preexec_fn=functools.partial(kernel.die_with_parent, os.getpid()),  # noqa: PLW1509 - we have no threads
    )
    process.returncode = 0  # not Popen's to wait for
    return process.pid


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(holding.PACKET_BYTES)
    except OSError:
        return b""


def main() -> int:
    kernel.become_subreaper()
    return Holder(Path(sys.argv[1])).run()


if __name__ == "__main__":
    sys.exit(main())
