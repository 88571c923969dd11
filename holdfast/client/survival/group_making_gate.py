"""A gate that all ranks of a generation pass before they make groups. A rank that waits at the gate can still be told
to leave its generation. A rank that makes groups cannot: it waits for the others in a call that nothing interrupts."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from holdfast.checkpoint.keeper_client import current_generation

_LOOK_S = 0.02


def await_ranks() -> None:
    """Return once all ranks of this generation have called this function."""
    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    gate = dist.PrefixStore(f"holdfast/gate/{current_generation()}", store)
    gate.add("there", 1)
    while gate.add("there", 0) < world:
        time.sleep(_LOOK_S)
