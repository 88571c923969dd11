"""Runs all probes so many times in one process, as a process of probes would, and prints what they find: one line each.

python -m tests.agent.probes.many TIMES FOLDER
"""

import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import msgspec

from holdfast.agent.probes import ProbeRequest, choose_probes
from holdfast.agent.probes.probe_tools import make_deterministic
from holdfast.model.probe_findings import Finding


def main() -> None:
    make_deterministic()
    asked = ProbeRequest(level=3, where=Path(sys.argv[2]), small=True, repeats=2)
    for _ in range(int(sys.argv[1])):
        found: list[Finding] = []
        for probe in choose_probes(3):
            found += importlib.import_module(f"holdfast.agent.probes.{probe.module or probe.name}").run(asked)
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
