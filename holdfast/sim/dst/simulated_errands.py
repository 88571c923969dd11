"""Simulated staging, probes, stacks and health readings of a node, on a machine that is never defective."""

import asyncio
from collections.abc import Callable, Iterable

from holdfast.core.agent_state_machine import ErrandDone
from holdfast.model.code_release import Release
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.node_errands import PairTestHere, ProbeHere, ReplayHere, StageHere
from holdfast.model.observation import Strain, StrainKind
from holdfast.model.probe_findings import Finding
from holdfast.model.rank_traces import Frame, Process, Thread, Trace
from holdfast.sim.dst.failpoints import FaultChances
from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_machine import SimMachine
from holdfast.wire.agent_messages import TraceRequest
from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_memory.flight_log_reader import FlightReport

_TRACE_S = 0.2
_LINK = "net.down eth0"
_WAITING = (Thread(main=True, frames=(Frame("all_reduce", "distributed_c10d.py", 7),)),)


class SimStaging:
    def __init__(self, chances: FaultChances) -> None:
        self._chances = chances
        self._rng = chances.scene.rng

    async def stage_all(self, releases: tuple[Release, ...]) -> str:
        await asyncio.sleep(self._rng.uniform(0.01, 0.5))
        return ""

    async def stage_and_check(self, errand: StageHere) -> tuple[str, bool]:
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        refused = errand.check and self._chances.draw_chance(0.1)
        full = not refused and self._chances.draw_chance(0.05)
        return "it does not compile" if refused else "no room" if full else "", refused

    async def begin_launch(self, release: Release, *, first: bool) -> str:
        return ""

    async def gather_outputs(self) -> None:
        pass

    def complete(self, trains: bool) -> None:
        pass


class SimDiagnosis:
    """Passes every probe and pair test; refuses replays."""

    def __init__(self, scene: SeedScene) -> None:
        self._rng = scene.rng
        self._interrupted = asyncio.Event()

    async def run_errand(self, errand: ProbeHere | PairTestHere | ReplayHere) -> ErrandDone:
        await self.stop()
        stopped = self._interrupted = asyncio.Event()
        try:
            async with asyncio.timeout(self._rng.uniform(0.5, 4.0)):
                await stopped.wait()
        except TimeoutError:
            if isinstance(errand, ReplayHere):
                return ErrandDone(errand, False, "no replays here")
            return ErrandDone(errand, True, findings=(Finding(probe="gemm", level=1, place="cpu", ok=True),))
        return ErrandDone(errand, False, "it was given something else to do")

    async def stop(self) -> None:
        self._interrupted.set()


class SimTracer:
    """Reports every rank as waiting in the same collective, stopped, or ended."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine

    def watch_ranks(self, ranks: Iterable[HolderRank]) -> None:
        pass

    async def trace_ranks(self, ranks: tuple[HolderRank, ...], look: TraceRequest, offset_s: float) -> Trace:
        await asyncio.sleep(_TRACE_S)
        node, at = self._machine.name, self._machine.clock.wall() + offset_s
        held = [self._machine.held[one.rank_key] for one in ranks if one.rank_key in self._machine.held]
        found = (
            Process(
                node=node,
                rank=one.rank,
                pid=one.pid,
                state="Z" if one.code is not None else "T" if one.hung else "S",
                threads=_WAITING,
            )
            for one in held
        )
        return Trace(node=node, at=at, processes=tuple(found))

    def read_reports(self, generation: int, offset_s: float) -> dict[int, FlightReport]:
        return {}


class SimHealth:
    """Health readings of the machine's network link only; they never explain why a rank ended."""

    peak_flops = 0.0
    tensor_share: float | None = None
    links_read = True

    def __init__(self, machine: SimMachine, on_alarm: Callable[[Alarm], None], now: Callable[[], float]) -> None:
        self._machine, self._on_alarm, self._now = machine, on_alarm, now
        self._since = 0.0  # 0: the link is up

    @property
    def strains(self) -> tuple[Strain, ...]:
        self._since = (self._since or self._now()) if self._machine.link_is_down else 0.0
        nodes = (self._machine.name,)
        strain = Strain(kind=StrainKind.CUT, sign=_LINK, nodes=nodes, since=self._since, text="has no link at eth0")
        return (strain,) if self._since else ()

    def read_again(self) -> None:
        """Raise an alarm if a second reading still finds the link down; at most one alarm an hour."""
        for strain in self.strains:
            if self._machine.link_alarms.is_repeat(self._machine.scene.now(), strain.sign):
                continue
            found = Alarm(
                kind=Kind.HEALTH,
                at=self._now(),
                suspects=strain.nodes,
                reason=strain.text,
                klass="ib_rdma_error",
                group="infrastructure",
                signature=strain.sign,
                hard=True,
            )
            self._on_alarm(found)

    def on_rank_exit(self, at: float) -> None:
        pass

    def has_oom_kill(self) -> bool:
        return False

    def scarcely(self) -> str:
        return ""
