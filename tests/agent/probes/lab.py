"""Nodes as network namespaces behind a switch of ours, and the whole pair test among them."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from holdfast.agent.diagnostics.probe_runner import ProbeTerms, run_link
from holdfast.core.diagnose.pair_assessment import assess_pairs
from holdfast.core.diagnose.pair_test import PairResult, PairTestResult, PairWave, World, next_wave
from holdfast.model.probe_findings import Finding, PairMeeting

PORT = 29500  # every namespace has all ports to itself
SLOW, LOSSY, CORRUPTING = "slow", "lossy", "corrupting"


def missing() -> str:
    """What keeps this machine from having such a lab; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    tools = [tool for tool in ("ip", "tc", "nsenter") if not shutil.which(tool)]
    return f"needs {', '.join(tools)}" if tools else ""


class Lab:
    def __init__(self, switch: subprocess.Popen[str], nodes: int) -> None:
        assert switch.stdout
        self._switch = switch
        spaces = json.loads(switch.stdout.readline())
        self.nodes = [f"n{i}" for i in range(nodes)]
        self._enter = {
            node: ["nsenter", f"--net=/proc/{switch.pid}/fd/{fd}"] for node, fd in zip(self.nodes, spaces, strict=True)
        }

    def spoil(self, node: str, fault: str) -> None:
        """The link of a node, both ways but for slowness, which is of what it sends."""
        match fault:
            case "slow":
                limit = "tc qdisc add dev eth0 root tbf rate 16mbit burst 64kb latency 800ms"
                subprocess.run([*self._enter[node], *limit.split()], check=True)
            case "lossy":
                self._tell(node, "0.05 0")
            case "corrupting":
                self._tell(node, "0 0.02")

    def _tell(self, node: str, words: str) -> None:
        assert self._switch.stdin
        print(self.nodes.index(node), words, file=self._switch.stdin, flush=True)

    async def pair_test(self) -> tuple[PairTestResult, int]:
        """The answer, and how many waves it took."""
        met: list[PairResult] = []
        sound: dict[World, dict[str, tuple[Finding, ...]]] = {}
        waves = 0
        while isinstance(step := next_wave(self.nodes, met), PairWave):
            waves += 1
            ends = [(world, node) for world in step.worlds for node in world]
            told = await asyncio.gather(*(self._end(world, node) for world, node in ends))
            now: dict[World, dict[str, tuple[Finding, ...]]] = {world: {} for world in step.worlds}
            for (world, node), found in zip(ends, told, strict=True):
                now[world][node] = found
            became = assess_pairs(now, sound)
            sound |= {one.world: now[one.world] for one in became if one.ok}
            met += became
        return step, waves

    async def _end(self, world: World, node: str) -> tuple[Finding, ...]:
        meeting = PairMeeting(
            rank=world.index(node),
            world=len(world),
            host=f"10.79.0.{self.nodes.index(world[0]) + 1}",
            port=PORT,
            name="|".join(world),
            serve=True,
            seconds=1.0,
            deadline_s=90.0,
        )
        terms = ProbeTerms(nice=0, env={"GLOO_SOCKET_IFNAME": "eth0"})
        return await run_link(meeting, sys.executable, terms=terms, argv=self._enter[node])


@contextlib.contextmanager
def lab(nodes: int) -> Iterator[Lab]:
    switch = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.probes.switch", str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Lab(switch, nodes)
    finally:
        switch.communicate(timeout=10)
