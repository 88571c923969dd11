"""The reference step and the all-to-all of a team of processes, on real GPUs: `python -m tests.gpu.minigpt_cuda`.

With one GPU all processes share it, each as a host of its own for NCCL; they then speak over sockets, so times say
little. First sound teams of 8, 4 and 2; then one process computes a wrong bit in every product, one computes a single
wrong product, and one gets a wrong byte. The last line is JSON; the exit code is how many things are not as they
should be.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.agent.probes import ProbeRequest, reference_step
from holdfast.agent.probes.nccl_all_to_all import probe_exchange
from holdfast.agent.probes.parallel_reference import probe_seats
from holdfast.agent.probes.probe_team import TeamSeat
from holdfast.agent.probes.probe_tools import make_deterministic
from holdfast.core.diagnose.probe_assessment import finding_sentence, golden_rows
from holdfast.model.probe_findings import Finding
from tests.agent.probes import faults

LIMIT_S = 120.0
WRONG = 3  # of eight
CALL = 5  # the product that attention in the first layer sends


def make_seats(world: int, device: str, spoiled: int = -1, env: dict[str, str] | None = None) -> list[TeamSeat]:
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    seats = []
    for rank in range(world):
        own = {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1"} if gpus < world else {}
        own |= env or {} if rank == spoiled else {}
        where = f"cuda:{rank % gpus}" if gpus else "cpu"
        seats.append(TeamSeat(place=f"seat{rank}", device=where, env=own))
    return seats


class Trial:
    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small
        self.faults: list[str] = []
        self.record: dict[str, Any] = {"parts_s": {}, "findings": {}}

    def part(self, name: str, work: Callable[[], list[Finding]]) -> list[Finding]:
        began = time.monotonic()
        found = work()
        self.record["parts_s"][name] = round(time.monotonic() - began, 2)
        self.record["findings"][name] = [msgspec.to_builtins(one) for one in found]
        for finding in found:
            print(f"{name}: {finding_sentence(finding)}", flush=True)
        return found

    def step(self, world: int, spoiled: int = -1, env: dict[str, str] | None = None) -> list[Finding]:
        seats = make_seats(world, self.device, spoiled, env)
        return list(probe_seats(seats, small=self.small, repeats=1, limit_s=LIMIT_S))

    def exchange(self, world: int, spoiled: int = -1, env: dict[str, str] | None = None) -> list[Finding]:
        return [probe_exchange(make_seats(world, self.device, spoiled, env), small=self.small, limit_s=LIMIT_S)]

    def expect(self, holds: bool, what: str) -> None:
        print(f"{'ok' if holds else 'NOT OK'}: {what}", flush=True)
        if not holds:
            self.faults.append(what)


def run(trial: Trial, folder: Path) -> None:
    asked = ProbeRequest(level=3, where=folder, small=trial.small, repeats=5)
    alone = trial.part("alone", lambda: list(reference_step.run(asked)))
    trial.expect(len(alone) >= 3 and all(f.ok for f in alone), "each device alone has the same bits 6 times")
    digests = {}
    for world in (8, 4, 2):
        found = trial.part(f"{world} sound", partial(trial.step, world))
        trial.expect(len(found) == 3 and all(f.ok for f in found), f"{world} devices agree in three forms")
        digests[world] = [f.digest for f in found]
    again = trial.part("2 sound again", lambda: trial.step(2))
    trial.expect([f.digest for f in again] == digests[2], "fresh processes give the same bits")
    trial.record["golden"] = golden_rows(alone)

    always = faults.spoil(folder / "always", faults.ALWAYS)
    found = trial.part("a wrong bit in every product", lambda: trial.step(8, WRONG, always))
    trial.expect([f.place for f in found if f.ok is False] == [f"seat{WRONG}"] * 3, "the one of eight is named")
    found = trial.part("a wrong bit in one of two", lambda: trial.step(2, 1, always))
    told = [f.detail for f in found if f.ok is False and not f.place]
    trial.expect(len(told) == 3 and all("no majority" in one for one in told), "of two, both are suspects")
    once = faults.spoil(folder / "once", faults.once(CALL))
    found = trial.part("one wrong product in one of two", lambda: trial.step(2, 1, once))
    trial.expect([(f.ok, f.place) for f in found if not f.ok] == [(False, "seat1")], "one wrong product is named")

    found = trial.part("all to all", lambda: trial.exchange(4))
    trial.expect(bool(found[0].ok and found[0].value), "bytes arrive as they were sent")
    arrives = faults.spoil(folder / "arrives", faults.ARRIVES_WRONG)
    found = trial.part("all to all, a wrong byte", lambda: trial.exchange(4, 2, arrives))
    trial.expect(found[0].ok is False and "to seat2" in found[0].detail, "a byte that changed is found")


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and "--cpu" not in sys.argv:
        print("there is no GPU here", file=sys.stderr)
        return 2
    os.chdir(Path(__file__).parents[2])  # processes of probes import holdfast from here
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    make_deterministic()
    began = time.monotonic()
    trial = Trial(device, small="--small" in sys.argv or device == "cpu")
    with tempfile.TemporaryDirectory(prefix="holdfast-minigpt-") as folder:
        run(trial, Path(folder))
    trial.record |= {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "gpus": torch.cuda.device_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version() if device == "cuda" else None,
        "python": platform.python_version(),
        "faults": trial.faults,
        "took_all_s": round(time.monotonic() - began, 1),
    }
    print(trial.record["golden"])
    print(json.dumps(trial.record), flush=True)
    return len(trial.faults)


if __name__ == "__main__":
    sys.exit(main())
