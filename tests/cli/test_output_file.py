"""Files that commands write lead nowhere else."""

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from holdfast.cli.commands import sbatch_command, trace_command
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.output_file import replace_file
from holdfast.logs import user_rows


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("work of years")
    return path


def test_a_file_is_replaced_and_links_and_devices_are_left_alone(tmp_path: Path, precious: Path) -> None:
    path = tmp_path / "run.html"
    for text in ("first", "second"):
        replace_file(path, text)
        assert path.read_text() == text and stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
    os.link(path, tmp_path / "other")
    replace_file(path, "third")
    assert (tmp_path / "other").read_text() == "second", "nor through a hard link"
    link, pipe = tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to(precious)
    os.mkfifo(pipe)
    for there in (link, pipe, tmp_path):
        with pytest.raises(OSError, match=re.escape(str(there))) as refused:
            replace_file(there, "mine now")
        assert refused.value.errno == errno.EEXIST
    assert precious.read_text() == "work of years" and link.is_symlink()
    assert {found.name for found in tmp_path.iterdir()} == {"run.html", "other", "link.html", "pipe", "precious"}


def test_no_command_writes_through_a_link(tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("t.svg", "run.sbatch"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(UsageError, match=r"/t\.svg: "):
        trace_command._write_svg(tmp_path / "t.svg", "<svg>")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"/run\.sbatch: "):
        sbatch_command._submit("#!/bin/bash", tmp_path / "run")
    assert precious.read_text() == "work of years"


def test_a_draft_of_rows_is_written_through_no_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / f".words.toml.{os.getpid()}").symlink_to(precious)
    user_rows._write_rows(tmp_path / "words.toml", "[[row]]\n", append=True)
    assert precious.read_text() == "work of years" and (tmp_path / "words.toml").read_text() == "[[row]]\n"
