"""Ranks that survive: one of a job is killed, and the others go on in their processes to the weights of a calm run."""

import re
import signal
from pathlib import Path

import pytest

from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_transcript
from tests.cli.driver import Job, gone
from tests.cli.rungs import CALM, PATIENCE_S, QUICK, climbed, reaches, said, standbys
from tests.cli.test_report_command import shown_report
from tests.conftest import job_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
slow = pytest.mark.slow

TWO = ("--nnodes", "2", "--nproc-per-node", "2")

# Groups and model are made once; what changes is made in the function, or restored there.
TRAIN = """
import ctypes, hashlib, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import holdfast
folder, kind = sys.argv[1], os.environ.get("HOLDFAST_KIND", "ddp")
steps, gate = int(os.environ.get("HOLDFAST_STEPS", "60")), int(os.environ.get("HOLDFAST_GATE", "0"))
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = [dist.new_group([a, a + 1]) for a in range(0, world, 2)][rank // 2]
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
if kind == "ddp":
    model = holdfast.attach(nn.parallel.DistributedDataParallel(net))
else:
    shape, names = ((world,), ("shard",)) if kind == "fsdp2" else ((2, world // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(here):
    ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer)
    first = ckpt.restore() + 1
    assert here.step == first - 1
    print("from", first - 1, ckpt.restored_from, here.generation, flush=True)
    for step in range(first, steps + 1):
        while step == gate and not os.path.exists(f"{folder}/go"):
            time.sleep(0.02)
        if os.environ.get("HOLDFAST_BETWEEN") == f"{rank} {step} {here.generation}":
            dying = lambda *_: os.kill(os.getpid(), 9)
            dist.barrier = dying  # after its backward pass, before that of others is over
        if os.environ.get("HOLDFAST_STUCK") == f"{rank} {step} {here.generation}":
            how = os.environ.get("HOLDFAST_STUCK_HOW")
            ctypes.PyDLL(None).sleep(1000) if how == "gil" else time.sleep(1000)  # nothing that is raised here is seen
        if os.environ.get("HOLDFAST_RAISE") == f"{rank} {step} {here.generation}":
            raise RuntimeError("boom")
        chance = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 8, generator=chance)
        loss = (model(x) - x).square().mean()
        shared = loss.detach().clone()
        dist.all_reduce(shared, group=mine)
        (loss * (1 + 0.01 * shared)).backward()
        if step == gate and os.environ.get("HOLDFAST_BETWEEN"):
            dist.barrier()  # a rank that fails before it leaves gradients to the others
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step)
        holdfast.step(step, loss=loss.detach())
        time.sleep(0.02)

if os.environ.get("HOLDFAST_PLAIN"):
    class here: generation, step = int(os.environ["HOLDFAST_GENERATION"]), int(os.environ["HOLDFAST_RESUME"])
    train(here)
else:
    holdfast.survive(model=model)(train)()
whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
print("weights", hashlib.sha256(b"".join(p.numpy().tobytes() for p in whole)).hexdigest(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def calm_weights(folder: Path, server: Path, script: str = TRAIN, **more: str) -> set[str]:
    """The weights of a run with no faults."""
    (folder / "train.py").write_text(script)
    words = ("--run-dir", str(folder / "run"), *TWO, *CALM, "train.py", str(folder))
    home = {"HOLDFAST_HOME": str(folder / "home"), "HOLDFAST_FORK_SERVER": str(server)}
    job = Job(folder, *words, env=make_rank_environment(job_environment(**home, **more)))
    try:
        job.ends(0, PATIENCE_S)
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(PATIENCE_S)
    return weights(job)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, warm_server: Path) -> set[str]:
    return calm_weights(tmp_path_factory.mktemp("calm"), warm_server)


def weights(job: Job) -> set[str]:
    return {words[0] for words in said(job, "weights")}


def strike(job: Job, rank: int) -> None:
    reaches(job, 19)
    job.kill(job.rank(rank))
    (job.folder / "go").touch()


def test_a_rank_goes_on_in_its_process(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", *CALM, script=TRAIN, HOLDFAST_GATE="20", HOLDFAST_STEPS="30")
    strike(job, 1)
    job.ends(0)
    before, after = job.ranks(2), job.ranks(2, generation=2)
    assert before[0] == after[0] and before[1] != after[1]
    assert said(job, "from")[2:] == [["19", "memory", "2"]] * 2, "what it prints is of the new generation"
    [record] = job.report().incidents
    assert (record.good_step, record.resumed_from, record.kept, record.failures) == (19, 19, 1, 1)
    assert_transcript(job, "survivors")
    assert re.search(r"\b1 rank .* 1 new ", shown_report(job.run_dir))
    assert len(weights(job)) == 1
    job.check_replay()


@slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_the_weights_are_those_of_a_calm_run(
    start: Start, calm: set[str], kind: str, tmp_path_factory: pytest.TempPathFactory, warm_server: Path
) -> None:
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_GATE="20", HOLDFAST_KIND=kind)
    strike(job, 2)
    job.ends(0)
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    [record] = job.report().incidents
    assert (record.resumed_from, record.kept) == (19, 3)
    if kind != "ddp":
        calm = calm_weights(tmp_path_factory.mktemp(kind), warm_server, HOLDFAST_KIND=kind)
    assert weights(job) == calm


@slow
def test_they_survive_an_exception_in_another_rank(start: Start, calm: set[str]) -> None:
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_RAISE="2 20 1")
    job.ends(0)
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    assert re.search(r"\(RuntimeError: boom\); .* 3 ranks ", job.text())
    assert weights(job) == calm


@slow
def test_gradients_of_the_step_that_was_left_are_dropped(
    start: Start, tmp_path_factory: pytest.TempPathFactory, warm_server: Path
) -> None:
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_KIND="fsdp2", HOLDFAST_GATE="20", HOLDFAST_BETWEEN="2 20 1")
    (job.folder / "go").touch()
    job.ends(0)
    assert [record.kept for record in job.report().incidents] == [3]
    assert weights(job) == calm_weights(tmp_path_factory.mktemp("fsdp2"), warm_server, HOLDFAST_KIND="fsdp2")


@slow
def test_a_standby_takes_the_seat_of_a_lost_node_beside_survivors(start: Start, calm: set[str]) -> None:
    job = start(*TWO, "--standbys", "1", *QUICK, script=TRAIN, HOLDFAST_GATE="20")
    standbys(job, 1)
    reaches(job, 19)
    lost = job.until(lambda: [one["node"] for one in job.status()["nodes"] if one["ranks"] == "2-3"], "its node")[0]
    job.kill(job.holder(lost))
    (job.folder / "go").touch()
    job.ends(0)
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    [record] = job.report().incidents
    assert (record.evicted, record.kept, record.renewed) == ((lost,), 2, 2)
    assert weights(job) == calm


@slow
def test_ranks_survive_again_and_again(start: Start, calm: set[str]) -> None:
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_GATE="20")
    strike(job, 2)
    reaches(job, 30, generation=2)
    job.kill(job.rank(1, generation=2))
    job.ends(0)
    pids = [job.ranks(4, generation) for generation in (1, 2, 3)]
    assert pids[0][0] == pids[2][0] and pids[0][3] == pids[2][3] and pids[1][2] == pids[2][2]
    assert [record.kept for record in job.report().incidents] == [3, 3]
    assert weights(job) == calm


@slow
def test_a_failure_amid_this_recovery_is_an_ordinary_one(start: Start, calm: set[str]) -> None:
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_GATE="20")
    reaches(job, 19)
    job.kill(job.rank(2))
    job.kill(job.rank(3, generation=2), signal.SIGABRT)  # one that went on, as soon as it did
    (job.folder / "go").touch()
    job.ends(0)
    assert not set(job.ranks(4)) & set(job.ranks(4, generation=3)), "then all ranks have new processes"
    assert climbed(job).path == "launch stop restart launch stop restart launch end"
    [record] = job.report().incidents
    assert (record.failures, record.kept) == (2, 0)
    assert weights(job) == calm


@slow
@pytest.mark.parametrize("how", ["gil", "waits"])
def test_a_rank_that_cannot_leave_is_replaced(start: Start, calm: set[str], how: str) -> None:
    """Be it in a call that does not return, or in one that holds the interpreter, so that none of its threads runs."""
    flags = (*CALM, "--set", "recovery.survive_s=2")
    job = start(*TWO, *flags, script=TRAIN, HOLDFAST_GATE="20", HOLDFAST_STUCK="1 20 1", HOLDFAST_STUCK_HOW=how)
    strike(job, 2)
    job.ends(0)
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, True]
    assert weights(job) == calm and gone(*before)


@slow
@pytest.mark.parametrize("how", ["plain", "off"])
def test_without_it_nothing_changes(start: Start, calm: set[str], how: str) -> None:
    flags, env = ((), {"HOLDFAST_PLAIN": "1"}) if how == "plain" else (("--set", "recovery.survive_s=0"), {})
    job = start(*TWO, *CALM, *flags, script=TRAIN, HOLDFAST_GATE="20", **env)
    strike(job, 2)
    job.ends(0)
    assert not set(job.ranks(4)) & set(job.ranks(4, generation=2))
    assert [record.kept for record in job.report().incidents] == [0]
    assert weights(job) == calm


NET = "nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))"
# Frames of torch itself, such as those of Sequential, are not compiled beside DDP.
COMPILED = """
compiled = []
def counted(graph, inputs):
    compiled.append(1)
    return graph.forward
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))
net = Own()
net.compile(backend=counted)
"""


@slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_survivors_compile_nothing_again(
    start: Start, kind: str, tmp_path_factory: pytest.TempPathFactory, warm_server: Path
) -> None:
    script = TRAIN.replace(f"\nnet = {NET}\n", COMPILED).replace(
        "        holdfast.step(step,",
        '        print("graphs", os.getpid(), step, len(compiled), flush=True)\n        holdfast.step(step,',
    )
    job = start(*TWO, *CALM, script=script, HOLDFAST_GATE="20", HOLDFAST_KIND=kind)
    strike(job, 2)
    job.ends(0)
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    graphs = {(int(pid), int(step)): int(count) for pid, step, count in said(job, "graphs")}
    for pid in set(before) & set(after):
        assert graphs[pid, 60] == graphs[pid, 19] > 0
    assert weights(job) == calm_weights(tmp_path_factory.mktemp(kind), warm_server, HOLDFAST_KIND=kind)
