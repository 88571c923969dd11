"""One node, with one rank, of a job that is replayed again and again: struck, judged, and put back.

Every process steps the same machines with the same news, so nobody has to conduct. Only the struck node knows of its
fault: all others learn it from signatures.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import msgspec
import torch
import torch.distributed as dist

from holdfast.client.training.script_replay import ScriptReplay
from holdfast.core.replay.majority import GroupResult, ReplayMajority
from holdfast.core.replay.node_grid import fit_grid, plan_grid
from holdfast.core.replay.regrouped_replay import DualPhaseReplay, ReplayGroup, ReplayLimits, ReplayRuling
from holdfast.core.replay.twin_ruling import Referee, TwinComparison, TwinLimits, WatchTwins
from holdfast.model.replay_task import ReplayTask
from holdfast.wire.replay_environment import replay_variables

STEPS = 2  # of one replay
WIDTH, BATCH = 16, 4
KINDS = ("mantissa", "exponent", "nan")
_NAN = 1 << 62  # told in the place of a signature


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Trials that are alike. `q` of 0: nobody is struck, and nobody may be named."""

    way: str  # "dual" or "halves"
    stages: int
    q: float
    most: int
    trials: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    named: int = 0  # the struck node, and nobody else
    wrong: int = 0  # somebody else alone
    held: int = 0  # a set with the struck node in it
    nobody: int = 0
    misjudged: int = 0  # groups or steps that were struck and not seen to be, or seen and not struck
    steps: float = 0.0  # done again by the job, on average
    seconds: float = 0.0


class Node:
    """This process: a machine with one rank."""

    def __init__(self, rank: int, world: int, stages: int) -> None:
        self.rank, self.world, self.stages = rank, world, stages
        self.names = [f"n{x}" for x in range(world)]
        m, n = fit_grid(world, stages)
        self.plan = plan_grid(self.names, m, n)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.replay = ScriptReplay()
        self.replay.opted = True
        torch.manual_seed(7)
        first, second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self._layers = [first, second]
        self._kept = [[p.detach().clone() for p in layer.parameters()] for layer in self._layers]
        self.struck: tuple[str, int] | None = None  # kind and bit
        self.bad = False  # the loss was not finite

    def gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [one.tolist() for one in found]

    def among(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A process group of these; all processes ask for all of them, in the same order."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks))
        return self._groups[ranks]

    def put_back(self, stage: int) -> list[torch.nn.Parameter]:
        """The state that every replay begins with; the parameters of this stage."""
        for layer, kept in zip(self._layers, self._kept, strict=True):
            for parameter, value in zip(layer.parameters(), kept, strict=True):
                parameter.grad = None
                parameter.data.copy_(value)
        return [p for layer in self._layers_of(stage) for p in layer.parameters()]

    def _layers_of(self, stage: int) -> list[torch.nn.Linear]:
        return self._layers if self.stages == 1 else [self._layers[stage]]

    def compute(self, place: int, ranks: tuple[int, ...], key: int) -> None:
        """Forward and backward of this place in a pipeline; what leaves it may be struck, and is signed."""
        layers = self._layers_of(place)
        last = place == len(ranks) - 1
        if place == 0:
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(key))
        else:
            x = torch.empty(BATCH, WIDTH)
            dist.recv(x, ranks[place - 1])
            x.requires_grad_()
        out = x
        for layer in layers:
            out = torch.tanh(layer(out))
        if not last:
            sent = self.replay.boundary(self._maybe_struck(out.detach().clone()))
            dist.send(sent, ranks[place + 1])
            grad = torch.empty(BATCH, WIDTH)
            dist.recv(grad, ranks[place + 1])
            out.backward(grad)
            return
        loss = self._maybe_struck(out.detach().clone()).sub_(out.detach()).add(out).square().mean()
        self.bad |= not bool(torch.isfinite(loss))
        loss.backward()
        for parameter in (p for layer in layers for p in layer.parameters()):
            assert parameter.grad is not None
            self.replay.boundary(parameter.grad)
        if place:
            assert x.grad is not None
            dist.send(self.replay.boundary(x.grad), ranks[place - 1])

    def _maybe_struck(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.struck:
            kind, bit = self.struck
            if kind == "nan":
                tensor.view(-1)[bit % tensor.numel()] = float("nan")
            else:
                place = 29 if kind == "exponent" else 12 + bit % 10
                tensor.view(torch.int32).view(-1)[bit % tensor.numel()] ^= 1 << place
        return tensor


def update(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None, size: int) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1 / size)
        parameter.grad = None


