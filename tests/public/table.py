"""The public scripts, and what must be said of each when it is struck."""

import re
from enum import Enum

import msgspec

STEPS = 60  # that each makes, by its own count
SAVES = 10  # from checkpoint to checkpoint
STRUCK = 24  # at this step or soon after; there are checkpoints by then, and work since the last one


class Resuming(Enum):
    """What can be known, without a word of the script, about where it goes on after a restart."""

    RESUMED = "its optimizer has the count that it was saved with"
    ANEW = "its optimizer is new, and nothing was read"
    NOT = "its optimizer counts nothing, and something was read"


# How the sentence about an incident must begin, by what was done to rank 1.
CAUSES = {
    "killed": r"rank 1 on n0 was killed by SIGKILL \(sender unknown\)",
    "frozen": r"rank 1 on n0 has stood at step {good} for \d+ s: rank 1 is stopped",
}


class Script(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    line: str  # what it prints when it has made a step, with the groups that `step_of` takes
    known: Resuming
    files: tuple[str, ...]  # that it leaves, in its own folder or in the working directory
    args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("--nproc-per-node", "2")
    needs: str = ""  # a package
    grain: int = 1  # steps from line to line
    offset: int = 0  # of the number that it prints to the steps that it has made
    per_epoch: int = 0  # steps, where it prints epochs
    samples: int = 1  # of a step, where it prints samples
    loss_source: str = ""  # the call that its losses are read from, which the console names; "": it makes none
    exact: bool = True  # after a restart it goes on as if there had been none, or from its very beginning
    spawns: bool = False  # it starts its ranks itself: what is struck is a child
    causes: dict[str, str] = msgspec.field(default_factory=lambda: CAUSES)

    @property
    def path(self) -> str:
        return f"proj/{self.name}.py"

    def read(self, line: str) -> tuple[int, str] | None:
        """How many steps were made, and the loss as it was printed; None: the line is about something else."""
        found = re.search(self.line, line)
        if not found:
            return None
        said = found.groupdict()
        step = float(said.get("step") or 0) / self.samples + self.per_epoch * float(said.get("epoch") or 0)
        return round(step) + self.offset, said["loss"]


SCRIPTS = {
    script.name: script
    for script in (
        Script(
            name="nano_gpt",
            line=r"^iter (?P<step>\d+): loss (?P<loss>[\d.]+)",
            offset=1,
            known=Resuming.RESUMED,
            files=("proj/out/ckpt.pt",),
            exact=False,  # its batches are drawn anew
        ),
        Script(
            name="multigpu_torchrun",
            line=r"Epoch (?P<epoch>\d+) \| Steps: \d+ \| Loss: (?P<loss>[\d.]+)",
            flags=("--nproc-per-node", "2", "--set", "hang.act_s=30"),  # torch may stand in its teardown
            args=("6", "1"),
            grain=10,
            offset=10,
            per_epoch=10,
            known=Resuming.NOT,
            files=("snapshot.pt",),
        ),
        Script(
            name="mnist",
            line=r"^Train Epoch: (?P<epoch>\d+) \[(?P<step>\d+)/\d+ .*Loss: (?P<loss>[\d.]+)",
            args=("--save-model",),
            offset=1 - 20,
            per_epoch=20,
            samples=4,
            known=Resuming.ANEW,
            files=("mnist_cnn.pt",),
        ),
        Script(
            name="hf_trainer",
            line=r"'loss': '?(?P<loss>[\d.]+).*'epoch': '?(?P<epoch>[\d.]+)",
            per_epoch=20,
            needs="transformers",
            loss_source="Trainer.training_step()",
            known=Resuming.RESUMED,
            files=("results/checkpoint-60/trainer_state.json", "results/final/model.safetensors"),
        ),
        Script(
            name="lightning_trainer",
            line=r"^step (?P<step>\d+): loss (?P<loss>[\d.]+)",
            needs="lightning",
            known=Resuming.RESUMED,
            files=("checkpoints/last.ckpt",),
        ),
        Script(
            name="accelerate_loop",
            line=r"^step (?P<step>\d+) loss (?P<loss>[\d.]+)",
            needs="accelerate",
            known=Resuming.RESUMED,
            files=("states/epoch_6/optimizer.bin",),
        ),
        Script(
            name="spawned_ddp",
            line=r"^step (?P<step>\d+)/\d+ loss (?P<loss>[\d.]+)",
            flags=("--nproc-per-node", "1"),
            known=Resuming.RESUMED,
            files=("spawned.pt",),
            spawns=True,
            causes={
                "killed": r"rank 0 on n0 exited with code 1 \(torch.multiprocessing.spawn.ProcessExitedException: "
                r"process 1 terminated with signal SIGKILL\)",
                "frozen": r"rank 0 on n0 has stood at step {good} for \d+ s: python \(pid \d+\) of rank 0 is stopped",
            },
        ),
        Script(
            name="fsdp2_dcp",
            line=r"^step (?P<step>\d+) loss (?P<loss>[\d.]+)",
            known=Resuming.RESUMED,
            files=("checkpoints/60/.metadata", "checkpoints/60/__0_0.distcp", "checkpoints/60/__1_0.distcp"),
        ),
    )
}
