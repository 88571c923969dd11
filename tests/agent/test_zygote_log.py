"""The zygote's log: whatever is printed there, by whatever way, secrets of the environment are masked."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent import zygote_log
from holdfast.agent.zygote_log import ZygoteLog
from holdfast.core.terminal_sanitizer import CUT
from tests.conftest import job_environment

SECRET = "correct-horse-battery"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ZygoteLog]:
    made = ZygoteLog(tmp_path / "zygote.log", {"A_TOKEN": SECRET})
    yield made
    made.close()


def test_lines_are_masked_whole_however_they_come(log: ZygoteLog, tmp_path: Path) -> None:
    written = f"no {SECRET}\xff\n\npassword=hunter2 and\nno end {SECRET}".encode("latin-1")
    for byte in written:
        os.write(log.far_end, bytes([byte]))
        assert log.copy_lines()
    assert (tmp_path / "zygote.log").read_text() == "no <secret>\ufffd\n\npassword=<secret> and\n"
    os.close(log.far_end)
    assert not log.copy_lines() and not log.copy_lines()
    assert (tmp_path / "zygote.log").read_text().endswith("\nno end <secret>\n")
    assert (tmp_path / "zygote.log").stat().st_mode & 0o777 == 0o600


def test_nobody_waits_where_nothing_comes(log: ZygoteLog, tmp_path: Path) -> None:
    assert log.copy_lines()
    log.copy_rest()
    os.write(log.far_end, b"a\nb\n")
    log.copy_rest()
    os.close(log.far_end)
    log.copy_rest()
    assert (tmp_path / "zygote.log").read_text() == "a\nb\n"


def test_of_a_line_without_end_the_beginning_stays(log: ZygoteLog, tmp_path: Path) -> None:
    began = time.process_time()
    for _ in range(64):
        os.write(log.far_end, b"word " * 4096)
        log.copy_rest()
    os.write(log.far_end, f"the end of it {SECRET}\nanother\n".encode())
    log.copy_rest()
    first, second = (tmp_path / "zygote.log").read_text().splitlines()
    assert first.startswith("word word") and first.endswith(CUT) and len(first) < 17_000 and second == "another"
    assert time.process_time() - began < 10


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_log, "_MOST_BYTES", 1000)
    for _ in range(3):  # one for each zygote, and one file
        log = ZygoteLog(tmp_path / "zygote.log", {})
        for _ in range(100):
            os.write(log.far_end, b"x" * 99 + b"\n")
            log.copy_rest()
        os.close(log.far_end)
        log.close()
    written = (tmp_path / "zygote.log").read_text()
    assert len(written) < 1300 and written.count("left out") == 1 and written.endswith("left out\n")


def test_a_full_disk_ends_nobody(log: ZygoteLog) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._log)
    os.close(full)
    os.write(log.far_end, b"a line\n")
    assert log.copy_lines()


# Prints in every way that a module may when it is imported. What it opens by name is the pipe, too.
TALKS = """
import logging, os, subprocess, sys, threading, warnings
word = os.environ["A_TOKEN"]
print("to stdout", word)
print("to stderr", word, file=sys.stderr)
os.write(2, f"by the kernel {word}\\n".encode())
subprocess.run(["sh", "-c", 'echo "by another program $A_TOKEN"'], check=True)
with open("/dev/stderr", "w") as file:
    file.write(f"by name {word}\\n")
warnings.warn(f"a warning {word}")
logging.error("by logging %s", word)
print("hooks", sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__)
raise ValueError(f"at last {word}")
"""
# A holder that has a zygote and nothing else.
HOLDER = """
import logging, os, selectors, sys
from pathlib import Path
from holdfast.agent.zygotes import ZygotePorts, Zygotes
import holdfast.client.boot.zygote
from holdfast.linux import preimported_fork
from holdfast.logs.secret_masking import keep_masked_log, make_secret_masker
from holdfast.wire.holder_messages import PreloadZygote
def main():
    keep_masked_log(logging.StreamHandler(sys.stderr), make_secret_masker())
    selector, told, logs = selectors.DefaultSelector(), [], []
    def close_all(end):
        end.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()
    def watch_log(log):
        logs.append(log)
        selector.register(log, selectors.EVENT_READ, lambda one: one.copy_lines())
    ports = ZygotePorts(
        watch=lambda sock, heard: selector.register(sock, selectors.EVENT_READ, heard), watch_log=watch_log,
        drop=lambda sock: selector.unregister(sock), on_forked=lambda key, pid: None, send_agent=told.append,
        close_inherited=close_all,
    )
    env = dict(os.environ)
    word = os.environ.pop("A_TOKEN")
    zygotes = Zygotes(Path(sys.argv[1]), ports)
    zygotes.ensure_zygote(PreloadZygote(modules=("talks",), env=env, key="k"))
    while not told:
        for key, _ in selector.select(60):
            key.data(key.fileobj)
    logs[0].copy_rest()
    print(told[0].ok, told[0].detail)
    raise ValueError(f"the holder ends with {env['A_TOKEN']}, which is not its own, and {os.environ['OUR_TOKEN']}")
preimported_fork.run(main)
"""


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_whatever_a_zygote_imports_cannot_print_a_secret(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    (tmp_path / "holder.py").write_text(HOLDER)
    own = job_environment(A_TOKEN=SECRET, OUR_TOKEN="our-very-own-token")
    own["PYTHONPATH"] = f"{own['PYTHONPATH']}:{tmp_path}"
    words = [sys.executable, "-u", str(tmp_path / "holder.py"), str(tmp_path)]
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.startswith("True "), done
    written = (tmp_path / "zygote.log").read_text()
    assert SECRET not in written
    ways = ("to stdout", "to stderr", "by the kernel", "by another program", "by name", "a warning", "by logging")
    assert not [way for way in (*ways, "at last") if f"{way} <secret>" not in written], written
    assert "hooks True True" in written, "ranks would inherit others"
    assert "ValueError" in done.stderr and "our-very-own-token" not in done.stderr