class Dual:
    """Trials of the dual-phase replay."""

    def __init__(self, node: Node, case: Case) -> None:
        self.node, self.case = node, case
        self.misjudged = 0
        for wave in (*node.plan.first, *node.plan.second):
            for _, nodes in wave:
                ranks = tuple(int(name[1:]) for name in nodes)
                for stage in range(node.stages):
                    node.among(ranks[stage :: node.stages])

    def trial(self, bad: int, rng: Random) -> tuple[ReplayRuling, int]:
        """The ruling, and how many steps the job has done again."""
        q = self.case.q
        replay = DualPhaseReplay(self.node.plan, ReplayLimits(q=q or None, most=self.case.most))
        alike, steps = ReplayMajority(), 0
        while not isinstance(asked := replay.next_wave(), ReplayRuling):
            strikes = rng.random() < q, rng.randrange(STEPS), (rng.choice(KINDS), rng.randrange(1 << 16))
            mine = next((group for group in asked.groups if self.node.names[self.node.rank] in group.nodes), None)
            struck = (strikes[1], strikes[2]) if strikes[0] and self.node.rank == bad else None
            marks = self._replayed(mine, struck) if mine else [0] * STEPS
            everybody = self.node.gather(marks)
            told = {group.name: _told(group, everybody) for group in asked.groups}
            judged = alike.judge_wave(told)
            for group in asked.groups:
                replay.on_group_result(group, judged[group.name])
                self.misjudged += judged[group.name] != (strikes[0] and self.node.names[bad] in group.nodes)
            steps += STEPS
        return asked, steps

    def _replayed(self, group: ReplayGroup, struck: tuple[int, tuple[str, int]] | None) -> list[int]:
        """What this node signed at each step."""
        node = self.node
        ranks = tuple(int(name[1:]) for name in group.nodes)
        place = ranks.index(node.rank)
        replica, stage = divmod(place, node.stages)
        pipeline = ranks[replica * node.stages : (replica + 1) * node.stages]
        peers = ranks[stage :: node.stages]
        parameters = node.put_back(stage)
        node.replay.read_environment()
        node.bad = False
        marks = []
        for step in range(STEPS):
            node.struck = struck[1] if struck and struck[0] == step else None
            node.compute(stage, pipeline, key=step * 1000 + replica)
            update(parameters, node.among(peers) if len(peers) > 1 else None, len(peers))
            node.replay.done(step, parameters)
            marks.append(_NAN if node.bad else node.replay.marks[step] >> 2)
        return marks


