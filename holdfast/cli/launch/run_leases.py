"""The lease that a controller holds while it runs, if its journal is in a run directory that other hosts may see."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from holdfast.cli.launch.stoppable_wait import StoppableWait
from holdfast.journal.file_lease import FOLDER, FileLease, own_holder
from holdfast.journal.lease_term import no_lease
from holdfast.wire.run_and_node_specs import RunSpec


class RunLease(Protocol):
    """A lease that one controller at a time has."""

    async def take(self) -> None:
        """Wait until no other controller has the lease, and take it."""

    def check(self) -> None:
        """Raise LeaseLostError if another controller may have the lease by now. This asks nobody and never waits."""

    async def keep(self) -> None:
        """Renew the lease forever. Raise LeaseLostError once another controller has it, or may have it."""

    async def let_go(self) -> None: ...


@contextlib.asynccontextmanager
async def hold_lease(
    run: RunSpec, run_dir: Path, say: Callable[[str], None], wait: StoppableWait
) -> AsyncIterator[Callable[[], None]]:
    """Hold the lease of a run during the block, which gets the function that checks it. LeaseLostError ends the block.

    If the journal is in Postgres, the lease there decides. Then the Lease in Kubernetes only owns the pods."""
    lease = make_lease(run, run_dir, say)
    if lease is None or run.journal:
        yield no_lease
    else:
        async with wait.waiting():
            await lease.take()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(lease.keep())
            yield lease.check
            keeping.cancel()
    if lease is not None:
        await lease.let_go()


def make_lease(run: RunSpec, run_dir: Path, say: Callable[[str], None]) -> RunLease | None:
    if run.fleet == "kubernetes":
        from holdfast.cli.launch import kubernetes_launch  # its client is an extra, and slow to import

        return kubernetes_launch.make_lease(run, run_dir, say)
    return make_file_lease(run_dir, say) if run.fleet == "slurm" and not run.journal else None


def make_file_lease(run_dir: Path, say: Callable[[str], None]) -> FileLease:
    return FileLease(run_dir / FOLDER, own_holder(), say)


def ask_on_loop(epoch: Callable[[], int]) -> Callable[[], int]:
    """Return a function that asks for the epoch, and that threads may call. A journal is asked by the thread of the
    running event loop alone, because its connection is not made for several threads."""
    loop, owner = asyncio.get_running_loop(), threading.get_ident()

    async def ask() -> int:
        return epoch()

    def asked() -> int:
        return epoch() if threading.get_ident() == owner else asyncio.run_coroutine_threadsafe(ask(), loop).result()

    return asked
