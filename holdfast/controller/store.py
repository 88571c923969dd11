"""The job's TCPStore: a process that outlives the controller, with one namespace for every generation."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.wire import unixpath

_UP_S = 120.0


class Store:
    """Starts the store process if there is none, and asks it for a port per generation."""

    def __init__(self, run_dir: Path, host: str, lost_s: float) -> None:
        self.host = host
        self._run_dir = run_dir
        self._lost_s = lost_s
        self._asking = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def start(self, env: dict[str, str]) -> None:
        """Start the process unless one from before still answers; it takes seconds to be up, nobody waits here."""
        with contextlib.suppress(OSError):
            unixpath.connect(self._run_dir / "store.sock").close()
            return
        argv = [sys.executable, "-m", "holdfast.client.store", str(self._run_dir), str(self._lost_s), self.host]
        log = os.open(self._run_dir / "store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        process.returncode = 0  # it is not ours to wait for: it outlives us on purpose
        os.close(log)

    async def open(self, generation: int) -> int:
        """The port of this generation's own store; the same answer however often it is asked."""
        answer = await self._ask({"open": generation})
        return int(answer["port"])

    async def quit(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(2.0):
                await self._ask({"quit": True})

    async def _ask(self, question: dict[str, object]) -> dict[str, int]:
        async with self._asking:
            reader, writer = self._streams or await self._connect()
            self._streams = (reader, writer)
            try:
                writer.write(json.dumps(question).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            except OSError:
                self._streams = None
                raise
            if not line:
                self._streams = None
                raise ConnectionResetError("the store process went away; see store.log")
            answer: dict[str, int] = json.loads(line)
            return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        until = time.monotonic() + _UP_S
        while True:
            try:
                sock = unixpath.connect(self._run_dir / "store.sock")
            except OSError:
                if time.monotonic() > until:
                    raise TimeoutError("the store process did not come up; see store.log") from None
                await asyncio.sleep(0.05)
            else:
                return await asyncio.open_unix_connection(sock=sock)
