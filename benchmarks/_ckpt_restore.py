"""Restoring from own memory after SIGKILL, under a real `holdfast run`: the time of `restore()` beside memory copies.

Two copies of the same bytes are taken right after each restore by the same process, with as many threads: one between
warm buffers, and one into fresh memory, which a new process cannot do without.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import torch

import holdfast
from benchmarks._ckpt_io import timed
from benchmarks._ckpt_state import State
from benchmarks._harness import holdfast as command
from benchmarks._report import FULL

KILLS = 11 if FULL else 7
LIMIT_S = 240.0
WARM_COPIES = 5
NOTES = "HOLDFAST_BENCH_NOTES"  # in a rank's environment: where it writes


class Restored(msgspec.Struct, kw_only=True):
    """One restore, in seconds."""

    step: int
    lost: int  # steps that were sealed, and are not there
    source: str
    restore_s: float
    copy_s: float
    fresh_s: float


def measure(folder: Path) -> list[Restored]:
    """One job whose rank kills itself as often."""
    notes = folder / "restores"
    job = [*command(folder / "run", "--standalone", "--nproc-per-node=1", f"--max-restarts={KILLS}"), __file__]
    env = os.environ | {NOTES: str(notes)}
    with (folder / "words").open("wb") as words:
        launcher = subprocess.Popen(job, env=env, stdout=words, stderr=words, start_new_session=True)
        try:
            launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGTERM)  # it stops what it has started
            launcher.wait(60)
    if not notes.exists():
        raise RuntimeError(f"nothing was restored:\n{(folder / 'words').read_text(errors='replace')}")
    lines = notes.read_bytes().splitlines()[1:]  # the first is not counted
    return [msgspec.json.decode(line, type=Restored) for line in lines]


def one_life() -> None:
    """Restore, note how long it took, save some steps, and die."""
    notes = Path(os.environ[NOTES])
    sealed = notes.with_name("sealed")
    state = State(trained=not sealed.exists())  # as any script: an optimizer has no state yet when it is restored
    checkpointer = holdfast.Checkpointer(model=state.model, optimizer=state.optimizer)
    began_at = time.perf_counter()
    step = checkpointer.restore()
    took_s = time.perf_counter() - began_at
    if step:
        lost = int(sealed.read_text()) - step
        copy_s, fresh_s = _copies(state.bytes())
        found = Restored(
            step=step,
            lost=lost,
            source=checkpointer.restored_from,
            restore_s=took_s,
            copy_s=copy_s,
            fresh_s=fresh_s,
        )
        with notes.open("ab") as lines:
            lines.write(msgspec.json.encode(found) + b"\n")
    for number in (step + 1, step + 2):
        assert checkpointer.save(number)
        sealed.write_text(str(number))
    if step < 2 * KILLS:
        os.kill(os.getpid(), signal.SIGKILL)


def _copies(size: int) -> tuple[float, float]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    source, fresh = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    fresh_s = timed(lambda: fresh.copy_(source))
    return sorted(timed(lambda: fresh.copy_(source)) for _ in range(WARM_COPIES))[WARM_COPIES // 2], fresh_s


if __name__ == "__main__":
    one_life()
