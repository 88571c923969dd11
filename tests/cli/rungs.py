"""The ladder seen from outside: jobs whose right answer is known, and the way they took, read out of the journal."""

import hashlib
import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.core.decide.job_view import JobView
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.action import Launch, Replay
from holdfast.model.incident_record import Remedy
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from tests.cli.conftest import Start
from tests.cli.driver import Job, run_command
from tests.wire.test_release_file_selection import git

PATIENCE_S = 150.0  # torch is imported on a machine busy with other things
# Nobody is lost because the machine is busy, or named because a test lets the job stand.
CALM = ("--set", "silence.silence_s=40", "--set", "hang.stance=observe", "--set", "slow.stance=observe")
QUICK = ("--set", "silence.silence_s=4", "--set", "silence.beat_s=0.5", *CALM[2:])  # where a node is lost on purpose

# Trains without torch: its state is a chain of hashes, so a step that is lost, doubled or made by other code shows.
# It waits before step HOLDFAST_GATE for a file `go`, and ends with step HOLDFAST_STEPS.
CHAIN = """
import json, os, sys, time
import holdfast
import part
folder, rank, steps = sys.argv[1], os.environ["RANK"], int(os.environ.get("HOLDFAST_STEPS", "60"))
mine, gate = f"{folder}/chain-{rank}", int(os.environ.get("HOLDFAST_GATE", "0"))
state = json.load(open(mine)) if os.path.exists(mine) else dict(step=0, chain="", made=[])
for step in range(state["step"] + 1, steps + 1):
    while step == gate and not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    time.sleep(0.02)
    state = dict(step=step, chain=part.mixed(state["chain"], step, rank), made=[*state["made"], part.NAME])
    with open(mine + ".new", "w") as file:
        json.dump(state, file)
    os.replace(mine + ".new", mine)
    holdfast.step(step, loss=1 / step)
"""

PART = """
import hashlib
NAME = {name!r}
def mixed(chain, step, rank):
    return hashlib.sha256(f"{{chain}} {{step}} {{rank}} {{NAME}}".encode()).hexdigest()
"""

# Four ranks and a fixed layout of sums, so that a relaunch is exact. Batches follow from step and rank.
WEIGHTS = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import holdfast
import part
folder = sys.argv[1]
steps, gate = int(os.environ.get("HOLDFAST_STEPS", "60")), int(os.environ.get("HOLDFAST_GATE", "0"))
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
ddp = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
stored = {"path": os.environ["HOLDFAST_STORE"], "every": 5} if "HOLDFAST_STORE" in os.environ else {}
ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer, **stored)
first = ckpt.restore() + 1
print("from", first - 1, ckpt.restored_from, flush=True)
for step in range(first, steps + 1):
    while step == gate and not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    if holdfast.skip(step):
        continue
    torch.manual_seed(1000 * step + rank)
    x = part.batch(torch.randn(16, 8), step, rank)
    loss = part.shaped((ddp(x) - x).square().mean(), step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step, loss=loss)
    time.sleep(float(os.environ.get("HOLDFAST_PAUSE", "0.02")))
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
print("weights", digest, flush=True)
del ddp, ckpt
dist.destroy_process_group()
"""

MATHS = """
def batch(x, step, rank):
    return x
def shaped(loss, step):
    return loss
"""
BATCH, SHAPED = "    return x\n", "    return loss\n"  # what cases replace in it

_WORDS = {
    Phase.WAITING: "wait",
    Phase.LAUNCHING: "launch",
    Phase.STOPPING: "stop",
    Phase.PROBING: "probe",
    Phase.PAUSING: "pause",
    Phase.HELD: "hold",
    Phase.ENDING: "end",
}


class Case:
    """A job whose code lies in a folder of its own, so that it can be updated."""

    def __init__(self, start: Start, folder: Path) -> None:
        self._start, self.folder, self.code = start, folder, folder / "code"
        self.code.mkdir()
        (self.code / ".gitignore").write_text("*.out\n")
        git(self.code, "init", "-q", ".")

    def chain(self, *flags: str, script: str = CHAIN, probes: bool = False, **env: str) -> Job:
        self.writes(PART.format(name="one"))
        return self._started(flags, script, probes, env)

    def weights(self, *flags: str, part: str = MATHS, **env: str) -> Job:
        self.writes(part)
        return self._started(flags, WEIGHTS, True, env)

    def writes(self, part: str) -> None:
        (self.code / "part.py").write_text(part)

    def opens(self) -> None:
        """Let the job through its gate."""
        (self.folder / "go").touch()

    def does(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command beside the job."""
        return run_command(*words, "--run", str(self.folder / "run"), folder=self.folder)

    def updates(self, part: str) -> None:
        """Bring newer code, now; it has been taken when this returns, and is checked and staged meanwhile."""
        self.writes(part)
        done = self.does("update", "--now", "--no-wait")
        assert done.returncode == 0, done.stderr

    def _started(self, flags: tuple[str, ...], script: str, probes: bool, env: dict[str, str]) -> Job:
        job = self._start(*flags, script=script, probes=probes, name="code/train", **env)
        job.patience_s = PATIENCE_S
        return job


