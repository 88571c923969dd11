"""The settings that a command's flags stand for."""

from pathlib import Path

import pytest

from holdfast.cli.launch.job_request import load_settings
from holdfast.cli.run_flags.run_arguments import parse_run_args


@pytest.mark.parametrize(
    ("flags", "lost_s"),
    [
        ((), 60.0),
        (("--fleet", "slurm", "--nnodes", "2"), 1800.0),
        (("--fleet", "slurm", "--nnodes", "1:2"), 1800.0),
        (("--fleet", "slurm", "--nnodes", "1", "--standbys", "1"), 180.0),
        (("--rdzv-endpoint", "h:1", "--nnodes", "1", "--standbys", "2"), 180.0),
        (("--fleet", "slurm", "--nnodes", "1", "--set", "node.lost_s=900"), 900.0),
    ],
)
def test_a_node_that_no_other_can_speak_for_stops_its_ranks_sooner(
    flags: tuple[str, ...], lost_s: float, tmp_path: Path
) -> None:
    """The fence stands for as long, and a standby waits before it."""
    (tmp_path / "train.py").touch()
    args = parse_run_args([*flags, str(tmp_path / "train.py")], {})
    assert load_settings(args).node.lost_s == lost_s
