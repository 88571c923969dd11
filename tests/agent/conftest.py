"""Nodes for tests of what lies between them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.peers import Fleet


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(tmp_path, tasks)
        yield made
        made.end()
