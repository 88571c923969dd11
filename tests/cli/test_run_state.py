"""State that survives: a rank's death costs no step, a node's what storage lacks, and nobody can tell afterwards."""

import os
import re
import signal
import time

import pytest

from holdfast.core.snapshots.copy_keepers import choose_keepers
from holdfast.model.job_and_seats import Seat
from tests.cli.conftest import Start
from tests.cli.driver import Job, run_command
from tests.cli.test_run_survival import another_controller

pytestmark = pytest.mark.e2e

# Dropout and inputs are drawn from the rank's own random numbers, which are part of the state.
TRAIN = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import holdfast

folder, steps = sys.argv[1], int(os.environ.get("HOLDFAST_STEPS", "1000000"))
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
ddp = holdfast.attach(DistributedDataParallel(net))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
stored = {"path": os.environ["HOLDFAST_STORE"], "every": 5} if "HOLDFAST_STORE" in os.environ else {}
ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer, **stored)
first = ckpt.restore() + 1
print("from", first - 1, ckpt.restored_from, flush=True)
for step in range(first, steps + 1):
    x = torch.randn(4, 8)
    loss = (ddp(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step, loss=loss)
    time.sleep(0.2 if os.path.exists(f"{folder}/slow-{os.environ['RANK']}-{first}") else 0.05)
    stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(stop)
    if stop:
        break
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
print("weights", digest, flush=True)
del ddp, ckpt
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def said(job: Job, word: str) -> list[list[str]]:
    """What ranks printed after a word, in order."""
    lines = [line.split() for line in job.text().splitlines() if f"] {word} " in line]
    return [line[line.index(word) + 1 :] for line in lines]


def test_a_killed_rank_costs_no_step_and_snapshots_outlive_the_agent(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=TRAIN)
    job.trains()
    job.kill(job.rank(1))
    job.trains(generation=2)
    node = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "0")
    agent = job.agent(node)
    job.kill(agent)
    job.until(lambda: job.agent(node) != agent, "another agent")
    job.kill(job.rank(0, generation=2))
    job.trains(generation=3)
    job.finish()
    job.ends(0)
    steps = [record.resumed_from for record in job.report().incidents]
    for record in job.report().incidents:
        assert record.resumed_from is not None and record.good_step - record.resumed_from <= 1
    assert said(job, "from")[2:] == [[str(step), "memory"] for step in steps for _ in range(2)]
    log = (job.run_dir / "controller.log").read_text()
    assert all(re.search(rf" step {step}: 2 .*\bmemory$", log, re.MULTILINE) for step in steps)


@pytest.mark.slow
def test_a_held_job_goes_on_from_memory_though_it_is_resumed_before_its_nodes_have_found_the_next_controller(
    start: Start,
) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=TRAIN)
    job.trains()
    assert run_command("hold", str(job.run_dir), folder=job.folder).returncode == 0
    agents = [job.agent(node) for node in ("n0", "n1")]
    for agent in agents:
        job.kill(agent, signal.SIGSTOP)
    before = job.controller()
    job.kill(before)
    another_controller(job, before)
    assert run_command("resume", "--no-wait", str(job.run_dir), folder=job.folder).returncode == 0
    for agent in agents:
        job.kill(agent, signal.SIGCONT)
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [(first, source), (second, _)] = said(job, "from")[2:]
    assert int(first) > 0 and (first, source) == (second, "memory")


def backed(job: Job) -> bool:
    """Whether peers have copies of a step that is not the first."""
    return bool(job.status()["floor"] > 3)


def test_a_lost_node_is_made_up_for_by_its_peer(start: Start) -> None:
    calm = start("--nproc-per-node", "2", script=TRAIN, name="calm", HOLDFAST_STEPS="40")
    calm.ends(0)
    calm.run_dir.rename(calm.folder / "calm-run")
    (calm.folder / "slow-0-1").touch()  # until a node is lost
    job = start("--nnodes", "2", "--standbys", "1", script=TRAIN, HOLDFAST_STEPS="40")
    job.trains()
    job.until(lambda: backed(job), "copies on peers")
    lost = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "1")
    os.kill(job.holder(lost), signal.SIGKILL)
    job.trains(generation=2)
    job.ends(0, patience_s=90)
    [record] = job.report().incidents
    assert record.evicted == (lost,) and record.resumed_from is not None and record.resumed_from > 0
    restored = [words for words in said(job, "from") if words[0] != "0"]
    assert sorted(source for _, source in restored) == ["memory", "peer"]
    assert {step for step, _ in restored} == {str(record.resumed_from)}
    assert {words[0] for words in said(job, "weights")} == {words[0] for words in said(calm, "weights")}


