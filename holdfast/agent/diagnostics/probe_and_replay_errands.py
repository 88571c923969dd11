"""Runs diagnostic errands: probes on this node alone, pair tests and replays together with other nodes."""

import asyncio
import ipaddress
import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from holdfast.agent.diagnostics.node_rails import rail_environment, rails_finding
from holdfast.agent.diagnostics.probe_runner import ProbeTerms, run_link, run_probes
from holdfast.agent.diagnostics.replay_runner import run_replay
from holdfast.agent.diagnostics.site_test import SITE_LEVEL, run_site_test
from holdfast.core.agent_state_machine import ErrandDone
from holdfast.model.code_release import Release
from holdfast.model.node_errands import LaunchHere, PairTestHere, ProbeHere, ReplayHere
from holdfast.model.probe_findings import Finding
from holdfast.model.replay_task import ReplayResult
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec

_NAME = re.compile(r"[A-Za-z0-9-]+")  # it becomes a folder

Findings = tuple[Finding, ...]
Environment = Callable[[LaunchHere, int], dict[str, str]]  # of a rank, by its number on this node


class DiagnosisResult(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of probes, and results of replayed ranks."""

    findings: Findings = ()
    played: tuple[ReplayResult, ...] = ()


class NodeDiagnosis:
    """Runs one diagnosis at a time. Any later errand cancels the diagnosis, unless it only stages a release."""

    def __init__(
        self,
        node: NodeSpec,
        node_dir: Path,
        environment: Environment,
        entry: Callable[[Release], EntryPoint],
        distrust: Callable[[Release], Awaitable[str]],
    ) -> None:
        """`distrust` returns why this node must not run a release; "" if it may."""
        self._node = node
        self._node_dir = node_dir
        self._environment = environment
        self._entry = entry  # what ranks of a release run
        self._distrust = distrust
        self._task: asyncio.Task[DiagnosisResult] | None = None

    async def run_errand(self, errand: ProbeHere | PairTestHere | ReplayHere) -> ErrandDone:
        """Run the diagnosis and return its findings, or the reason why there are none."""
        await self.stop()
        task = self._task = asyncio.create_task(self._run_diagnosis(errand))
        await asyncio.wait([task])
        if task.cancelled():
            return ErrandDone(errand, False, "the next errand interrupted the diagnosis")
        try:
            found = task.result()
        except OSError as e:
            return ErrandDone(errand, False, f"the diagnosis cannot run: {e}")
        return ErrandDone(errand, True, findings=found.findings, played=found.played)

    async def stop(self) -> None:
        """Cancel the running diagnosis; return when all of it has ended."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])

    async def _run_diagnosis(self, errand: ProbeHere | PairTestHere | ReplayHere) -> DiagnosisResult:
        match errand:
            case ProbeHere(level=level):
                return DiagnosisResult(findings=await self._run_alone(level))
            case PairTestHere():
                return DiagnosisResult(findings=await self._run_pair_test(errand))
            case ReplayHere(launch=launch, replay=replay):
                if not _NAME.fullmatch(replay.name):
                    raise OSError(f"{replay.name!r} is not a valid name of a replay")
                if why := await self._distrust(launch.release):
                    raise OSError(why)
                folder = self._node_dir / "replay" / replay.name
                entry = self._entry(launch.release)
                return DiagnosisResult(
                    played=await run_replay(errand, entry, folder, partial(self._environment, launch))
                )

    async def _run_alone(self, level: int) -> Findings:
        limits = self._node.settings.probe
        budget_s = limits.local_budget_s if self._is_shared() else limits.budget_s
        probes = run_probes(level, budget_s, self._python, self._node_dir, terms=ProbeTerms(nice=limits.nice))
        found = [rails_finding(limits.rails), *[finding async for finding in probes]]
        if limits.command and level >= SITE_LEVEL:
            found.append(await run_site_test(limits.command, limits.command_s, level=level, nice=limits.nice))
        return tuple(found)

    async def _run_pair_test(self, errand: PairTestHere) -> Findings:
        """Run the pair test over each rail in turn, in new processes, because a process's NCCL settings are fixed."""
        found: list[Finding] = []
        for number, rail in enumerate(errand.rails or ("",)):
            name = f"{errand.meeting.name}-{number}" if rail else errand.meeting.name
            meeting = msgspec.structs.replace(errand.meeting, name=name, rail=rail)
            terms = ProbeTerms(nice=self._node.settings.probe.nice, env=rail_environment(rail))
            told = await run_link(meeting, self._python, terms=terms)
            found += [msgspec.structs.replace(finding, place=rail) for finding in told]
        return tuple(found)

    @property
    def _python(self) -> str:
        return self._node.entry.python or sys.executable  # of the script: it has torch

    def _is_shared(self) -> bool:
        """Return whether nodes share this machine: the controller's address is loopback, as on a local fleet."""
        host = urlsplit(self._node.url).hostname or "localhost"
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"
