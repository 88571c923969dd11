"""Holdfast keeps large PyTorch training jobs productive while machines fail; here are the verbs a script uses.

holdfast.attach(ddp)                      # the same sums in every generation, so that a resume is exact
holdfast.step(n, loss=loss, tokens=4096)  # the step that is done, and what it took
holdfast.watch(optimizer)                 # its updates are looked at, too
with holdfast.phase("eval"): ...          # what the rank is at, when it is not training
ckpt = holdfast.Checkpointer(...)         # state that survives: ckpt.restore(), ckpt.save(n)
replay = holdfast.replayable(seed=seed)   # its work may be done again, to find a machine that does it wrong
if holdfast.skip(n): continue             # before step n: its batch is to be left out
for n, batch in holdfast.batches(loader)  # the same for who has a loader
@holdfast.survive(model=ddp)              # the function that is entered again, in the same process, when others fail
"""

from holdfast.client.training.progress import here as _here
from holdfast.client.training.script_replay import replayable
from holdfast.client.training.skipped_batches import batches, skip

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from holdfast.client.checkpointing.checkpointer import Checkpointer
    from holdfast.client.survival.survivor import survive

__version__ = "0.1.0"
__all__ = ["Checkpointer", "attach", "batches", "phase", "replayable", "skip", "step", "survive", "watch"]

attach = _here.attach
step = _here.step
phase = _here.phase
watch = _here.watch
_here.seek_groups()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Some verbs bring torch with them, so they come when they are asked for."""
    if name == "Checkpointer":
        from holdfast.client.checkpointing.checkpointer import Checkpointer

        return Checkpointer
    if name == "survive":
        from holdfast.client.survival.survivor import survive

        return survive
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
