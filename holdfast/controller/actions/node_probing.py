"""Probes nodes while the job is stopped: first each node alone, then pairs of nodes if no node has failed."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from holdfast.controller_interfaces import Notes, Store
from holdfast.core.diagnose import pair_test, probe_assessment, rail_assessment
from holdfast.core.diagnose.fleet_baseline import MeasurementHistory
from holdfast.core.diagnose.pair_test import PairResult, PairTestResult, World
from holdfast.core.diagnose.probe_assessment import Key, ProbeAssessment, ProbeLimits
from holdfast.core.diagnose.rail_assessment import Rails
from holdfast.decoding import from_json
from holdfast.logs import golden_probe_digests
from holdfast.model.action import Probe
from holdfast.model.decider_events import Outcome
from holdfast.model.node_errands import Done, Errand, PairTestHere, ProbeHere
from holdfast.model.probe_findings import Finding, PairMeeting

_SLACK_S = 180.0  # beyond what probes may take: to start, and for one that hangs to be given up on
_RAIL_S = 40.0  # more for each rail: as long as a meeting may take, and the start of its process
_MEETING_IDS = 10**6  # errands of waves are numbered downwards from here, as an action has but one number
_WAVES = 100
_HISTORY = "probed.json"
NO_ANSWER = "did not answer during the probe"

# An errand for each node, its number, and within how many seconds; whoever has not answered is missing.
Ask = Callable[[int, dict[str, Errand], float], Awaitable[dict[str, Done]]]


class NodeProbing:
    def __init__(
        self,
        ask: Ask,
        store: Store,
        hosts: Mapping[str, str],
        limits: ProbeLimits,
        kept: Notes | None,
    ) -> None:
        """`kept` stores each node's measurements for comparison with later probes. If it is None, nothing is stored."""
        self._ask = ask
        self._store = store
        self._hosts = hosts
        self._limits = limits
        self._kept = kept
        self._golden: Mapping[Key, str] = {}

    async def probe_nodes(self, action: Probe) -> Outcome:
        """Probe the nodes of the action. In the outcome, `failed` lists the nodes that are bad or could not be tested.
        `nodes` lists suspects, of which at least one is bad."""
        self._golden = self._golden or golden_probe_digests.load_golden()
        errands: dict[str, Errand] = {n: ProbeHere(id=action.id, level=action.level) for n in action.nodes}
        within_s = self._limits.budget_s + _SLACK_S + (self._limits.command_s if self._limits.command else 0.0)
        answers = await self._ask(action.id, errands, within_s)
        found = {node: done.findings for node, done in answers.items() if done.ok}
        past = self._read_history()
        judged = probe_assessment.assess_probes(found, self._golden, past, action.least)
        untested = {node: _failure_reason(answers.get(node)) for node in action.nodes if node not in found}
        bad = judged.bad | untested
        reason = ProbeAssessment(bad=bad, suspects=judged.suspects, notes=judged.notes).summary_text
        if not bad and len({self._hosts.get(node, node) for node in found}) > 1:
            told = {node: _rails_of(findings) for node, findings in found.items()}
            rails = rail_assessment.shared_rails(told, by_name=not self._limits.rails)
            met = await self._test_pairs(action, "nccl" if _on_gpus(found) else "gloo", rails)
            bad, reason = met.bad, met.reason if met.bad or not judged.suspects else f"{reason}; {met.reason}"
        starved = {node: why for node, why in probe_assessment.starved_nodes(found).items() if node not in bad}
        idle = [f"{node}: {why}" for node, why in starved.items()]
        reason = starved[action.nodes[0]] if len(action.nodes) == len(starved) == 1 else "; ".join((*idle, reason))
        self._write_history(past, {node: told for node, told in found.items() if node not in bad})
        return Outcome(
            action=action.id,
            ok=True,
            failed=bad,
            untested=(*untested, *starved),
            nodes=tuple(judged.suspects),
            detail=reason,
        )

    async def _test_pairs(self, action: Probe, backend: str, rails: Rails) -> PairTestResult:
        """Run the pair test wave by wave; within a wave, each pair tests one rail after another."""
        port = await self._store.open(action.generation)
        done: list[PairResult] = []
        passed: dict[World, Mapping[str, tuple[Finding, ...]]] = {}
        for number in range(_WAVES):
            wave = pair_test.next_wave(action.nodes, done)
            if isinstance(wave, PairTestResult):
                return wave
            id = -(_MEETING_IDS + action.id * _WAVES + number)
            errands: dict[str, Errand] = {
                node: PairTestHere(
                    id=id, meeting=self._make_meeting(world, rank, f"{-id}-{at}", port, backend), rails=rails[node]
                )
                for at, world in enumerate(wave.worlds)
                for rank, node in enumerate(world)
            }
            answers = await self._ask(id, errands, _SLACK_S + _RAIL_S * max(map(len, rails.values())))
            told = {world: {node: answers[node].findings for node in world if node in answers} for world in wave.worlds}
            judged = rail_assessment.assess_rails(told, passed, rails)
            passed |= {one.world: told[one.world] for one in judged if one.ok}
            done += judged
        return PairTestResult(unsure=action.nodes, reason=f"the pair test had no result after {_WAVES} waves")

    def _make_meeting(self, world: World, rank: int, name: str, port: int, backend: str) -> PairMeeting:
        host = self._store.host
        return PairMeeting(rank=rank, world=len(world), host=host, port=port, name=name, backend=backend)

    def _read_history(self) -> dict[str, MeasurementHistory]:
        found = self._kept.get_note(_HISTORY) if self._kept else b""
        try:
            return from_json(found, dict[str, MeasurementHistory]) if found else {}
        except msgspec.DecodeError:  # torn, or a measurement was no number: what is usual is learned anew
            return {}

    def _write_history(self, past: dict[str, MeasurementHistory], sound: Mapping[str, tuple[Finding, ...]]) -> None:
        for node, findings in sound.items():
            past[node] = probe_assessment.add_to_history(past.get(node, MeasurementHistory()), findings)
        if self._kept is not None:
            self._kept.put_note(_HISTORY, msgspec.json.encode(past))


def _rails_of(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return next((f.names for f in findings if f.probe == "rails"), ())


def _failure_reason(done: Done | None) -> str:
    return (done.detail if done else "") or NO_ANSWER


def _on_gpus(found: Mapping[str, tuple[Finding, ...]]) -> bool:
    return any(finding.place.startswith("cuda") for findings in found.values() for finding in findings)
