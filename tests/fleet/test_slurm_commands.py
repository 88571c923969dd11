"""What is made of the ends of Slurm's commands, which stand here as scripts; `make test-slurm` has the real ones."""

import os
from pathlib import Path

import pytest

from holdfast.controller_interfaces import FleetRefusal
from holdfast.fleet.slurm_commands import SlurmCommands
from holdfast.journal.lease_term import no_lease

pytestmark = pytest.mark.e2e


def commands(folder: Path, name: str, script: str) -> SlurmCommands:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return SlurmCommands({**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}, str(folder), before_change=no_lease)


@pytest.mark.parametrize(
    "sentence",
    [
        "Kill job error on job id 12: Job/step already completing or completed",
        "Kill job error on job id 12: Invalid job id specified",
    ],
)
def test_what_is_over_need_not_be_cancelled(sentence: str, tmp_path: Path) -> None:
    """With --quiet Slurm would fail without a word."""
    speaks = f"""case "$*" in *quiet*) ;; *) echo 'scancel: error: {sentence}' >&2 ;; esac; exit 1"""
    commands(tmp_path, "scancel", speaks).cancel("12")


def test_a_command_that_fails_without_a_word_is_told_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^scancel 12\.3: ") as told:
        commands(tmp_path, "scancel", "exit 3").cancel("12.3")
    assert str(told.value) == "scancel 12.3: it exited with code 3 and said nothing"
    with pytest.raises(OSError, match=r"^squeue: ") as told:
        commands(tmp_path, "squeue", "kill -9 $$").find_jobs()
    assert str(told.value) == "squeue: it was killed by SIGKILL and said nothing"


def test_what_a_site_asks_for_is_no_sign_that_another_try_may_succeed(tmp_path: Path) -> None:
    says = (
        "echo 'sbatch: error: Please try again with -A' >&2; echo 'sbatch: error: Batch job submission failed: No' >&2"
    )
    with pytest.raises(FleetRefusal) as told:
        commands(tmp_path, "sbatch", f"{says}; exit 1").submit((), "#!/bin/sh\n")
    assert str(told.value) == "sbatch: Please try again with -A; Batch job submission failed: No"
