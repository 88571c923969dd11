"""What of ByteRobust's evaluation needs a GPU: saving at every step beside other savers, and MFU per release."""

import json
import subprocess
import sys
from pathlib import Path

from rich.table import Table

from benchmarks import _byterobust_savers
from benchmarks._byterobust_part import Part
from benchmarks._byterobust_releases import releases
from benchmarks._exact_scene import Failed
from benchmarks._harness import Job, holdfast
from benchmarks._kept import Kept
from benchmarks._report import Findings, report
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.wire.controller_request import ControllerNotRunning

LIMIT_S = 240.0
PUBLISHED = {  # of 70B on 128 GPUs: seconds of waiting, MFU in percent of what it is without saving
    "torch.save": "6.77 s, 39.8 % (Megatron)",
    "into memory": "1.84 s, 70.1 % (memory)",
    "holdfast": "0.04 s, 99.2 % (ByteRobust)",
    "holdfast, beside a peer's copy": "the same",
}
SHARE_GOAL = 0.99


def savers() -> Part:
    done = subprocess.run(
        [sys.executable, "-m", _byterobust_savers.__name__], stdout=subprocess.PIPE, timeout=LIMIT_S, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    found = told["savers"] | {"holdfast, beside a peer's copy": beside_a_peer()}
    part = Part(figures={"state_gb": round(told["gb"], 2)})
    for name, one in found.items():
        if why := one.get("failed"):
            part.skipped[name] = why
            continue
        ours = f"{one['blocked_s']:.4f} s, {100 * one['share']:.1f} % ({1e3 * one['calm_s']:.0f} ms a step)"
        part.rows.append((f"table 8, saving at every step: {name}", ours, PUBLISHED.get(name, ""), "8 GB, one GPU"))
        part.figures |= {f"{name} {key}": round(value, 4) for key, value in one.items()}
    mine = [one["share"] for name, one in found.items() if name.startswith("holdfast")]
    part.goals["pace_kept_when_saving_every_step"] = min(mine) >= SHARE_GOAL
    return part.stamped()


def beside_a_peer() -> dict[str, float]:
    """Our saver in a job of two nodes, and how old the newest state is that the peer holds too."""
    lags: list[float] = []
    with Job(2) as job:
        run_dir, out = job.folder / "run", job.folder / "found.json"
        flags = ("--nnodes=2", "--nproc-per-node=1")
        script = [str(Path(_byterobust_savers.__file__)), str(out)]
        launcher = job.spawn([*holdfast(run_dir, *flags), *script], {"PYTHONPATH": str(Path(__file__).parents[1])})

        def ended() -> bool | None:
            try:
                status = ask_controller(run_dir, "/api/v1/status")
            except ControllerNotRunning:
                status = {}
            if status.get("floor", -1) > 0:
                lags.append(max(node["step"] for node in status["nodes"]) - status["floor"])
            return True if launcher.poll() is not None else None

        job.wait(ended, LIMIT_S)
        if not Path(out).exists():
            raise Failed(f"the job with a peer told nothing:\n{job.last_words(40)}")
        found: dict[str, float] = json.loads(out.read_text())
    if not lags:
        raise Failed("no state ever reached the peer")
    return found | {"most_steps_behind": max(lags)}


PARTS = {"savers": savers, "releases": releases}


def main(asked: list[str]) -> int:
    findings, runs = Findings(), dict[str, list[float | None]]()
    table = Table("what", "here", "ByteRobust", "", title=(__doc__ or "").partition("\n")[0])
    kept = Kept("byterobust_gpu")
    for name in asked or PARTS:
        if not Path("/proc/driver/nvidia/gpus").exists():
            findings.skipped[name] = "no CUDA device on this machine"
            continue
        try:
            part = kept.part(name, Part, PARTS[name])
        except (Failed, subprocess.SubprocessError) as e:
            findings.skipped[name] = str(e)
            continue
        for row in part.rows:
            table.add_row(*row)
        findings.figures |= part.figures
        findings.goals |= part.goals
        findings.skipped |= part.skipped
        findings.figures |= {f"{name}_commit": part.commit}
    report("byterobust-gpu", table, findings, runs)
    kept.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
