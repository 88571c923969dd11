"""The API against its own description, as schemathesis tests it: at a real port, while a job trains."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.controller.api_description import describe_api
from holdfast.wire.agent_messages import TOKEN_HEADER
from tests.conftest import job_environment
from tests.controller.conftest import TOKEN, Open

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="it is in the extra test-full"),
]
# What a schema cannot say is refused (an order that the job cannot take), and what it does not ask for is let pass.
_NOT_CHECKED = "positive_data_acceptance,negative_data_rejection"
_PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"


async def test_no_answer_is_other_than_described(desk_of: Open, tmp_path: Path) -> None:
    async with desk_of() as desk:
        await desk.train()
        words = ["run", f"{desk.client.make_url('/')}openapi.json", "-H", f"{TOKEN_HEADER}: {TOKEN}"]
        words += ["--checks", "all", "--exclude-checks", _NOT_CHECKED, "--warnings", "off"]
        words += ["--max-examples", os.environ.get("PYTEST_HOLDFAST_EXAMPLES", "20"), "--continue-on-failure"]
        done = await asyncio.to_thread(_run, words, tmp_path)
        assert done.returncode == 0, done.stdout[-9000:]
        tested = re.search(r"Operations:\s+(\d+) selected / (\d+) total", done.stdout)
        count = sum(len(operations) for operations in describe_api()["paths"].values())
        assert tested and tested.groups() == (str(count), str(count)), done.stdout
        answer = await desk.client.get("/api/v1/status", headers={TOKEN_HEADER: TOKEN})
        assert answer.status == 200 and (await answer.json())["phase"]
        assert not desk.controller._stepping


def _run(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-c", _PROGRAM, *words]
    env = job_environment(NO_COLOR="1", COLUMNS="160")
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)