class Twins:
    """Trials of two halves fed the same batches."""

    def __init__(self, node: Node, case: Case) -> None:
        self.node, self.case = node, case
        self.misjudged = 0
        self.replicas = node.world // node.stages
        self.half = self.replicas // 2
        self.nodes = tuple(
            tuple((node.names[r * node.stages + s],) for s in range(node.stages)) for r in range(self.replicas)
        )
        for first in (0, self.half):
            for stage in range(node.stages):
                node.among(self._peers(first, stage))

    def _peers(self, replica: int, stage: int) -> tuple[int, ...]:
        first = 0 if replica < self.half else self.half
        return tuple(r * self.node.stages + stage for r in range(first, first + self.half))

    def trial(self, bad: int, rng: Random) -> tuple[ReplayRuling, int]:
        node = self.node
        q = 1.0 - (1.0 - self.case.q) ** (1.0 / STEPS)  # of a step
        halves = TwinComparison(self.nodes, TwinLimits(steps=2 * STEPS * self.case.most))
        replica, stage = divmod(node.rank, node.stages)
        parameters = node.put_back(stage)
        step = 0
        while not isinstance(asked := halves.next_move(), ReplayRuling):
            strikes, kind = rng.random() < q, (rng.choice(KINDS), rng.randrange(1 << 16))
            node.struck = kind if strikes and node.rank == bad else None
            if isinstance(asked, Referee):
                told = self._signed(asked.replica, step, asked.pair[0] % self.half)
                halves.on_referee_signature(told[asked.replica][asked.stage])
                continue
            assert isinstance(asked, WatchTwins)
            step += 1
            halves.on_signatures(step, self._signed(None, step, replica % self.half))
            self.misjudged += strikes != isinstance(halves.next_move(), Referee)
            if isinstance(halves.next_move(), WatchTwins):
                update(parameters, node.among(self._peers(replica, stage)), self.half)
        return asked, halves.steps

    def _signed(self, only: int | None, step: int, batch: int) -> dict[int, list[int]]:
        """Compute without updating; what every stage of every replica signed."""
        node = self.node
        replica, stage = divmod(node.rank, node.stages)
        node.replay.read_environment()
        for layer in node._layers:
            layer.zero_grad(set_to_none=True)
        node.replay.marks.clear()
        if only is None or only == replica:
            ranks = tuple(range(replica * node.stages, (replica + 1) * node.stages))
            node.compute(stage, ranks, key=step * 1000 + batch)
        node.replay.done(0)
        told = node.gather([node.replay.marks[0] >> 2])
        return {r: [told[r * node.stages + s][0] for s in range(node.stages)] for r in range(self.replicas)}


def _told(group: ReplayGroup, everybody: list[list[int]]) -> GroupResult:
    marks = {}
    bad = -1
    for place, name in enumerate(group.nodes):
        for step, value in enumerate(everybody[int(name[1:])]):
            if value == _NAN:
                bad = step
            marks[step, place] = value
    return GroupResult(bad_step=bad, marks=marks)


def conduct(node: Node, case: Case, seed: int) -> Result:
    way: Dual | Twins = Dual(node, case) if case.way == "dual" else Twins(node, case)
    counts = dict.fromkeys(("named", "wrong", "held", "nobody"), 0)
    done, began = 0, time.monotonic()
    rng = Random(seed)
    for _ in range(case.trials):
        bad = rng.randrange(node.world)
        ruling, steps = way.trial(bad, rng)
        done += steps
        counts[_outcome(ruling, node.names[bad])] += 1
    seconds, misjudged = time.monotonic() - began, way.misjudged
    return Result(case=case, **counts, misjudged=misjudged, steps=done / case.trials, seconds=seconds)


def _outcome(ruling: ReplayRuling, bad: str) -> str:
    if not ruling.nodes:
        return "nobody"
    if ruling.nodes == (bad,):
        return "named"
    return "held" if bad in ruling.nodes else "wrong"


def run(rank: int, world: int, folder: Path, cases: list[Case]) -> None:
    """The life of one process."""
    os.environ |= replay_variables(ReplayTask(name="bench", steps=STEPS), str(folder / "replay"))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    nodes: dict[int, Node] = {}
    results = []
    for number, case in enumerate(cases):
        if case.stages not in nodes:
            nodes[case.stages] = Node(rank, world, case.stages)
        results.append(conduct(nodes[case.stages], case, seed=1000 * world + number))
    if rank == 0:
        (folder / f"results-{world}.json").write_bytes(msgspec.json.encode(results))
    dist.barrier()
    dist.destroy_process_group()
