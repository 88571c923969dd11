"""A host whose machine was found bad joins again under another name: refused, in other jobs too, until it is lifted."""

import json
import re
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_join import TOKEN, host, port
from tests.cli.test_join_proofs import minted
from tests.cli.test_run_health import XID, kernel_says

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

__all__ = ["port"]


def join(start: Start, port: int, name: str, machines: Path, *flags: str, machine: str, token: str = TOKEN) -> Job:
    """One host's command; hosts on one machine are told apart by the id that each is given."""
    (machines / machine / "dev").mkdir(parents=True, exist_ok=True)
    (machines / machine / "dev/kmsg").touch()
    watched = ("--set", f"health.root={machines}/{machine}", "--set", "health.kernel_s=0.2")
    return host(start, f"127.0.0.1:{port}", *watched, *flags, name=name, HOLDFAST_HOST_ID=machine, HOLDFAST_TOKEN=token)


def standbys(job: Job) -> list[str]:
    return [node["node"] for node in job.status()["nodes"] if node["role"] == "ready"]


def test_a_bad_host_is_refused_under_another_name_until_it_is_lifted(
    start: Start, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines, flags = tmp_path / "machines", ("--nnodes", "2", "--standbys", "1", "--rdzv-id", "ours")
    first = join(start, port, "first", machines, *flags, machine="good")
    bad = join(start, port, "bad", machines, *flags, machine="lemon")
    first.trains()
    spare = join(start, port, "spare", machines, *flags, machine="spare")
    first.until(lambda: standbys(first), "a standby")

    kernel_says(machines, "lemon", XID)
    bad.ends(1)
    first.trains(generation=2)
    first.until(lambda: "is blocked for 168 h" in first.text(), "the block")
    token = minted(capsys, first)
    again = join(start, port, "again", machines, *flags, machine="lemon", token=token)
    again.ends(93)
    assert "holdfast blocked --lift" in again.sentences()[-1]
    assert re.search(r"\bblocked\b.*\bincident 1 of run ours\b", first.text())
    assert not standbys(first) and first.status()["generation"] == 2

    other = join(start, 0, "other", machines, "--nnodes", "1", machine="lemon")
    other.until(lambda: "blocked: " in other.status().get("now", ""), "a job without nodes, as its own host is refused")
    assert "0 of 1" in other.status()["now"] and "--lift" in other.status()["now"]
    other.interrupt()
    other.ends(130)

    assert main(["blocked", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert (entry["run_id"], entry["incident"]) == ("ours", 1)
    assert main(["blocked", "--lift", "lemon"]) == 0
    friend = join(start, port, "friend", machines, *flags, machine="lemon", token=token)  # not used up
    first.until(lambda: standbys(first), "a standby again")
    first.finish()
    for job in (first, spare, friend):
        job.ends(0)
    first.check_replay()
