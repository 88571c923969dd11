"""Holdfast keeps large PyTorch training jobs productive while machines fail. A script may use these functions.

holdfast.attach(ddp)                      # fixes the order of gradient sums, so that a resume is exact
holdfast.step(n, loss=loss, tokens=4096)  # reports that step n is done, with its loss and number of tokens
holdfast.watch(optimizer)                 # reports the size of the optimizer's updates
with holdfast.phase("eval"): ...          # reports what the rank does when it is not training
ckpt = holdfast.Checkpointer(...)         # saves and restores state: ckpt.restore(), ckpt.save(n)
replay = holdfast.replayable(seed=seed)   # lets nodes repeat steps, to find one that computes wrongly
if holdfast.skip(n): continue             # before step n: whether to leave its batch out
for n, batch in holdfast.batches(loader)  # yields the batches of a loader, except those to skip
batch = holdfast.GlobalBatch(...)         # divides each step's samples among the ranks, however many there are
pipeline = holdfast.ElasticPipeline(...)  # a model in layers, whose ranks bring their state to others after a failure
@holdfast.survive(model=ddp)              # calls the function again, in the same process, when another rank fails
"""

from holdfast.client.training.progress import here as _here
from holdfast.client.training.script_replay import replayable
from holdfast.client.training.skipped_batches import batches, skip

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from holdfast.client.checkpointing.checkpointer import Checkpointer
    from holdfast.client.elastic.pipeline import ElasticPipeline
    from holdfast.client.survival.global_batch import GlobalBatch, Microbatch
    from holdfast.client.survival.survivor import Here, survive

__version__ = "0.1.0"
__all__ = [
    "Checkpointer",
    "ElasticPipeline",
    "GlobalBatch",
    "Here",
    "Microbatch",
    "attach",
    "batches",
    "phase",
    "replayable",
    "skip",
    "step",
    "survive",
    "watch",
]

attach = _here.attach
step = _here.step
phase = _here.phase
watch = _here.watch
_here.seek_groups()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Import a name on first use, because its module imports torch."""
    if name == "Checkpointer":
        from holdfast.client.checkpointing.checkpointer import Checkpointer

        return Checkpointer
    if name == "ElasticPipeline":
        from holdfast.client.elastic.pipeline import ElasticPipeline

        return ElasticPipeline
    if name in ("Here", "survive"):
        from holdfast.client.survival import survivor

        return getattr(survivor, name)
    if name in ("GlobalBatch", "Microbatch"):
        from holdfast.client.survival import global_batch

        return getattr(global_batch, name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
