"""One rank of a job in which bits are flipped: warm-up, clean steps, then one trial after the other from one state.

After every trial the state is put back, so that a trial costs its steps and nothing else. All rules see every step.
"""

import argparse
import contextlib
import copy
import json
import os
import statistics
import time
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._sdc_faults import Fault, faults, flip, pick
from examples.gpt import GPT, SIZES, make_text
from holdfast.client.training.fixed_ddp_buckets import fix_buckets
from holdfast.client.training.parameter_hash import ParameterHash
from holdfast.client.training.update_norm import UpdateWatch
from holdfast.core.detect.loss_spikes import LossLimits, SpikeDetector
from holdfast.core.detect.replica import ReplicaDetector, ReplicaLimits
from holdfast.model.observation import Mark, StepValues

EVERY = ReplicaLimits().every
BATCH, CLIP = 8, 1.0
STREAMS = 4  # of batches
TRIAL = 2 * EVERY  # steps
PIECE = 500  # steps without a fault that are counted at once
WARM_SEED, TRIAL_SEED, CLEAN_SEED, EVAL_SEED = 1, 2, 100, 9999
RULES = ("loss times", "loss score", "norm times", "norm score", "own times", "update")


class Trainer:
    """A training job that can be struck and put back."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        words = make_text()
        letters = sorted(set(words))
        self.text = torch.tensor([letters.index(letter) for letter in words])
        torch.manual_seed(0)
        self.model = GPT(len(letters), SIZES["small"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.ddp = DistributedDataParallel(self.model)
        fix_buckets(self.ddp)
        self.ddp.register_comm_hook(dist.group.WORLD, self._reduce)
        self.watching = UpdateWatch(self.optimizer)
        self.spikes = SpikeDetector(LossLimits())
        self.optimizer._optimizer_step_post_hooks.clear()  # what it does is called, and timed, by hand
        self.spent = dict.fromkeys(("train", "update", "watch", "rules", "parameters", "optimizer"), 0.0)
        self._fault: Fault | None = None
        self.fired: dict[str, int] = {}  # rule -> first step at which it fired
        self.marks: list[tuple[int, int, int]] = []  # step, hash of parameters, hash of optimizer state

    def _reduce(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._fault and self._fault.place == "gradient before":
            flip(bucket.buffer(), self._fault.flips)
        return self.watching._reduce_bucket(group, bucket)

    def moments(self) -> list[torch.Tensor]:
        kept = self.optimizer.state.values()
        return [state[name] for state in kept for name in ("exp_avg", "exp_avg_sq")]

    def tensors(self) -> list[torch.Tensor]:
        steps = [state["step"] for state in self.optimizer.state.values()]
        return [*self.model.parameters(), *self.moments(), *steps]

    def step(self, number: int, seed: int, fault: Fault | None = None) -> None:
        """One step, struck by this fault if it is of this rank."""
        began = time.thread_time()
        self._fault = fault if fault and fault.rank == self.rank else None
        loss = self.ddp(self._window((seed, number, self.rank)))
        self.optimizer.zero_grad()
        loss.backward()
        self._strike("gradient after", [p.grad for p in self.model.parameters() if p.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        before = time.thread_time()
        self.optimizer.step()
        self._spend("update", before)
        self._strike("parameters", self.model.parameters())
        self._strike("optimizer", self.moments())
        self._spend("train", began)
        self._judge(number, float(loss.detach()), float(norm))

    def _window(self, key: tuple[int, int, int]) -> torch.Tensor:
        seed, number, rank = key
        torch.manual_seed((seed * 1_000_003 + number) * 100_003 + rank)
        starts = torch.randint(len(self.text) - SIZES["small"].span, (BATCH, 1))
        return self.text[starts + torch.arange(SIZES["small"].span + 1)]

    def _strike(self, place: str, tensors: Iterable[torch.Tensor]) -> None:
        if self._fault and self._fault.place == place:
            flip(pick(list(tensors), self._fault.tensor), self._fault.flips)

    def _judge(self, number: int, loss: float, norm: float) -> None:
        began = time.thread_time()
        self.watching._measure_update(self.optimizer)
        own, update = self.watching.own_norm, self.watching.update
        assert own is not None and update is not None
        self._spend("watch", began)
        began = time.thread_time()
        told = StepValues(
            generation=1, rank=self.rank, step=number, at=0.0,
            loss=loss, grad_norm=norm, own_norm=float(own), update=float(update),
        )  # fmt: skip
        fired = [str(rule) for rule, _ in self.spikes.on_values(told)]
        self._spend("rules", began)
        if not torch.isfinite(torch.tensor(loss)):
            fired.append("not finite")
        for rule in fired:
            self.fired.setdefault(rule, number)
        if number % EVERY == 0:
            self.mark(number)

    def mark(self, number: int) -> None:
        self.marks.append((number, self._hash("parameters"), self._hash("optimizer")))

    def _hash(self, part: str) -> int:
        began = time.thread_time()
        tensors = list(self.model.parameters()) if part == "parameters" else self.moments()
        value = int(ParameterHash(tensors, None, EVERY).compute_hash()) & (2**64 - 1)
        self._spend(part, began)
        return value

    def _spend(self, what: str, began: float) -> None:
        self.spent[what] += time.thread_time() - began

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        losses = [float(self.model(self._window((EVAL_SEED, one, 0)))) for one in range(4)]
        self.model.train()
        return statistics.fmean(losses)


class State:
    """Everything that a trial changes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept = [tensor.detach().clone() for tensor in trainer.tensors()]
        self._spikes = copy.deepcopy(trainer.spikes)

    def put_back(self) -> None:
        trainer = self._trainer
        with torch.no_grad():
            for tensor, kept in zip(trainer.tensors(), self._kept, strict=True):
                tensor.copy_(kept)
        trainer.spikes = copy.deepcopy(self._spikes)
        trainer.fired, trainer.marks = {}, []
        trainer.watching._own.clear()


