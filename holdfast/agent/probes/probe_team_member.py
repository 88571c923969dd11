"""One process of a team on this node: `python -m holdfast.agent.probes.probe_team_member TASK`; prints its findings."""

import importlib
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA comes up; without it sums may differ

import msgspec
import torch

from holdfast.agent.probes.probe_team import TeamTask, join_team
from holdfast.decoding import from_json
from holdfast.linux import own_process_settings


def main() -> None:
    own_process_settings.die_with_parent(os.getppid())
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print where they like
    task = from_json(sys.argv[1], TeamTask)
    from holdfast.agent.probes.probe_tools import make_deterministic

    make_deterministic()
    device = join_team(task)
    module = importlib.import_module(f"holdfast.agent.probes.{task.module}")
    for found in module.run_rank(task, device):
        out.write(msgspec.json.encode(found) + b"\n")
    out.flush()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    torch.distributed.barrier()  # whoever leaves early takes connections along that others still use
    os._exit(0)  # all is said; taking groups and CUDA down takes long, and may hang on a sick machine


if __name__ == "__main__":
    main()
