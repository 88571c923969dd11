"""What commands say of runs on storage that takes nothing; run in a mount namespace of its own, it prints one JSON.

python -m tests.cli.read_only_commands FOLDER RUN_DIR...
"""

import contextlib
import http.client
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.cli import main

LOOKS = ("report", "status", "trace", "diagnose", "logs", "releases")


def said_by(*words: str) -> tuple[int, str]:
    """The code of a command, and all that it said."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(list(words))
    return code, out.getvalue()


def page_of(run_dir: str) -> str:
    """What `holdfast dash` tells a browser of a run."""
    words = [sys.executable, "-m", "holdfast", "dash", run_dir, "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as served:
        try:
            assert served.stdout
            said = ""
            while not (found := re.search(r"http://\S+", said)):
                line = served.stdout.readline()
                assert line, f"dash has ended: {said}"
                said += line
            return _view_at(found.group())
        finally:
            served.terminate()


def _view_at(address: str) -> str:
    where = urlsplit(address)
    link = http.client.HTTPConnection(where.netloc, timeout=60)
    code = where.query.partition("code=")[2]
    link.request("POST", "/enter", json.dumps({"code": code}), {"Origin": f"http://{where.netloc}"})
    key = json.loads(link.getresponse().read())["key"]
    link.request("GET", "/view", headers={"X-Holdfast-Page": key})
    return link.getresponse().read().decode()


def look_at_all(folder: Path, run_dirs: list[str]) -> dict[str, tuple[int, str]]:
    found = {"writable": (int(os.access(folder, os.W_OK)), "")} | {"ls": said_by("ls")}
    for run_dir in run_dirs:
        name = Path(run_dir).name
        found |= {f"{name} {verb}": said_by(verb, run_dir) for verb in LOOKS}
        found[f"{name} dash"] = (0, page_of(run_dir))
    return found


if __name__ == "__main__":
    print(json.dumps(look_at_all(Path(sys.argv[1]), sys.argv[2:])))
