"""A relaunch sums gradients in the same order: checked bit for bit with four ranks and several buckets."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.conftest import Ended, Zygote

pytestmark = pytest.mark.e2e

Group = Callable[[], list[dict[str, str]]]

TRAIN = """
import hashlib, os, sys
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
import holdfast

first, last, how, checkpoint = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(96, 96), nn.Tanh())))
ddp = DDP(net, bucket_cap_mb=0.05, static_graph="static" in how, gradient_as_bucket_view="view" in how)
if "hooked" in how:
    ddp.register_comm_hook(None, allreduce_hook)
if "attached" in how or "hooked" in how:
    assert holdfast.attach(ddp) is ddp
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
if "saved" in how:
    model = net if "bare" in how else torch.nn.ModuleList([ddp]) if "inner" in how else ddp
    ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer)
if first:
    state = torch.load(checkpoint)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(first, last):
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(4 * step + rank))
    if "accumulate" in how:
        with ddp.no_sync():
            ddp(x / 2).square().mean().backward()
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and rank == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
dist.barrier()
buckets = ddp.logger._get_ddp_logging_data().strs_map["rebuilt_bucket_sizes"].count(",") + 1
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(), buckets, flush=True)
sys.stderr.flush()
os._exit(0)
"""


_GENERATIONS = itertools.count(1)


def train(zygote: Zygote, group: Group, arena: str, *argv: str) -> Ended:
    script = zygote.folder / "train.py"
    script.write_text(TRAIN)
    generation = str(next(_GENERATIONS))  # as slots are used again by another
    envs = [env | {"HOLDFAST_SLOT": f"{arena}:{env['RANK']}", "HOLDFAST_GENERATION": generation} for env in group()]
    ended = [zygote.wait(rank) for rank in zygote.forks(envs, str(script), *argv)]
    assert len({(one.code, one.out) for one in ended}) == 1, ended  # weights and all
    return ended[0]


@pytest.mark.parametrize(
    "how",
    [
        "attached view accumulate",
        "saved",
        pytest.param("saved bare", marks=pytest.mark.slow),
        pytest.param("saved inner", marks=pytest.mark.slow),
        pytest.param("saved attached", marks=pytest.mark.slow),
        pytest.param("attached", marks=pytest.mark.slow),
        pytest.param("attached static", marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact(warm: Zygote, group: Group, arena: tuple[str, object], tmp_path: Path, how: str) -> None:
    checkpoint = str(tmp_path / "checkpoint.pt")
    whole = train(warm, group, arena[0], "0", "6", how, checkpoint)
    resumed = train(warm, group, arena[0], "3", "6", how, checkpoint)
    assert resumed == whole
    assert (whole.code, whole.err) == (0, "")
    assert int(whole.out.split()[1]) > 1, "one bucket proves nothing"


def test_what_cannot_be_fixed_stays_as_it_was(
    warm: Zygote, group: Group, arena: tuple[str, object], tmp_path: Path
) -> None:
    plain = train(warm, group, arena[0], "0", "3", "plain", str(tmp_path / "checkpoint.pt"))
    hooked = train(warm, group, arena[0], "0", "3", "hooked", str(tmp_path / "checkpoint.pt"))
    assert "holdfast.attach" in hooked.err and "holdfast" not in plain.err
    assert hooked.out == plain.out
    hooked = train(warm, group, arena[0], "0", "3", "hooked saved", str(tmp_path / "checkpoint.pt"))
    assert hooked.err.count("holdfast: ") == 2 and hooked.out == plain.out
