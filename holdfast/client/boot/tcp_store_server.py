"""Runs the job's TCPStore servers in a separate process, one for each generation, because old keys break restarts.

    python -m holdfast.client.boot.tcp_store_server RUN_DIR LOST_S HOST

Controllers send one line of JSON at a time to RUN_DIR/store.sock. The answer to {"open": generation} is {"port": port};
the answer to {"close": generation}, {"quit": true} or {"leave": true} is {}. Unlike a store in a rank, this process
outlives ranks and controllers; it ends LOST_S seconds after the last controller has disconnected. If no other one can
come, because a controller on another host has the run or store.sock leads elsewhere by now, it serves the ranks that
are connected, and ends with the last of them.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch.distributed import TCPStore

from holdfast.decoding import from_json
from holdfast.linux.tcp_connection_count import count_connections
from holdfast.logs.secret_masking import keep_masked_log, make_secret_masker
from holdfast.wire import unix_sockets

_LOOK_S = 1.0  # while no controller is connected


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    open: int | None = None
    close: int | None = None
    quit: bool = False
    leave: bool = False


class StoreServers:
    """The TCPStore servers by generation."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stores: dict[int, TCPStore] = {}
        self._own: dict[int, int] = {}  # connections that each server has to itself, by port
        self._newest = -1

    def open(self, generation: int) -> int:
        """Return the port of this generation's server; opening a new generation closes all other servers.

        A negative number stands for a group that runs beside the generations, such as a replay. Raises ValueError if
        a later generation was opened already.
        """
        if generation < 0:
            if generation not in self._stores:
                self._stores[generation] = self._start_server()
            return self._stores[generation].port
        if generation < self._newest:
            raise ValueError(f"generation {generation} is over: the store serves generation {self._newest}")
        if generation not in self._stores:
            self._stores = {generation: self._start_server()}
            self._newest = generation
        return self._stores[generation].port

    def close(self, generation: int) -> None:
        self._stores.pop(generation, None)

    def have_ranks(self) -> bool:
        """Return whether a rank is connected to any server; also if the kernel does not tell."""
        try:
            return any(count_connections(store.port) > self._own.get(store.port, 0) for store in self._stores.values())
        except OSError:
            return True

    def _start_server(self) -> TCPStore:
        store = _start_server(self._host)
        with contextlib.suppress(OSError):
            self._own[store.port] = count_connections(store.port)  # nobody else knows of it yet
        return store


def _start_server(host: str) -> TCPStore:
    # Given only a port it would listen on every address of the machine.
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen(4096)
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class StoreDesk:
    """Answers controllers. It ends when a controller sends quit, or when none has been connected for a while."""

    def __init__(self, stores: StoreServers, is_reachable: Callable[[], bool]) -> None:
        """`is_reachable` says whether another controller can still connect."""
        self._stores = stores
        self._is_reachable = is_reachable
        self._controllers = 0
        self._quit = self._left = False
        self._changed = asyncio.Event()

    async def wait_for_quit(self, lost_s: float) -> None:
        while not self._quit:
            self._changed.clear()
            if self._controllers:
                await self._changed.wait()
            elif not await self._await_controller(lost_s):
                return

    async def _await_controller(self, lost_s: float) -> bool:
        """Wait until a controller connects. Return False if none does within `lost_s`, or if none can and no rank is
        connected."""
        clock = asyncio.get_running_loop().time
        until = clock() + lost_s
        while not self._changed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(until - clock(), _LOOK_S)):
                    await self._changed.wait()  # first: one may be about to connect
                    break
            if clock() >= until or (self._is_abandoned() and not self._stores.have_ranks()):
                return False
        return True

    def _is_abandoned(self) -> bool:
        return self._left or not self._is_reachable()

    async def serve_controller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._change_count(1)
        self._left = False
        try:
            async for line in reader:
                writer.write(json.dumps(self._answer_line(line)).encode() + b"\n")
                await writer.drain()
                if self._quit:
                    break
        except (OSError, ValueError):
            pass  # it went away, or sent a line without end
        finally:
            writer.close()
            self._change_count(-1)

    def _answer_line(self, line: bytes) -> dict[str, object]:
        try:
            question = from_json(line, StoreRequest)
            if question.open is not None:
                return {"port": self._stores.open(question.open)}
        except (msgspec.DecodeError, ValueError, OSError) as e:
            return {"error": str(e)}
        if question.close is not None:
            self._stores.close(question.close)
        self._quit = self._quit or question.quit
        self._left = self._left or question.leave  # until a controller connects
        return {}

    def _change_count(self, by: int) -> None:
        self._controllers += by
        self._changed.set()


async def run(run_dir: Path, lost_s: float, host: str) -> None:
    path = run_dir / "store.sock"
    listener = unix_sockets.listen(path)
    own = os.stat(path)

    def is_ours() -> bool:
        """Return whether the path still leads here: on a shared file system another host may have replaced it."""
        try:
            return os.path.samestat(os.stat(path), own)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a file system that does not answer now

    desk = StoreDesk(StoreServers(host), is_ours)
    server = await asyncio.start_unix_server(desk.serve_controller, sock=listener)
    try:
        await desk.wait_for_quit(lost_s)
    finally:
        if is_ours():
            path.unlink(missing_ok=True)
        server.close()


def main() -> None:
    keep_masked_log(logging.StreamHandler(sys.stderr), make_secret_masker())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
    try:
        os.setsid()
    except PermissionError:
        pass  # it leads a group or a session already
    run_dir, lost_s, host = sys.argv[1:]
    asyncio.run(run(Path(run_dir), float(lost_s), host))


if __name__ == "__main__":
    main()
