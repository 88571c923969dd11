"""A gloo group of this process alone, which ends without standing still for ever."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

_GLOO_THREAD = "pt_gloo_runloop"
_LOOK_S = 0.02
_PATIENCE_S = 60.0


@contextmanager
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        await_gloo_threads()
        dist.destroy_process_group()


def await_gloo_threads() -> None:
    """Wait until gloo's threads sleep, and do so without the GIL.

    A gloo thread needs the GIL to free what the last sum of a backward pass held. Whoever drops the last reference to
    the group waits for that thread and holds the GIL meanwhile: both would wait for ever.
    """
    until = time.monotonic() + _PATIENCE_S
    seen: list[str] = []
    while ((now := _gloo_thread_switches()) != seen or "State:\tR (running)" in now) and time.monotonic() < until:
        seen = now
        time.sleep(_LOOK_S)


def _gloo_thread_switches() -> list[str]:
    """Whether each of the threads sleeps, and how often it did. One that waits for the GIL looks again every 5 ms."""
    told = []
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().strip() == _GLOO_THREAD:
            lines = (thread / "status").read_text().splitlines()
            told += [thread.name, *(line for line in lines if line.startswith(("State", "voluntary")))]
    return told
