"""Starts and watches the store process, which runs one TCPStore server per generation and outlives the controller."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.linux.regular_files import open_log
from holdfast.wire import folder_use_lock, program_fork_server, unix_sockets
from holdfast.wire.program_fork_server import ProgramProcess

_UP_S = 120.0
_QUIT_S = 2.0
_ASKED = 3  # times, by one question
_STARTS = 3  # of the process, for one question
_LOOK_S = 0.02
_WATCH_S = 0.5

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StoreProcess:
    """Keeps the store process running. That process opens one TCPStore server per generation. It ends some time after
    the last controller has disconnected, so every controller stays connected to it."""

    def __init__(self, run_dir: Path, host: str, lost_s: float, env: dict[str, str], server: Path | None) -> None:
        """`server` is the socket of a fork server, which has already imported torch; None if there is none."""
        self.host = host
        self._server = server
        self._run_dir = run_dir
        self._lost_s = lost_s
        self._env = env
        self._process: ProgramProcess | None = None
        self._starting: asyncio.Future[ProgramProcess] | None = None  # the newest start; its thread cannot be cancelled
        self._asking = asyncio.Lock()
        self._streams: Streams | None = None
        self._over = False

    async def connect_ahead(self, *, start: bool = True) -> None:
        """Connect before the first request, because a new store process starts slowly and an old one may be about to
        end. Without `start`, connect only to a store process that already runs: the job may turn out to be over."""
        if not start:
            try:
                unix_sockets.connect(self._run_dir / "store.sock").close()
            except OSError:
                return
        with contextlib.suppress(OSError):  # it is said to whoever asks
            async with self._asking:
                self._streams = self._streams or await self._connect_store()

    async def watch_process(self, gone: Callable[[], None]) -> None:
        """Whenever the store process has ended, call `gone` and start another one."""
        while not self._over:
            await asyncio.sleep(_WATCH_S)
            if self._streams is None or self._asking.locked() or not _is_over(self._streams[0]):
                continue
            self._streams[1].close()
            self._streams = None
            gone()
            await self.connect_ahead()

    async def open(self, generation: int) -> int:
        """Return the port of this generation's store; repeated calls give the same answer."""
        answer = await self._ask_store({"open": generation})
        if "error" in answer:
            raise OSError(f"the store process cannot open a store: {answer['error']}")
        return int(answer["port"])

    async def quit(self) -> None:
        """End the store process, which would otherwise wait for another controller."""
        self._over = True
        if self._starting is not None:  # whoever waited for it may have been cancelled
            with contextlib.suppress(OSError):
                self._process = await self._starting
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(_QUIT_S):
                await self._send_quit()
        if self._process is not None:  # it has said goodbye, or is still coming up, for a job that is over
            await asyncio.to_thread(self._process.kill)
            self._process.close()

    async def _send_quit(self) -> None:
        if self._streams is None:
            return
        reader, writer = self._streams
        try:
            await self._exchange(self._streams, {"quit": True})
            await reader.read()  # until it is gone
        finally:
            self._streams = None
            writer.close()

    async def _ask_store(self, question: dict[str, object]) -> dict[str, Any]:
        async with self._asking:
            for _ in range(_ASKED):
                if self._streams is None:
                    self._streams = await self._connect_store()
                with contextlib.suppress(OSError):
                    return await self._exchange(self._streams, question)
                self._streams[1].close()  # the process is gone, or was just dying: another one is asked
                self._streams = None
            raise ConnectionResetError("the store process ends whenever it is asked; see store.log")

    async def _exchange(self, streams: Streams, question: dict[str, object]) -> dict[str, Any]:
        reader, writer = streams
        writer.write(json.dumps(question).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("the store process ended; see store.log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _connect_store(self) -> Streams:
        until, starts = time.monotonic() + _UP_S, 0
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(sock=unix_sockets.connect(self._run_dir / "store.sock"))
            if self._process is None or self._process.is_over():
                if starts == _STARTS or self._over:
                    raise OSError("the store process does not stay up; see store.log")
                starts += 1
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start_process))
                self._process = await asyncio.shield(self._starting)
            if time.monotonic() > until:
                raise TimeoutError(f"the store process did not start within {_UP_S:g} s; see store.log")
            await asyncio.sleep(_LOOK_S)

    def _start_process(self) -> ProgramProcess:
        args = (str(self._run_dir), str(self._lost_s), self.host)
        program = Program(module="holdfast.client.boot.tcp_store_server", args=args, env=self._env, cwd=os.getcwd())
        log = open_log(str(self._run_dir / "store.log"))
        try:
            with folder_use_lock.shared_lock(self._run_dir) as held:  # it may outlive everybody else here
                return program_fork_server.start_program(
                    program, OpenFiles(stdout=log, stderr=log, keep=held), self._server
                )
        finally:
            os.close(log)


def _is_over(reader: asyncio.StreamReader) -> bool:
    """Return whether the connection to the store process has ended. It may end before it was accepted."""
    return reader.at_eof() or reader.exception() is not None