@pytest.mark.slow
def test_an_update_puts_the_state_of_all_ranks_that_it_goes_on_from_on_storage(start: Start) -> None:
    """Nothing else does: the next regular checkpoint is a day away, and a hurried stop writes nothing."""
    script = TRAIN.replace('"every": 5', '"every": 1_000_000')
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=script, HOLDFAST_STORE="stored")
    job.until(lambda: (job.status().get("step") or 0) >= 20, "steps")
    stored = job.folder / "stored"
    assert not [*stored.glob("step-*")]
    reached = job.status()["step"]
    with (job.folder / "job.py").open("a") as file:
        file.write("# newer\n")
    done = run_command("update", "--now", "--run", str(job.run_dir), folder=job.folder)
    assert done.returncode == 0, done.stderr
    job.until(lambda: job.report().changes, "the end of the update")
    [change] = job.report().changes
    assert change.resumed_from is not None
    assert max(reached, change.good_step - 1) <= change.resumed_from, "no step is lost"
    job.until(lambda: [path.name for path in stored.glob("step-*")], "the state on storage")
    assert run_command("stop", "--now", str(job.run_dir), folder=job.folder).returncode == 0
    job.ends(143)
    assert [path.name for path in stored.glob("step-*")] == [f"step-{change.resumed_from:08}"]
    job.run_dir.rename(job.folder / "updated-run")

    (job.folder / "finish").touch()
    again = start("--nnodes", "2", "--nproc-per-node", "1", script=script, HOLDFAST_STORE="stored", name="again")
    again.ends(0)
    assert said(again, "from") == [[str(change.resumed_from), "storage"]] * 2


@pytest.mark.slow
def test_a_lost_node_is_made_up_for_by_parity(start: Start) -> None:
    flags = ("--nnodes", "3", "--standbys", "1", "--set", "backup.parity=true")
    calm = start(*flags, script=TRAIN, name="calm", HOLDFAST_STEPS="150")
    calm.ends(0, patience_s=90)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start(*flags, script=TRAIN, HOLDFAST_STEPS="150")
    job.trains()
    job.until(lambda: backed(job), "parity on peers")
    lost = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "1")
    os.kill(job.holder(lost), signal.SIGKILL)
    job.trains(generation=2)
    job.ends(0, patience_s=90)
    [record] = job.report().incidents
    assert record.evicted == (lost,) and record.resumed_from is not None and record.resumed_from > 0
    restored = [words for words in said(job, "from") if words[0] != "0"]
    assert sorted(source for _, source in restored) == ["memory", "memory", "peer"]
    assert {step for step, _ in restored} == {str(record.resumed_from)}
    assert {words[0] for words in said(job, "weights")} == {words[0] for words in said(calm, "weights")}
    assert any(path.name.startswith("pair-") for path in (job.run_dir / "nodes").glob("*/pair-*.json"))


@pytest.mark.slow
def test_an_evicted_node_gives_its_state_before_it_leaves(start: Start) -> None:
    """Without copies on peers: the same rank dies twice, its node has to go, and still nothing is lost."""
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", "--set", "backup.enabled=false")
    job = start(*flags, script=TRAIN)
    for generation in (1, 2):
        job.trains(generation=generation)
        job.kill(job.rank(1, generation=generation))
    job.trains(generation=3)
    job.finish()
    job.ends(0)
    _, record = job.report().incidents
    assert len(record.evicted) == 1
    assert record.resumed_from is not None and record.good_step - record.resumed_from <= 1
    assert sorted(source for _, source in said(job, "from")[-2:]) == ["memory", "peer"]
    assert (job.run_dir / "nodes" / record.evicted[0] / "released").exists()


@pytest.mark.slow
def test_a_lost_node_goes_on_from_storage(start: Start) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", "--set", "backup.enabled=false")
    job = start(*flags, script=TRAIN, HOLDFAST_STORE="ckpt")
    job.trains()
    job.until(lambda: any((job.folder / "ckpt").glob("step-*/holdfast.json")), "a checkpoint")
    lost = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "1")
    os.kill(job.holder(lost), signal.SIGKILL)
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    step, source = said(job, "from")[-1]
    assert source == "storage" and int(step) % 5 == 0 and int(step) > 0


@pytest.mark.slow
def test_nobody_can_tell_afterwards(start: Start) -> None:
    """Four ranks, killed one after the other: the weights are those of a run with no faults, bit for bit."""
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "99")
    calm = start(*flags, script=TRAIN, name="calm", HOLDFAST_STEPS="150")
    calm.ends(0, patience_s=90)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start(*flags, script=TRAIN, HOLDFAST_STEPS="150", HOLDFAST_STORE="ckpt")
    for rank in range(4):
        job.trains(generation=rank + 1)
        job.kill(job.rank(rank, generation=rank + 1))
    job.ends(0, patience_s=90)
    digests = {words[0] for words in said(calm, "weights") + said(job, "weights")}
    assert len(digests) == 1, digests
    assert len(said(job, "weights")) == 4 and len(job.report().incidents) == 4


# Stages of a pipeline: every rank has weights of its own, and nobody else has them.
STAGES = TRAIN.replace("ddp = holdfast.attach(DistributedDataParallel(net))", "ddp = net").replace(
    "del ddp, ckpt", "del ckpt"
)


