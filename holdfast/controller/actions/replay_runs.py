"""Replays the job's own work on nodes, in two halves or in groups wave by wave, to find a faulty node."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count

import msgspec

from holdfast.controller.actions.node_probing import Ask
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller_interfaces import Store
from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.ladder import NO_REPLAY
from holdfast.core.replay.majority import GroupResult
from holdfast.core.replay.node_grid import UnfitError
from holdfast.core.replay.regrouped_replay import ReplayLimits, ReplayRuling, RulingKind
from holdfast.core.replay.regrouped_session import GroupLaunch, GroupSession, ReplayRequest
from holdfast.core.replay.twin_replay_session import TwinSession
from holdfast.model.action import Replay
from holdfast.model.decider_events import Outcome
from holdfast.model.node_errands import Done, Errand, LaunchHere, ReplayHere
from holdfast.model.replay_task import ReplayResult

_IDS, _GROUPS = 10**14, 10**4  # errands of groups are numbered downwards from the one, at most so many of an action
_SLACK_S = 60.0
NOT_ALLOWED = f"{NO_REPLAY}the script does not call holdfast.replayable"
_BEATS, _BEAT_S = 10, 0.5


class _GoneError(Exception):
    """Nodes stopped answering during a replay. They count as lost, and the replay ends without a ruling."""

    def __init__(self, nodes: list[str]) -> None:
        super().__init__()
        self.nodes = nodes


class ReplayRuns:
    def __init__(
        self,
        ask: Ask,
        store: Store,
        limits: ReplayLimits,
        *,
        view: JobView,
        registry: NodeRegistry,
        say: Callable[[str], None],
    ) -> None:
        self._ask = ask
        self._store = store
        self._limits = limits
        self._view = view
        self._registry = registry
        self._say = say

    async def replay_nodes(self, action: Replay) -> Outcome:
        """Run a replay. The outcome's `failed` has a node that is proved bad, or `nodes` has suspects: one is bad."""
        for _ in range(_BEATS):
            if self._registry.replayable is None:  # this controller has just come back
                await asyncio.sleep(_BEAT_S)
        if not self._registry.replayable:
            return Outcome(action=action.id, ok=True, detail=NOT_ALLOWED)
        self._say("same failure again, and probes found nothing: replaying the work on groups of nodes")
        asked = ReplayRequest(
            seats=action.seats,
            mesh=self._view.mesh,
            steps=self._limits.steps,
            not_after=action.not_after,
            seeded=self._registry.replayable == "seeded",
        )
        try:
            ruling = await self._find_ruling(action, asked)
        except UnfitError as e:
            return Outcome(action=action.id, ok=True, detail=f"{NO_REPLAY}{e}")
        except _GoneError as e:
            failed = dict.fromkeys(e.nodes, "did not answer during the replay")
            return Outcome(action=action.id, ok=True, failed=failed, untested=tuple(failed))
        named = dict.fromkeys(ruling.nodes, ruling.reason) if ruling.how is RulingKind.ONE else {}
        some = ruling.nodes if ruling.how is RulingKind.SOME else ()
        return Outcome(action=action.id, ok=True, failed=named, nodes=some, detail=ruling.reason)

    async def _find_ruling(self, action: Replay, asked: ReplayRequest) -> ReplayRuling:
        """Return what replays show: of two halves if the script is seeded; without a clear result, of groups."""
        numbers, found = count(1), None
        if asked.seeded and self._limits.halves:
            with contextlib.suppress(UnfitError):
                found = await self._run_session(action, TwinSession(asked, self._limits), numbers)
        if found is None or found.how in (RulingKind.ONE, RulingKind.NOBODY):
            return found or await self._run_session(action, GroupSession(asked, self._limits), numbers)
        asked = msgspec.structs.replace(asked, suspects=found.nodes)
        ruling = await self._run_session(action, GroupSession(asked, self._limits), numbers)
        return msgspec.structs.replace(ruling, reason=f"two halves: {found.reason}; groups: {ruling.reason}")

    async def _run_session(
        self, action: Replay, session: GroupSession | TwinSession, numbers: Iterator[int]
    ) -> ReplayRuling:
        while not isinstance(wave := session.next_launches(), ReplayRuling):
            asked = []
            for launch in wave:
                id = -(_IDS + action.id * _GROUPS + next(numbers))
                port = await self._store.open(id)  # one of its own, as keys would be mixed up
                errands = dict(self._make_errands(id, action, launch, port))
                asked.append(self._ask(id, errands, self._within_s(launch) + _SLACK_S))
            for launch, answers in zip(wave, await asyncio.gather(*asked), strict=True):
                if gone := [seat.node for seat in launch.seats if seat.node not in answers]:
                    raise _GoneError(gone)
                session.on_group_result(launch.replay.name, _group_result(launch, answers))
        return wave

    def _within_s(self, launch: GroupLaunch) -> float:
        """Return the time limit of a launch: that of the settings, or more if the replay has more steps than usual."""
        return self._limits.within_s * max(1.0, launch.replay.steps / self._limits.steps)

    def _make_errands(self, id: int, action: Replay, launch: GroupLaunch, port: int) -> Iterable[tuple[str, Errand]]:
        for seat in launch.seats:
            here = LaunchHere(
                id=id,
                generation=action.generation,
                seat=seat,
                world_size=launch.world_size,
                group_world_size=len(launch.seats),
                store_host=self._store.host,
                store_port=port,
                run_id=launch.replay.name,
                max_restarts=0,
                release=self._view.running_release,
            )
            # In a folder that no earlier replay has written to.
            replay = msgspec.structs.replace(launch.replay, name=f"{action.id}-{launch.replay.name}")
            yield seat.node, ReplayHere(id=id, launch=here, replay=replay, within_s=self._within_s(launch))


def _group_result(launch: GroupLaunch, answers: dict[str, Done]) -> GroupResult | None:
    """Return what a group's replay showed, or None if a rank's result is missing."""
    done = [answers.get(seat.node) for seat in launch.seats]
    played: list[ReplayResult] = [one for answer in done if answer and answer.ok for one in answer.played]
    if len(played) < launch.world_size:
        return None
    bad = [one.bad_step for one in played if one.bad_step >= 0]
    return GroupResult(
        failed=any(one.failed for one in played),
        bad_step=min(bad, default=-1),
        ended=all(one.ended for one in played),
        marks={(step, one.rank): value for one in played for step, value in one.marks.items()},
        signed={(step, one.rank): value for one in played for step, value in one.signed.items()},
    )
