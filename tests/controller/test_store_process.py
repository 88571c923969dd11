"""The store process: started when there is none, asked, replaced when it dies, told to leave."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from holdfast.controller.store_process import StoreProcess
from holdfast.wire import unix_sockets
from tests.cli.driver import ROOT, gone, until

pytestmark = pytest.mark.e2e

# torch takes seconds to import, and the store process uses one thing of it: a port.
PORT_ONLY = """
import socket
class TCPStore:
    def __init__(self, host, port, *, master_listen_fd, **rest):
        self.port, self._socket = port, socket.socket(fileno=master_listen_fd)
"""


@pytest.fixture
def env(tmp_path: Path, no_orphans: str) -> dict[str, str]:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed.py").write_text(PORT_ONLY)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def process_of(store: StoreProcess) -> int:
    assert store._process
    return store._process.pid


async def test_a_resumed_job_that_may_be_over_starts_no_store(tmp_path: Path, env: dict[str, str]) -> None:
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    await store.connect_ahead(start=False)
    assert store._process is None
    await store.connect_ahead()
    successor = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    await successor.connect_ahead(start=False)
    assert successor._streams is not None, "one that is there is connected to"
    await successor.quit()
    await store.quit()


async def test_the_life_of_a_store(tmp_path: Path, env: dict[str, str]) -> None:
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    await store.connect_ahead()
    port = await store.open(1)
    assert port > 0 and await store.open(1) == port
    assert await store.open(2) != port
    with pytest.raises(OSError, match="generation 1 is over"):
        await store.open(1)

    first = process_of(store)
    os.kill(first, signal.SIGKILL)
    until(lambda: gone(first), "its end")
    assert await store.open(3) > 0
    second = process_of(store)
    assert second != first

    successor = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)  # another controller finds the same process
    await successor.connect_ahead()
    assert successor._process is None
    assert await successor.open(3) == await store.open(3)
    await successor.quit()
    until(lambda: gone(second), "the end of the store")
    assert not (tmp_path / "store.sock").exists()
    await store.quit()  # nobody is there any more


async def test_it_is_said_when_the_process_has_gone(tmp_path: Path, env: dict[str, str]) -> None:
    store, heard = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None), asyncio.Event()
    await store.connect_ahead()
    first = process_of(store)
    watching = asyncio.create_task(store.watch_process(heard.set))
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(120):
        await heard.wait()
        assert await store.open(1) > 0
        assert process_of(store) != first
        await store.quit()
        await watching


async def test_one_that_dies_while_it_is_asked_is_not_the_last(tmp_path: Path, env: dict[str, str]) -> None:
    dying = unix_sockets.listen(tmp_path / "store.sock", backlog=1)
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    opening = asyncio.create_task(store.open(1))
    await asyncio.sleep(0.2)
    (tmp_path / "store.sock").unlink()
    dying.close()  # with our call in its queue
    assert await opening > 0
    await store.quit()


async def test_one_that_is_still_coming_up_is_ended_too(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(60)")
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    attending = asyncio.create_task(store.connect_ahead())
    await asyncio.sleep(0.1)
    assert store._process is not None
    await store.quit()
    async with asyncio.timeout(120):
        await attending  # it does not start another
    until(lambda: gone(process_of(store)), "the end of the store")


async def test_one_that_nobody_waits_for_any_more_is_ended_too(tmp_path: Path, env: dict[str, str]) -> None:
    """The job may be over while a thread is starting it."""
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    attending = asyncio.create_task(store.connect_ahead())
    await asyncio.sleep(0)
    attending.cancel()
    await asyncio.wait([attending])
    async with asyncio.timeout(120):
        await store.quit()
    assert not running_stores(tmp_path)


def running_stores(run_dir: Path) -> list[int]:
    words = {"holdfast.client.boot.tcp_store_server", str(run_dir)}
    return [p.pid for p in psutil.process_iter(["cmdline"]) if words <= {*(p.info["cmdline"] or [])}]


async def test_a_store_that_does_not_stay_up_is_an_error(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(1)")
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    await store.connect_ahead()  # says nothing
    with pytest.raises(OSError, match=r"store\.log"):
        await store.open(1)
    await store.quit()


async def test_a_socket_that_nobody_answers_is_not_in_the_way(tmp_path: Path, env: dict[str, str]) -> None:
    unix_sockets.listen(tmp_path / "store.sock").close()
    with pytest.raises(ConnectionRefusedError):
        unix_sockets.connect(tmp_path / "store.sock")
    store = StoreProcess(tmp_path, "127.0.0.1", 60.0, env, None)
    assert await store.open(1) > 0
    await store.quit()
