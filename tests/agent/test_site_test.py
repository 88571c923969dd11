"""A site's own test, run for real: what its exit code, its words and its silence are taken for."""

import asyncio
from pathlib import Path

import pytest

from holdfast.agent.diagnostics.site_test import run_site_test
from holdfast.core.diagnose.probe_assessment import assess_probes
from holdfast.model.probe_findings import Finding
from tests.cli.driver import until

SOUND = "true"
SICK = "echo 'gpu 3: memory: PASS'; echo 'gpu 3: targeted stress: FAIL' >&2; exit 226"


async def site_test(command: str, limit_s: float = 60.0) -> Finding:
    return await run_site_test(command, limit_s, level=2)


async def test_a_machine_that_passes_is_well() -> None:
    found = await site_test('test "$HOLDFAST_PROBE_LEVEL" = 2')
    assert (found.ok, found.detail) == (True, "")


async def test_one_that_fails_is_accused_in_the_tests_own_words() -> None:
    runs = await asyncio.gather(*(site_test(SICK if node == 2 else SOUND) for node in range(4)))
    judged = assess_probes({f"n{node}": [found] for node, found in enumerate(runs)}, {})
    assert list(judged.bad) == ["n2"]
    assert "226" in judged.bad["n2"] and "gpu 3: targeted stress: FAIL" in judged.bad["n2"]


async def test_a_test_that_fails_everywhere_accuses_nobody() -> None:
    runs = await asyncio.gather(*(site_test(SICK) for _ in range(3)))
    judged = assess_probes({f"n{node}": [found] for node, found in enumerate(runs)}, {})
    assert not judged.bad and judged.notes


async def test_its_last_words_are_masked_before_they_are_cut() -> None:
    line = "x" * 290 + " password=" + "correct-horse" * 9
    found = await site_test(f"echo '{line}'; exit 3")
    assert "corr" not in found.detail and len(found.detail) < 350
    body = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY" * 2
    found = await site_test(f"echo '{body}'; exit 3")
    assert found.detail.endswith(": <private key>")


@pytest.mark.parametrize("command", ["no-such-test-anywhere", "/dev/null"])
async def test_a_command_that_cannot_run_says_nothing_of_the_machine(command: str) -> None:
    found = await site_test(command)
    assert found.ok is None and "probe.command" in found.detail


async def test_one_that_hangs_has_failed_and_leaves_nothing(tmp_path: Path) -> None:
    found = await site_test(f"sleep 1000 & echo $! > {tmp_path}/pid; wait", limit_s=2.0)
    assert found.ok is False and "2 s" in found.detail
    pid = _written_pid(tmp_path)
    until(lambda: not _is_alive(pid), "the command to end")


async def test_the_next_errand_ends_it(tmp_path: Path) -> None:
    running = asyncio.create_task(site_test(f"echo $$ > {tmp_path}/pid; sleep 1000"))
    pid = await asyncio.to_thread(until, lambda: _written_pid(tmp_path), "the command to begin")
    running.cancel()
    await asyncio.wait([running])
    assert not _is_alive(pid)


def _written_pid(folder: Path) -> int:
    """Return the pid that the command wrote; 0 until it has."""
    try:
        return int((folder / "pid").read_text() or 0)
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
