"""What a script prints is no danger to the node that it runs on."""

import re
from pathlib import Path

import psutil
import pytest

from holdfast.agent.rank import last_words_judge
from holdfast.logs import user_rows
from tests.agent.test_last_words_judge import ENDLESS, HOSTILE
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN, run_command

pytestmark = pytest.mark.e2e

# Its first life ends with a line that is judged for ever.
STALLS = TRAIN.replace(
    "while not",
    f"""
if not os.path.exists(f"{{folder}}/stalled"):
    open(f"{{folder}}/stalled", "w").close()
    holdfast.step(1, loss=1.0)
    print({HOSTILE!r}, file=sys.stderr, flush=True)
    os._exit(3)
while not""",
)

# A file of rank 1 cannot be decoded; rank 0, which loses its peer, is amid a progress bar.
UNDECODABLE = """
import os, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
import holdfast
class Images(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if index == 5 and os.environ["RANK"] == "1":
            raise RuntimeError(f"cannot decode image /data/img_{index}.jpg")
        return torch.ones(4)
dist.init_process_group("gloo")
for step, batch in enumerate(DataLoader(Images(), batch_size=1, num_workers=1)):
    dist.all_reduce(batch)
    holdfast.step(step)
    if dist.get_rank() == 0:
        print(f"\\r{step}/20 images", end="", file=sys.stderr, flush=True)
"""


def test_a_file_that_cannot_be_decoded_probes_nobody_and_the_advice_is_that_of_diagnose(start: Start) -> None:
    job = start("--nnodes", "1", "--nproc-per-node", "2", script=UNDECODABLE, probes=True)
    job.ends(93)
    advice = "Skip or rebuild the sample or file that is named."
    [first, second] = job.report().incidents
    assert (first.verdict.remedy, second.verdict.remedy) == ("restart", "give up"), job.text()
    assert second.verdict.reason.endswith("; skip or rebuild the sample or file that is named")
    told = run_command("diagnose", str(job.run_dir), folder=job.folder).stdout
    assert "data_corrupt" in told and advice in told
    lines = job.text().splitlines()
    assert lines[-1].startswith("holdfast: ended with code 93"), job.text()
    assert not [line for line in lines if line.startswith("[rank 0]") and "Traceback" in line], job.text()


# Ranks 0 and 1 each raise for a reason of their own at one step; rank 2 only loses its peers, and says so itself. The
# process of rank 1 still ends when the end of rank 0 stops all ranks.
TWO_REASONS = """
import atexit, os, time
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
rank, first = dist.get_rank(), not os.path.exists("struck")
for step in range(8):
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as e:
        raise RuntimeError(f"no sum at step {step}") from e
    holdfast.step(step)
    if first and step == 4:
        open("struck", "w").close()
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)
            raise RuntimeError("shard 17 has no samples")
        if rank == 1:
            atexit.register(time.sleep, 60)
            raise RuntimeError("the tokenizer has no word for this")
"""


def test_ranks_that_fail_for_reasons_of_their_own_are_causes_and_an_echo_is_none(start: Start) -> None:
    """Both of them, also if the signal that stops all ranks has ended the process of one."""
    job = start("--nnodes", "1", "--nproc-per-node", "3", script=TWO_REASONS)
    job.ends(0)
    [record] = job.report().incidents
    causes = re.sub(r" \((?:rank \d first|which first is not known)\)", "", record.cause).split(", and ")
    own = {
        0: "rank 0 on n0 exited with code 1 (RuntimeError: shard 17 has no samples)",
        1: "rank 1 on n0 exited with code 1 (RuntimeError: the tokenizer has no word for this)",
    }
    assert sorted(causes) == [own[0], own[1]] and sorted(record.ranks) == [0, 1]
    assert (record.failures, record.verdict.remedy) == (1, "restart")
    [told] = [line for line in job.sentences() if " at step 4; restarted in place" in line]
    assert told.startswith(f"holdfast: {record.cause} ")
    for words in ("RuntimeError: shard 17 has no samples", "RuntimeError: the tokenizer has no word for this"):
        assert len(re.findall(rf"^\[rank \d\].*{words}$", job.text(), re.M)) == 1, "both tracebacks are shown"


@pytest.mark.slow
def test_output_that_cannot_be_judged_evicts_nobody(start: Start, tmp_path: Path) -> None:
    rows = tmp_path / "rows.toml"
    rows.write_text(user_rows.format_row(ENDLESS))
    job = start("--nnodes", "1", "--set", f"words.catalog={rows}", script=STALLS)
    job.trains(generation=2)
    [judge] = psutil.Process(job.agent("n0")).children()
    assert "holdfast.agent.rank.last_words_judge" in judge.cmdline() and len(judge.children()) <= 1, (
        "who was at it is gone, and one may wait for the next"
    )
    job.finish()
    job.ends(0)
    assert f"more than {last_words_judge.DEADLINE_S:g} s" in (job.run_dir / "nodes/n0/agent.log").read_text()
    [record] = job.report().incidents
    assert (record.kind, record.verdict.remedy, record.evicted) == ("crash", "restart", ())


def test_a_judge_dies_with_its_agent(start: Start) -> None:
    job = start("--nnodes", "1", script=TRAIN)
    job.trains()
    [judge] = psutil.Process(job.agent("n0")).children()
    job.kill(job.agent("n0"))
    job.until(lambda: not judge.is_running(), "the end of the judge")
    [another] = job.until(lambda: psutil.Process(job.agent("n0")).children(), "the next agent's judge")
    assert another.pid != judge.pid
    job.finish()
    job.ends(0)
