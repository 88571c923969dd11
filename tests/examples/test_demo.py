"""What `make demo` shows to somebody at a terminal, to its end: the page that opens by itself."""

import re
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.conftest import ROOT, job_environment

# What a desktop starts as its browser: it keeps the page that it was told to open, and follows where that leads.
BROWSER = """#!{python}
import sys, urllib.request
page = urllib.request.urlopen(sys.argv[1]).read().decode()
address = page.split("url=")[1].split('"')[0]
open({opened!r}, "a").write(address + " " + urllib.request.urlopen(address).read(15).decode().strip() + "\\n")
"""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_two_faults_are_survived_and_the_page_of_the_run_opens(tmp_path: Path, no_orphans: str) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(BROWSER.format(python=sys.executable, opened=str(opened)))
    browser.chmod(0o755)
    env = job_environment(TERM="xterm", DISPLAY=":7", BROWSER=f"{browser} %s", HOLDFAST_HOME=str(tmp_path / "home"))
    argv = [sys.executable, str(ROOT / "examples/demo.py"), "--steps", "45"]
    with Terminal(argv, env=env, cwd=tmp_path, columns=100) as terminal:
        terminal.patience_s = 1000.0
        terminal.until(lambda: opened.exists() and opened.read_text(), "a browser")
        terminal.shows("Ctrl-C ends this")
        text = "\n".join(terminal.whole_text())
        assert len(re.findall("^> step .* (?:was killed with SIGKILL|was lost)$", text, re.MULTILINE)) == 2, text
        [(calm, struck)] = re.findall(r"final weights undisturbed (\w{16}), with faults (\w{16}):", text)
        assert calm == struck
        [told] = opened.read_text().splitlines()
        assert re.match(r"http://127\.0\.0\.1:\d+/\?code=\S+ <!doctype html>", told, re.IGNORECASE)
        assert told.split()[0] in text.replace("\n", ""), "it is printed, too"
        terminal.type("\x03")
        terminal.until(lambda: terminal.process.poll() is not None, "the end")
        assert terminal.process.returncode == 0