class Climbed(msgspec.Struct, frozen=True):
    """What became of a job, by its journal."""

    path: str  # what it did and which remedy was chosen, in order; training between these is not written
    launches: tuple[Launch, ...]
    evicted: tuple[str, ...]

    @property
    def restarts(self) -> int:
        return len(self.launches) - 1


def climbed(job: Job) -> Climbed:
    """The exact path; to read it is to replay the journal, so that it is also held against the decider."""
    journal = SqliteJournal(job.run_dir / "journal.db", read_only=True)
    words: list[str] = []
    launches: list[Launch] = []
    decider, before = Decider(), Phase.NEW
    try:
        for entry in rebuild_decider(journal, decider):
            launches += [action for action in entry.decision.actions if isinstance(action, Launch)]
            if decider.view.phase is not before:
                words += _words(entry, decider.view, before)
            before = decider.view.phase
    finally:
        journal.close()
    report = job.report()
    evicted = [*(one.evicted for one in report.incidents), *(one.evicted for one in report.changes)]
    return Climbed(" ".join(words).removeprefix("wait "), tuple(launches), tuple(itertools.chain(*evicted)))


def _words(entry: Entry, view: JobView, before: Phase) -> list[str]:
    words = []
    if before in (Phase.STOPPING, Phase.PROBING) and view.phase is not Phase.PROBING:
        closed = entry.decision.closed
        verdict = closed.verdict if closed else view.verdict
        words = [str(verdict.remedy if verdict else Remedy.GIVE_UP)]
    replays = any(isinstance(action, Replay) for action in entry.decision.actions)
    word = "replay" if replays else _WORDS.get(view.phase, "")
    return [*words, word] if word else words


# --- oracles -------------------------------------------------------------------------------------------------------


def chains(job: Job, ranks: int, steps: int = 60) -> set[tuple[str, ...]]:
    """The names of the code that made steps, in order; the same for all ranks if all is well.

    No step was lost or made twice on any rank, or its chain would be another one. 0 steps: however many there are.
    """
    found = set()
    for rank in range(ranks):
        state: dict[str, Any] = json.loads((job.folder / f"chain-{rank}").read_text())
        assert state["step"] == len(state["made"]) == (steps or state["step"]) > 0
        chain = ""
        for step, name in enumerate(state["made"], start=1):
            chain = hashlib.sha256(f"{chain} {step} {rank} {name}".encode()).hexdigest()
        assert state["chain"] == chain
        found.add(tuple(name for name, _ in itertools.groupby(state["made"])))
    return found


def said(job: Job, word: str) -> list[list[str]]:
    """What ranks printed after a word, in order."""
    lines = [line.split() for line in job.text().splitlines() if f"] {word} " in line]
    return [line[line.index(word) + 1 :] for line in lines]


def weights(job: Job) -> set[str]:
    found = said(job, "weights")
    assert len(found) == 4, job.story()
    return {words[0] for words in found}


# --- looking and acting --------------------------------------------------------------------------------------------


def roles(job: Job) -> dict[str, str]:
    return {view["node"]: view["role"] for view in job.status().get("nodes", ())}


def standbys(job: Job, count: int) -> list[str]:
    """Wait for so many beside a job that trains; before that those that will be seated are ready too."""

    def found() -> list[str]:
        return [node for node, role in roles(job).items() if role == "ready"] if job.phase() == "training" else []

    job.until(lambda: len(found()) >= count, f"{count} standbys")
    return found()


def node_of(job: Job, rank: int) -> str:
    """Where a rank sits, on nodes of one rank each."""

    def found() -> list[str]:
        return [view["node"] for view in job.status().get("nodes", ()) if view["ranks"] == str(rank)]

    return job.until(found, f"a node of rank {rank}")[0]


def reaches(job: Job, step: int, generation: int = 1) -> None:
    """Wait until every rank of a generation has made a step."""

    def there() -> bool:
        status = job.status()
        return bool(status and status["generation"] == generation and status["step"] >= step)

    job.until(there, f"step {step} in generation {generation}")


def lose(job: Job, node: str) -> None:
    """The node is gone, with all that is below its holder."""
    os.kill(job.holder(node), signal.SIGKILL)
