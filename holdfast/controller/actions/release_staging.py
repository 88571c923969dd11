"""Stages a release on nodes: one node checks it first, and only then the others get it."""

from holdfast.controller.actions.node_probing import Ask
from holdfast.model.action import Stage
from holdfast.model.decider_events import Outcome
from holdfast.model.node_errands import StageHere

NO_ANSWER = "it did not answer"
_STAGE_S = 600.0  # for the slowest node


class ReleaseStaging:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def stage_release(self, action: Stage) -> Outcome:
        """Check a release on the first node that can do so, then stage it on the other nodes. If the check refuses the
        release, the outcome's `detail` says why. The outcome's `failed` has the nodes without the release, with
        reasons."""
        failed: dict[str, str] = {}
        rest = [*action.nodes]
        while rest:
            first = rest.pop(0)
            done = (await self._ask(action.id, {first: self._make_errand(action, check=True)}, _STAGE_S)).get(first)
            if done and done.refused:
                return Outcome(action=action.id, ok=False, detail=done.detail)
            if done and done.ok:
                break
            failed[first] = done.detail if done else NO_ANSWER
        else:
            why = "" if failed else "the job has no node to check the release on"
            return Outcome(action=action.id, ok=False, detail=why, failed=failed)
        answers = await self._ask(action.id, dict.fromkeys(rest, self._make_errand(action, check=False)), _STAGE_S)
        for node in rest:
            done = answers.get(node)
            if not done or not done.ok:
                failed[node] = done.detail if done else NO_ANSWER
        return Outcome(action=action.id, ok=not failed, failed=failed)

    def _make_errand(self, action: Stage, *, check: bool) -> StageHere:
        return StageHere(id=action.id, release=action.release, check=check)