@pytest.mark.slow
def test_a_whole_pipeline_group_is_lost(start: Start) -> None:
    """Two nodes at once, which a rank and its copy never share."""
    flags = ("--nnodes", "4", "--standbys", "2", "--mesh", "pp=2,dp=2")
    calm = start(*flags, script=STAGES, name="calm", HOLDFAST_STEPS="120")
    calm.ends(0, patience_s=90)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start(*flags, script=STAGES, HOLDFAST_STEPS="120")
    job.trains()
    job.until(lambda: backed(job), "copies on peers")
    lost = {node["node"] for node in job.status()["nodes"] if node["ranks"] in ("0", "2")}
    for node in lost:
        os.kill(job.holder(node), signal.SIGKILL)
    job.trains(generation=2)
    job.ends(0, patience_s=90)
    [record] = job.report().incidents
    assert set(record.evicted) == lost and record.resumed_from
    assert sorted(source for step, source in said(job, "from") if step != "0") == ["memory", "memory", "peer", "peer"]
    assert sorted(words[0] for words in said(job, "weights")) == sorted(words[0] for words in said(calm, "weights"))


@pytest.mark.slow
def test_a_node_and_the_keeper_of_its_copies_are_lost_at_once(start: Start) -> None:
    """With two copies of every stage of a pipeline, without storage."""
    flags = ("--nnodes", "4", "--standbys", "2", "--set", "backup.copies=2")
    calm = start(*flags, script=STAGES, name="calm", HOLDFAST_STEPS="120")
    calm.ends(0, patience_s=120)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start(*flags, script=STAGES, HOLDFAST_STEPS="120")
    job.trains()
    job.until(lambda: backed(job), "copies on peers")
    node_of = {node["ranks"]: node["node"] for node in job.status()["nodes"]}
    seats = tuple(Seat(node=node_of[str(rank)], group_rank=rank, first_rank=rank, nproc=1) for rank in range(4))
    owner, floor = node_of["1"], job.status()["floor"]
    lost = {owner, choose_keepers(seats, (), 2)[0][owner][0]}
    for node in lost:
        os.kill(job.holder(node), signal.SIGKILL)
    job.trains(generation=2)
    job.ends(0, patience_s=120)
    [record] = job.report().incidents
    assert set(record.evicted) == lost and record.resumed_from and record.resumed_from >= floor
    restored = [words for words in said(job, "from") if words[0] != "0"]
    assert sorted(source for _, source in restored) == ["memory", "memory", "peer", "peer"]
    assert {step for step, _ in restored} == {str(record.resumed_from)}
    assert sorted(words[0] for words in said(job, "weights")) == sorted(words[0] for words in said(calm, "weights"))


# What was saved from step 40 on leads to no good, in the first two generations.
ASTRAY = TRAIN.replace(
    "holdfast.step(step, loss=loss)",
    'bad = step >= 40 and int(os.environ["HOLDFAST_GENERATION"]) < 3\n'
    '    holdfast.step(step, loss=float("nan") if bad else loss)',
)


@pytest.mark.slow
def test_a_state_that_led_astray_twice_is_not_gone_on_from(start: Start) -> None:
    job = start("--nproc-per-node", "2", script=ASTRAY, HOLDFAST_STORE="ckpt")
    job.trains(generation=3)
    job.until(lambda: job.status()["step"] > 45, "steps beyond the trouble")
    job.finish()
    job.ends(0)
    incidents = job.report().incidents  # two, or one that took two rounds
    assert {(one.kind, one.evicted) for one in incidents} == {("loss", ())}
    first, other = said(job, "from")[2:4]
    assert first == other and first[1] == "memory" and int(first[0]) in (38, 39)
    (step, source), again = said(job, "from")[-2:]
    assert source == "storage" and int(step) < int(first[0]) and again == [step, source]
    assert incidents[-1].resumed_from == int(step)


@pytest.mark.slow
def test_the_script_may_tell_its_parallel_groups(start: Start) -> None:
    script = TRAIN.replace("DistributedDataParallel(net))", 'DistributedDataParallel(net), mesh={"pp": 2, "dp": 2})')
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=script)
    job.until(lambda: ": pp=2,dp=2" in job.text(), "a word of them")
    job.trains()
    job.until(lambda: backed(job), "copies on peers")
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_a_node_that_becomes_slow_is_replaced_once_it_has_cost_enough(start: Start) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--standbys", "1", "--set", "slow.cost_s=5")
    job = start(*flags, script=TRAIN)
    job.trains()
    job.until(lambda: backed(job), "copies on peers")
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby", patience_s=100)
    known_at = time.monotonic() + 45.0
    job.until(lambda: time.monotonic() > known_at, "the job's pace and ways to be known", patience_s=100)
    (job.folder / "slow-3-1").touch()  # the machine of this generation's rank 3 is
    slow = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "2-3")
    job.says("rank 3 on ")
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks, record.evicted) == ("slow", (3,), (slow,))
    assert record.resumed_from is not None and record.good_step - record.resumed_from <= 1
