"""What ranks tell of their start and of what they leave out; and a spike that is answered as its policy says."""

import pytest

from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.action import Launch
from holdfast.model.decider_events import Progress
from holdfast.model.loss_response import Ease, Skip
from tests.cli.conftest import Start
from tests.cli.driver import Job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STARTS_S = 150.0  # torch is imported
ENDS_S = 250.0

# A batch follows from its step and the rank; the one of step 30 is a bad one.
TRAIN = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import holdfast

folder, steps = sys.argv[1], int(os.environ.get("HOLDFAST_STEPS", "1000000"))
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(8, 8)
ddp = holdfast.attach(DistributedDataParallel(net))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
stored = {"path": os.environ["HOLDFAST_STORE"], "every": 5} if "HOLDFAST_STORE" in os.environ else {}
ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer, **stored)
made = []
for step in range(ckpt.restore() + 1, steps + 1):
    if holdfast.skip(step):
        continue
    torch.manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(64, 8) * (30 if step == 30 and "HOLDFAST_SPIKE" in os.environ else 1)
    loss = (ddp(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step, loss=loss)
    made.append(step)
    time.sleep(float(os.environ.get("HOLDFAST_PAUSE", "0.02")))
    stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(stop)
    if stop:
        break
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
print("weights", digest, flush=True)
del ddp, ckpt
dist.destroy_process_group()
"""


def heard(job: Job) -> list[Progress]:
    journal = SqliteJournal(job.run_dir / "journal.db", read_only=True)
    try:
        return [entry.event for entry in journal.read() if isinstance(entry.event, Progress)]
    finally:
        journal.close()


def launches(job: Job) -> list[Launch]:
    journal = SqliteJournal(job.run_dir / "journal.db", read_only=True)
    try:
        actions = [action for entry in journal.read() for action in entry.decision.actions]
        return [action for action in actions if isinstance(action, Launch)]
    finally:
        journal.close()


def weights(job: Job) -> set[str]:
    return {line.split()[-1] for line in job.text().splitlines() if "] weights " in line}


def test_when_ranks_had_their_groups_and_states_and_what_they_left_out(start: Start) -> None:
    nodes = ("--nnodes", "2", "--nproc-per-node", "1")
    job = start(*nodes, script=TRAIN, HOLDFAST_SKIP="3-4,9000000-9000000")
    job.until(lambda: job.status().get("step", 0) > 5, "steps after those that are left out", STARTS_S)
    job.kill(job.rank(1))
    job.until(lambda: {one.generation for one in heard(job)} == {1, 2}, "steps after a restart", STARTS_S)
    job.finish()
    job.ends(0)
    told = heard(job)
    for generation in (1, 2):
        mine = [one for one in told if one.generation == generation]
        assert mine and all(one.skippable for one in mine)
        assert all(0 < one.grouped_at < one.restored_at < one.first_at for one in mine)
    first = [one for one in told if one.generation == 1]
    assert (first[-1].skipped, first[-1].skipped_samples) == (2, 0)
    assert job.text().count("steps 3-4 left out: 2 batches") == 1, "one rank tells of it, and once"


POLICIES = {
    "skip-batches": ("--set", "loss.skip_batches=4"),
    "rewind-and-skip": ("--set", "loss.skip_batches=2"),
    "lower-lr": ("--set", "loss.lower_to=0.3333333", "--set", "loss.lower_steps=8"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_spike_is_answered_and_a_run_that_was_told_so_by_hand_is_the_same(start: Start, policy: str) -> None:
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--set", "loss.window=32")
    told = {"HOLDFAST_STEPS": "70", "HOLDFAST_PAUSE": "0.1", "HOLDFAST_SPIKE": "1"}
    wanted = ("--set", f"loss.policy={policy}", *POLICIES[policy])
    job = start(*nodes, *wanted, script=TRAIN, HOLDFAST_STORE="stored", **told)
    job.ends(0, ENDS_S)
    [record] = job.report().incidents
    assert record.kind == "loss" and not record.evicted and record.resumed_from is not None
    first, second = launches(job)
    assert (first.skips, first.eases) == ((), ())
    match policy:
        case "skip-batches":
            [skip] = second.skips
            assert skip.first > 30 and skip.last - skip.first == 3 and record.resumed_from >= 30
        case "rewind-and-skip":
            assert second.skips == (Skip(first=30, last=31),) and record.resumed_from < 30
        case "lower-lr":
            assert second.eases == (Ease(first=30, last=37, factor=0.3333333),) and record.resumed_from < 30
    job.run_dir.rename(job.folder / "spiked-run")
    env = {
        "HOLDFAST_SKIP": ",".join(f"{skip.first}-{skip.last}" for skip in second.skips),
        "HOLDFAST_EASE": ",".join(f"{ease.factor}:{ease.first}-{ease.last}" for ease in second.eases),
    }
    by_hand = start(*nodes, script=TRAIN, name="by_hand", **told, **env)
    by_hand.ends(0, ENDS_S)
    assert not by_hand.report().incidents
    assert len(weights(job)) == 1 and weights(job) == weights(by_hand), "bit for bit"
    by_hand.run_dir.rename(job.folder / "by-hand-run")
    ignored = start(*nodes, script=TRAIN, name="ignored", **told)
    ignored.ends(0, ENDS_S)
    assert weights(ignored) != weights(job), "what was left out or eased mattered"
