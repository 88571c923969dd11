"""Probes on a machine with a GPU, for real: `python -m tests.gpu.probes_cuda`, from the root of the tree.

All levels once, with times, speeds and bits; the bitwise probes again, many times in one process and in a fresh one;
then a process whose products have one wrong bit each, which the others must outvote, and one with a single wrong
product, which must convict itself. The last line is JSON; the exit code is how many things are not as they should be.
"""

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.agent.diagnostics.probe_runner import ProbeTerms, run_probes
from holdfast.agent.probes import PROBES
from holdfast.core.diagnose.probe_assessment import assess_probes, finding_sentence, golden_rows
from holdfast.logs import golden_probe_digests
from holdfast.model.probe_findings import Finding
from tests.agent.probes import faults

BITS = ("gemm_bits", "attention_bits", "reference")
REPEATS = 20
LIMIT_S = 130.0  # after which no further part is begun
CALL = 5  # with four repetitions the last one of the first type


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._began = time.monotonic()
        self.faults: list[str] = []
        self.record: dict[str, Any] = {"parts_s": {}, "skipped": []}

    async def part(
        self, name: str, level: int, only: tuple[str, ...] = (), repeats: int = 1, env: dict[str, str] | None = None
    ) -> list[Finding]:
        """One process of probes; nothing when it is too late for it."""
        began = time.monotonic()
        if began - self._began > LIMIT_S:
            self.record["skipped"].append(name)
            return []
        found = []
        probes = run_probes(
            level, 0.0, sys.executable, self.folder, only=only, repeats=repeats, terms=ProbeTerms(nice=0, env=env or {})
        )
        async for finding in probes:
            print(f"{name}: {finding_sentence(finding)}", flush=True)
            found.append(finding)
        self.record["parts_s"][name] = round(time.monotonic() - began, 2)
        return found

    def expect(self, holds: bool, what: str) -> None:
        print(f"{'ok' if holds else 'NOT OK'}: {what}", flush=True)
        if not holds:
            self.faults.append(what)


async def run(trial: Trial) -> None:
    everything = await trial.part("levels 1 to 3", 3)
    trial.record["findings"] = [msgspec.to_builtins(one) for one in everything]
    trial.record["took_s"] = {
        level: round(sum(f.took_s for f in everything if f.level == level), 2) for level in (1, 2, 3)
    }
    trial.expect({f.probe for f in everything} == {p.name for p in PROBES}, "every probe has told something")
    trial.expect(not [f for f in everything if f.ok is False], "nothing failed on a sound machine")
    trial.expect(any(f.digest and f.place.startswith("cuda") for f in everything), "there are bits of a GPU")
    first = [f for f in everything if f.probe in BITS]
    on_gpu = [f for f in first if f.place.startswith("cuda")]
    trial.record["golden"] = golden_rows(on_gpu)

    many = await trial.part(f"{REPEATS} repetitions", 3, BITS, REPEATS)
    trial.expect(bool(many) and all(f.ok for f in many), f"{REPEATS} repetitions had the same bits each time")
    fresh = await trial.part("a fresh process", 3, BITS)
    sound = {"first": first, "many": many, "fresh": fresh}
    agreed = assess_probes({name: found for name, found in sound.items() if found}, golden_probe_digests.load_golden())
    trial.record["agreed"] = agreed.summary_text
    trial.expect(not agreed.bad and not agreed.suspects, "processes agree bit for bit")

    wrong = faults.spoil(Path(trial.folder, "wrong"), faults.ALWAYS)
    bad = await trial.part("a wrong bit in every product", 3, ("gemm", *BITS), env=wrong)
    if bad:
        judged = assess_probes({**sound, "bad": [f for f in bad if f.probe in BITS]}, {})
        trial.record["judged"] = judged.summary_text
        trial.expect(list(judged.bad) == ["bad"], "the one with a wrong bit is named, and nobody else")
        exact = [f for f in bad if f.probe == "gemm" and f.place.startswith("cuda")]
        trial.expect(bool(exact) and all(f.ok is False for f in exact), "exact products convict it without neighbours")
    once = faults.spoil(Path(trial.folder, "once"), faults.once(CALL))
    rare = await trial.part("one wrong product", 2, ("gemm_bits",), 4, env=once)
    if rare:
        failed = [f for f in rare if f.ok is False]
        trial.expect(len(failed) == 1 and failed[0].place.startswith("cuda"), "one wrong product convicts itself")


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    os.chdir(Path(__file__).parents[2])  # processes of probes import holdfast from here
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-probes-") as folder:
        trial = Trial(Path(folder))
        asyncio.run(run(trial))
    trial.record |= {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "faults": trial.faults,
        "took_all_s": round(time.monotonic() - began, 1),
    }
    print(trial.record["golden"])
    print(json.dumps(trial.record), flush=True)
    return len(trial.faults)


if __name__ == "__main__":
    sys.exit(main())