def gathered(thing: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def told(trainer: Trainer) -> dict[str, Any]:
    values = (
        int(ParameterHash(tensors, None, 1).compute_hash())
        for tensors in (trainer.model.parameters(), trainer.moments())
    )
    return {"fired": trainer.fired, "marks": trainer.marks, "end": list(values), "loss": trainer.evaluate()}


def named(all_marks: list[list[tuple[int, int, int]]], column: int) -> tuple[int, list[int]] | None:
    """At which step replicas were found to differ, and which ranks were named; none without a majority."""
    replicas = ReplicaDetector(ReplicaLimits())
    replicas.on_launch(1)
    count = len(all_marks)
    for row in zip(*all_marks, strict=True):
        marks = tuple(Mark(rank, one[0], "all", count, "state", one[column]) for rank, one in enumerate(row))
        for alarm in replicas.on_marks(0.0, "node", 1, marks):
            return row[0][0], list(alarm.ranks) if alarm.hard else []
    return None


def trial(trainer: Trainer, state: State, fault: Fault | None, seed: int, start: int) -> list[dict[str, Any]]:
    """What every rank has to say of it."""
    state.put_back()
    trainer.mark(start)
    for number in range(start + 1, start + TRIAL + 1):
        trainer.step(number, seed, fault if fault and number == start + fault.offset else None)
    return gathered(told(trainer))


def seen(found: list[dict[str, Any]], fault: Fault, start: int, clean: list[dict[str, Any]]) -> dict[str, Any]:
    """A trial beside the same steps without the fault."""
    struck = start + fault.offset
    methods: dict[str, list[Any]] = {}
    for rule in (*RULES, "not finite"):
        fired = {rank: one["fired"][rule] for rank, one in enumerate(found) if one["fired"].get(rule, -1) >= struck}
        fired = {rank: at for rank, at in fired.items() if clean[rank]["fired"].get(rule) != at}
        if fired:
            methods[rule] = [min(fired.values()) - struck, sorted(fired)]
    for column, part in ((1, "hash parameters"), (2, "hash optimizer")):
        if there := named([one["marks"] for one in found], column):
            methods[part] = [there[0] - struck, there[1]]
    worst = max(abs(one["loss"] - clean[rank]["loss"]) for rank, one in enumerate(found))
    return {
        "fault": msgspec.to_builtins(fault),
        "visible": any(one["end"] != clean[rank]["end"] for rank, one in enumerate(found)),
        "apart": len({tuple(one["end"]) for one in found}) > 1,
        "deviation": worst if isfinite(worst) else None,  # JSON has no word for it
        "methods": methods,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--clean", type=int, required=True, help="pieces of steps without a fault")
    parser.add_argument("--trials", type=int, required=True)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(args.folder / "store"), world), rank=rank, world_size=world
    )
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run(Trainer(rank), args)
    dist.destroy_process_group()


def run(trainer: Trainer, args: argparse.Namespace) -> None:
    notes = args.folder / "trials.jsonl"
    before = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    dist.barrier()  # or a fast rank 0 would write while others read
    pieces = {one["piece"] for one in before if "piece" in one}
    done = {one["fault"]["number"] for one in before if "fault" in one}
    with notes.open("a", buffering=1) if trainer.rank == 0 else contextlib.nullcontext() as out:

        def keep(found: dict[str, Any]) -> None:
            if out:
                out.write(json.dumps(found) + "\n")

        warm = args.warmup // EVERY * EVERY
        for number in range(1, warm + 1):
            trainer.step(number, WARM_SEED)
        state = State(trainer)
        for piece in set(range(args.clean)) - pieces:
            state.put_back()
            keep({"piece": piece} | clean_steps(trainer, warm, CLEAN_SEED + piece))
        references = [trial(trainer, state, None, TRIAL_SEED + stream, warm) for stream in range(STREAMS)]
        keep({"noise": statistics.stdev(one[0]["loss"] for one in references)})
        for fault in faults(args.trials, dist.get_world_size(), EVERY, STREAMS):
            if fault.number not in done:
                found = trial(trainer, state, fault, TRIAL_SEED + fault.stream, warm)
                keep(seen(found, fault, warm, references[fault.stream]))


def clean_steps(trainer: Trainer, start: int, seed: int) -> dict[str, Any]:
    """False alarms of every rule and what each of them costs, over some steps without a fault."""
    trainer.spent = dict.fromkeys(trainer.spent, 0.0)
    alarms = dict.fromkeys((*RULES, "not finite"), 0)
    for number in range(start + 1, start + PIECE + 1):
        trainer.fired = {}
        trainer.step(number, seed)
        for rule in trainer.fired:
            alarms[rule] += 1
    everybody = gathered((alarms, trainer.marks, trainer.spent))
    differed = sum(named([marks for _, marks, _ in everybody], column) is not None for column in (1, 2))
    return {
        "steps": PIECE,
        "alarms": {rule: sum(one[rule] for one, *_ in everybody) for rule in alarms} | {"hash": differed},
        "spent": {what: sum(one[what] for *_, one in everybody) for what in trainer.spent},
    }


if __name__ == "__main__":
    main()
