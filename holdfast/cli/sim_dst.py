"""`holdfast sim dst`: the real controller and the agents' protocol, against all that can fail around them."""

import argparse
import re
import time

from holdfast.cli.flagtable import UsageError
from holdfast.cli.parsing import CommandParser
from holdfast.controller import orders
from holdfast.controller.hands import Hands
from holdfast.controller.loop import Controller
from holdfast.logs import catalog
from holdfast.model.event import Order
from holdfast.model.topology import Job
from holdfast.ports import Socket
from holdfast.sim.dst.brain import Brain, Parts
from holdfast.sim.dst.run import Result, play
from holdfast.sim.dst.setup import setup_of

BROKEN = 1
_SEED = re.compile("[0-9]{1,12}")


class Controlled:
    """A controller as the simulated world sees it."""

    def __init__(self, parts: Parts) -> None:
        self._controller = Controller(
            parts.journal, parts.settings, lambda c: Hands(parts.fleet, parts.store, c.report)
        )
        self._controller.clock_of, self._controller.on_entry = parts.clock, parts.on_entry
        self._controller.clock = parts.clock(0.0)  # by which what the journal tells of launches is watched
        self._controller.hands.say, self._controller.hands.notes = lambda text: None, parts.notes
        self.decider, self.ledger = self._controller.decider, self._controller.ledger

    async def run(self, job: Job) -> int:
        return await self._controller.run(job)

    def order(self, order: Order) -> str:
        refused = orders.refusal(self.decider, order)
        if not refused:
            self._controller.hear(order)
        return refused

    async def attend(self, socket: Socket) -> None:
        await self._controller.ingest.attend(socket)


def build(parts: Parts) -> Brain:
    return Controlled(parts)


def add(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    what = "break the control plane of small jobs in every way that a seed can think of, and see whether it heals"
    dst = commands.add_parser("dst", help="break the control plane, seed by seed", description=what)
    dst.add_argument("--seed", type=int, help="one seed; the same seed is always the same")
    dst.add_argument("--seeds", metavar="A:B", help="all seeds from A up to, not including, B")
    dst.add_argument("--verbose", action="store_true", help="tell everything that happens")


def run(args: argparse.Namespace) -> int:
    began_at, known, broken = time.monotonic(), catalog.load(), 0
    seeds = _seeds(args)
    for seed in seeds:
        result = play(setup_of(seed), build, known, print if args.verbose else None)
        if result.failure:
            broken += 1
            print(f"seed {seed} is broken {result.failure}\nto see it: {command(seed)}", flush=True)
        elif len(seeds) == 1:
            print(text(result))
    took_s = time.monotonic() - began_at
    print(f"{len(seeds)} seeds, {broken} broken, {took_s:.1f} s")
    return BROKEN if broken else 0


def command(seed: int) -> str:
    return f"holdfast sim dst --seed {seed} --verbose"


def text(result: Result) -> str:
    struck = ", ".join(f"{count} {kind}" for kind, count in result.struck.items()) or "none"
    return (
        f"seed {result.seed}: {result.entries} entries, {result.steps} steps, {result.generations} generations, "
        f"{result.lives} lives of the controller in {result.virtual_s:.0f} s; faults: {struck}; "
        f"it ended: {result.ended or 'when told to'}"
    )


def _seeds(args: argparse.Namespace) -> range:
    if (args.seed is None) == (args.seeds is None):
        raise UsageError("give either --seed N or --seeds A:B")
    if args.seed is not None:
        return range(args.seed, args.seed + 1)
    first, _, last = args.seeds.partition(":")
    if not (_SEED.fullmatch(first) and _SEED.fullmatch(last) and int(first) < int(last)):
        raise UsageError(f"--seeds {args.seeds}: write it as A:B, like 0:1000")
    return range(int(first), int(last))
