"""Nodes for tests of what lies between them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.manifest import part_name
from tests.agent.peers import Fleet


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(tmp_path, tasks)
        yield made
        made.end()


@pytest.fixture
def hanging_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever reads the record of rank 0's part waits until the test is over."""
    released, read = threading.Event(), LocalStorage.read

    def hang(storage: LocalStorage, name: str) -> bytes | None:
        if name == part_name(0) and "/ckpt/" in storage.url():  # not that of a local disk
            released.wait(120)
        return read(storage, name)

    monkeypatch.setattr(LocalStorage, "read", hang)
    yield
    released.set()  # lets the thread go
