"""Runs the job's TCPStore servers in a separate process, one for each generation, because old keys break restarts.

    python -m holdfast.client.boot.tcp_store_server RUN_DIR LOST_S HOST

Controllers send one line of JSON at a time to RUN_DIR/store.sock. The answer to {"open": generation} is {"port": port};
the answer to {"close": generation} or {"quit": true} is {}. Unlike a store in a rank, this process outlives ranks and
controllers; it ends LOST_S seconds after the last controller has disconnected.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
from torch.distributed import TCPStore

from holdfast.core.decoding import from_json
from holdfast.wire import unix_sockets


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    open: int | None = None
    close: int | None = None
    quit: bool = False


class StoreServers:
    """The TCPStore servers by generation."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stores: dict[int, TCPStore] = {}
        self._newest = -1

    def open(self, generation: int) -> int:
        """Return the port of this generation's server; opening a new generation closes all other servers.

        A negative number stands for a group that runs beside the generations, such as a replay. Raises ValueError if
        a later generation was opened already.
        """
        if generation < 0:
            if generation not in self._stores:
                self._stores[generation] = _start_server(self._host)
            return self._stores[generation].port
        if generation < self._newest:
            raise ValueError(f"generation {generation} is over: the store serves generation {self._newest}")
        if generation not in self._stores:
            self._stores = {generation: _start_server(self._host)}
            self._newest = generation
        return self._stores[generation].port

    def close(self, generation: int) -> None:
        self._stores.pop(generation, None)


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

    def __init__(self, stores: StoreServers) -> None:
        self._stores = stores
        self._controllers = 0
        self._quit = False
        self._changed = asyncio.Event()

    async def wait_for_quit(self, lost_s: float) -> None:
        while not self._quit:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if self._controllers else lost_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def serve_controller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._change_count(1)
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
        return {}

    def _change_count(self, by: int) -> None:
        self._controllers += by
        self._changed.set()


async def run(run_dir: Path, lost_s: float, host: str) -> None:
    path = run_dir / "store.sock"
    desk = StoreDesk(StoreServers(host))
    server = await asyncio.start_unix_server(desk.serve_controller, sock=unix_sockets.listen(path))
    try:
        await desk.wait_for_quit(lost_s)
    finally:
        path.unlink(missing_ok=True)
        server.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
    try:
        os.setsid()
    except PermissionError:
        pass  # it leads a group or a session already
    run_dir, lost_s, host = sys.argv[1:]
    asyncio.run(run(Path(run_dir), float(lost_s), host))


if __name__ == "__main__":
    main()
