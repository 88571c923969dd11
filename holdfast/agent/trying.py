"""Tries this node when it is told to: alone, or together with others."""

import asyncio
import ipaddress
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from holdfast.agent.playing import play
from holdfast.agent.probing import Terms, run_link, run_probes
from holdfast.model.errand import LaunchHere, MeetHere, PlayHere, ProbeHere
from holdfast.model.probe import Finding
from holdfast.model.release import Release
from holdfast.model.replay import Played
from holdfast.wire.spec import Entry, NodeSpec

_NAME = re.compile(r"[A-Za-z0-9-]+")  # it becomes a folder

Findings = tuple[Finding, ...]
Environment = Callable[[LaunchHere, int], dict[str, str]]  # of a rank, by its number on this node


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    findings: Findings = ()
    played: tuple[Played, ...] = ()


class Trying:
    """One try at a time; whatever else the node is told to do ends it."""

    def __init__(self, node: NodeSpec, node_dir: Path, environment: Environment) -> None:
        self._node = node
        self._node_dir = node_dir
        self._environment = environment
        self.entry: Callable[[Release], Entry] = lambda release: node.entry  # what ranks of a release run
        self._task: asyncio.Task[Tried] | None = None

    async def carry(self, errand: ProbeHere | MeetHere | PlayHere) -> tuple[str, Tried]:
        """What went wrong, if anything did, and what was found."""
        await self.stop()
        task = self._task = asyncio.create_task(self._tried(errand))
        await asyncio.wait([task])
        if task.cancelled():
            return "it was given something else to do", Tried()
        try:
            return "", task.result()
        except OSError as e:
            return f"it cannot be tried: {e}", Tried()

    async def stop(self) -> None:
        """When this returns, nothing of it runs any more."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])

    async def _tried(self, errand: ProbeHere | MeetHere | PlayHere) -> Tried:
        match errand:
            case ProbeHere(level=level):
                return Tried(findings=await self._alone(level))
            case MeetHere():
                return Tried(findings=await self._together(errand))
            case PlayHere(launch=launch, replay=replay):
                if not _NAME.fullmatch(replay.name):
                    raise OSError(f"{replay.name!r} is no name of a replay")
                folder = self._node_dir / "replay" / replay.name
                entry = self.entry(launch.release)
                return Tried(played=await play(errand, entry, folder, partial(self._environment, launch)))

    async def _alone(self, level: int) -> Findings:
        limits = self._node.settings.probe
        budget_s = limits.local_budget_s if self._is_shared() else limits.budget_s
        probes = run_probes(level, budget_s, self._python, self._node_dir, terms=Terms(nice=limits.nice))
        return tuple([finding async for finding in probes])

    async def _together(self, errand: MeetHere) -> Findings:
        return await run_link(errand.meeting, self._python, terms=Terms(nice=self._node.settings.probe.nice))

    @property
    def _python(self) -> str:
        return self._node.entry.python or sys.executable  # of the script: it has torch

    def _is_shared(self) -> bool:
        """Whether the machine is not the node's alone: the fleet is a local one, or its hosts are all this one."""
        host = urlsplit(self._node.url).hostname or "localhost"
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"
