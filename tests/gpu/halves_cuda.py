"""Two halves on a GPU, for real: `python -m tests.gpu.halves_cuda` on a machine that has one.

Four nodes of one rank share the GPU. On one of them one number of a gradient is wrong from some step on, and a step
later no loss is finite. No probe sees it; a replay in two halves names the node, by what it sent before the sum.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.cli.commands.report_command import load_report

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import holdfast

folder, steps = sys.argv[1], 60
holdfast.replayable(seed=0)
dist.init_process_group("gloo")
device = torch.device("cuda", 0)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).to(device)

def computed(grad):
    sick = open(f"{folder}/sick").read() if os.path.exists(f"{folder}/sick") else ""
    if step >= 15 and os.environ["HOLDFAST_NODE"] == sick:
        grad = grad.clone()
        grad.view(torch.int32).view(-1)[5] = 0x7F800000  # one number, infinite
    return grad

next(net.parameters()).register_hook(computed)
ddp = holdfast.attach(DistributedDataParallel(net))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer)
first = ckpt.restore() + 1
if os.environ["HOLDFAST_GENERATION"] == "1" and dist.get_rank() == 1:
    with open(f"{folder}/sick", "w") as file:
        file.write(os.environ["HOLDFAST_NODE"])
for step in range(first, steps + 1):
    x = torch.randn(32, 64, device=device)
    loss = (ddp(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step, loss=loss.item())
del ddp, ckpt
dist.destroy_process_group()
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        flags = ["--nnodes", "4", "--nproc-per-node", "1", "--standbys", "1", "--run-dir", str(folder / "run")]
        words = [
            sys.executable,
            "-m",
            "holdfast.cli",
            "run",
            *flags,
            "--set",
            "replay.most=2",
            str(folder / "train.py"),
            name,
        ]
        env = os.environ | {"HOLDFAST_HOME": str(folder / "home")}
        code = subprocess.run(words, check=False, cwd=folder, env=env).returncode
        incidents = load_report(folder / "run").incidents
        sick = (folder / "sick").read_text()
        for record in incidents:
            print(record.sentence, "|", record.verdict.reason)
        evicted = [node for record in incidents for node in record.evicted]
        named = "came to another result than two others at step 15" in incidents[-1].verdict.reason
        print(f"code {code}, sick {sick}, evicted {evicted}, named by halves: {named}")
        return 0 if (code, evicted, named) == (0, [sick], True) else 1


if __name__ == "__main__":
    sys.exit(main())
