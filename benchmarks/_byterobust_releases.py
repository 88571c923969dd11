"""MFU per release: examples/gpt.py on a GPU in fp32, then updated in place to bf16. Started by byterobust_gpu.py."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._byterobust_part import Part
from benchmarks._exact_scene import Failed
from benchmarks._harness import START_LIMIT_S, Job, holdfast, holdfast_command
from holdfast.cli.commands.report_command import load_report
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.core.record.release_pace import LEAST_STEPS, ReleasePace, describe_paces

GPT = Path(__file__).parents[1] / "examples" / "gpt.py"
OLD, NEW = "        loss = ddp(", '        with torch.autocast("cuda", torch.bfloat16):\n            loss = ddp('


def paces_of(run_dir: Path) -> dict[int, ReleasePace]:
    try:
        return {pace.release: pace for pace in load_report(run_dir).paces}
    except UsageError:  # there is no journal yet
        return {}


def steady(job: Job, run_dir: Path, release: int) -> None:
    def found() -> bool | None:
        time.sleep(1.0)
        pace = paces_of(run_dir).get(release)
        return True if pace and pace.steps >= 2 * LEAST_STEPS else None

    if job.wait(found, START_LIMIT_S) is None:
        raise Failed(f"release {release} never trained steadily:\n{job.last_words(30)}")


def releases() -> Part:
    part = Part()
    with Job(1) as job:
        trees = [job.folder / name for name in ("first", "second")]
        for tree in trees:
            tree.mkdir()
            shutil.copy(GPT, tree)
        text = GPT.read_text()
        assert text.count(OLD) == 1
        (trees[1] / GPT.name).write_text(text.replace(OLD, NEW))
        run_dir = job.folder / "run"
        script = [str(trees[0] / GPT.name), "--device=cuda", "--size=large", "--steps=1000000"]
        job.spawn([*holdfast(run_dir, "--standalone", "--nproc-per-node=1"), *script])
        steady(job, run_dir, 1)
        asked = [*holdfast_command(), "update", str(trees[1]), "--now", "--run", str(run_dir)]
        subprocess.run(asked, stdout=sys.stderr, timeout=START_LIMIT_S, check=True)
        steady(job, run_dir, 2)
        paces = paces_of(run_dir)
    for pace in paces.values():
        assert pace.mfu is not None and pace.tokens_s is not None
        part.figures |= {f"release_{pace.release}_mfu": round(pace.mfu, 4)}
        part.figures |= {f"release_{pace.release}_tokens_s": round(pace.tokens_s)}
    said = " ".join(describe_paces(tuple(paces.values())))
    part.rows.append(
        ("MFU per release of examples/gpt.py", said, "rises by 1.25 and 1.58 over a job's life", "one H200")
    )
    part.goals["mfu_of_both_releases_known"] = set(paces) >= {1, 2}
    return part.stamped()
