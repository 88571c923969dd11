"""A job whose journal is in Postgres: the database says which checkpoints it has, before and after a takeover."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_join import host
from tests.cli.test_run_state import TRAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOKEN = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
SCRIPT = TRAIN.replace('"every": 5}', '"every": 5, "keep": 2}')


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["ckpt", "ls", *words, "--json"]) in (0, 1)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checkpoints"]
    return found


def newest(job: Job, capsys: pytest.CaptureFixture[str], *words: str, after: int) -> int:
    def look() -> int:
        return max((one["step"] for one in listed(capsys, *words)), default=-1)

    job.until(lambda: look() > after, "a newer row")
    return look()


def test_the_database_lists_what_the_storage_holds(
    start: Start, endpoint: str, shared_postgres: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, run_id = tmp_path / "store", f"job {endpoint}"
    flags = ("--journal", shared_postgres, "--rdzv-id", run_id, "--nnodes", "1", "--nproc-per-node", "2")
    job = host(start, endpoint, *flags, name="one", script=SCRIPT, HOLDFAST_TOKEN=TOKEN, HOLDFAST_STORE=str(store))
    job.trains()
    table = ("--journal", shared_postgres, "--run-id", run_id)
    before = newest(job, capsys, *table, after=5)
    job.kill(job.controller())
    job.says("the controller died")
    job.says("the controller is back")
    newest(job, capsys, *table, after=newest(job, capsys, str(store), after=before))
    job.finish()
    job.ends(0)
    stored, told = listed(capsys, str(store)), listed(capsys, *table)
    assert len(stored) >= 2 and [(one["url"], one["bytes"]) for one in stored] == [
        (one["place"], one["bytes"]) for one in told
    ]
    assert all(row["author"] == one["author"]["run"] for row, one in zip(told, stored, strict=True))
    assert {row["base"] for row in told} == {str(store)} and not any(row["doubted"] for row in told)
