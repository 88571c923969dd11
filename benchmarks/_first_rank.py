"""A small DDP script as people write them: it imports, prints a line, trains, and prints a line for its first step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    print("first line", flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(3):
        loss = ddp(torch.randn(8, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            print("first step", flush=True)
    del ddp  # one that outlives its group can deadlock when it is freed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
