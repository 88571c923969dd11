"""Carries out actions: sends them to nodes as errands and gathers the answers into one outcome per action."""

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.controller.actions.node_probing import NodeProbing
from holdfast.controller.actions.release_staging import ReleaseStaging
from holdfast.controller.actions.replay_runs import ReplayRuns
from holdfast.core.decoding import make_decoder
from holdfast.core.diagnose.probe_assessment import ProbeLimits
from holdfast.core.replay.dual_phase import ReplayLimits
from holdfast.core.snapshots import final_checkpoint
from holdfast.core.snapshots.restore_choice import choose_restore
from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.errand import Done, Errand, FinalState, LaunchHere, Leave, StopHere
from holdfast.model.event import Limits, Outcome
from holdfast.model.job_seats import Job, Seat, world_size
from holdfast.model.state_copy import Address, Aim, Copy, Restore
from holdfast.ports import Fleet, Notes, Store

_AT_ONCE = 64
_TRIES = 2
_LAST_IDS = 10**15  # the stop that an end begins with is numbered downwards from here: no other errand gets there
EVICTED = 1  # exit code of a node that the job no longer wants


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a launch restores, and the nodes, generation and release that it is for."""

    id: int
    restore: Restore
    generation: int = 0
    nodes: tuple[str, ...] = ()  # that are told
    release: int = 0


_PLANNED = make_decoder(msgspec.json.Decoder(LaunchPlan))


class MemoryNotes:
    """Notes kept in memory only; they are lost with this process."""

    def __init__(self) -> None:
        self._all: dict[str, bytes] = {}

    def put_note(self, name: str, content: bytes) -> None:
        self._all[name] = content

    def get_note(self, name: str) -> bytes:
        return self._all.get(name, b"")


class PendingAction(msgspec.Struct):
    """An action that some nodes have not answered yet."""

    errands: dict[str, Errand]
    left: set[str]
    failed: dict[str, str]
    answered: asyncio.Event
    answers: dict[str, Done] = {}


class ActionExecutor:
    def __init__(self, fleet: Fleet, store: Store, report: Callable[[Outcome], None]) -> None:
        self.fleet = fleet
        self.store = store
        self.hosts: dict[str, str] = {}  # of nodes
        self.probing = NodeProbing(self._ask_nodes, store, self.hosts)
        self.replaying = ReplayRuns(self._ask_nodes, store)
        self.staging = ReleaseStaging(self._ask_nodes)
        self.job = Job(run_id="", min_nodes=1, max_nodes=1)
        self.limits = Limits()
        self.began_at = 0.0  # the job
        self.say: Callable[[str], None] = print
        self.tell: Callable[[str, Errand], bool] = lambda node, errand: False
        self.present: Callable[[], tuple[str, ...]] = tuple
        self.forget: Callable[[str], None] = lambda node: None
        self.known: Callable[[], set[str]] = set
        self.aim: Callable[[str], Aim] = lambda node: Aim(generation=0)
        self.copies: dict[str, tuple[Copy, ...]] = {}  # snapshots that nodes said they hold
        self.keepers: dict[str, Address] = {}  # where nodes are asked for them
        self.stored = -1  # newest checkpoint of the line that the job is on
        self.notes: Notes = MemoryNotes()
        self._report = report
        self._waiting: dict[int, PendingAction] = {}
        self._silent: set[str] = set()
        self._hurried = False
        self._stopping = 0  # generations up to this one are not to be launched any more
        self._stepping = asyncio.Event()
        self._launched: frozenset[str] = frozenset()  # nodes of the newest generation
        self._tries: Counter[int] = Counter()  # restores from a step since the last step was made

    async def carry_out(self, action: Action) -> None:
        """Carry out one action and report its outcome; a failure is an outcome too."""
        if isinstance(action, Say):
            self.say(action.text)
            return
        try:
            outcome = await self._do_action(action)
        except (OSError, TimeoutError, ValueError) as e:
            outcome = Outcome(action=action.id, ok=False, detail=str(e) or type(e).__name__)
        self._report(outcome)

    async def _do_action(self, action: Acquire | Dismiss | Launch | Stop | Stage | Probe | Replay | Finish) -> Outcome:
        match action:
            case Acquire():
                return await self._acquire_nodes(action)
            case Dismiss():
                return await self._dismiss_node(action)
            case Launch():
                return await self._launch_ranks(action)
            case Stop():
                return await self._stop_ranks(action)
            case Stage():
                return await self.staging.stage_release(action)
            case Probe():
                return await self.probing.probe_nodes(action)
            case Replay():
                return await self.replaying.replay_nodes(action)
            case Finish():
                return await self._finish_job(action)

    def set_probe_limits(self, probe: ProbeLimits, replay: ReplayLimits, kept: Path) -> None:
        """Set the limits of probes and replays; `kept` is the file for what probes measure."""
        self.probing = NodeProbing(self._ask_nodes, self.store, self.hosts, probe, kept)
        release, self.replaying = self.replaying.release, ReplayRuns(self._ask_nodes, self.store, replay)
        self.replaying.release = release

    # --- news of nodes -----------------------------------------------------------------------------------------

    def on_done(self, done: Done) -> None:
        waiting = self._waiting.get(done.id)
        if waiting and done.node in waiting.left:
            if isinstance(waiting.errands[done.node], StopHere):
                self.copies[done.node] = done.copies
            waiting.answers[done.node] = done
            self._note_answer(waiting, done.node, "" if done.ok else done.detail or "it did not say why")

    def on_silent(self, node: str) -> None:
        """Stop waiting for a node that has fallen silent."""
        self._silent.add(node)
        self.copies.pop(node, None)
        for waiting in self._waiting.values():
            if node in waiting.left:
                self._note_answer(waiting, node, "it fell silent")

    def on_relink(self, node: str) -> None:
        """Send a node again every errand that it has not answered."""
        self._silent.discard(node)
        for waiting in self._waiting.values():
            errand = waiting.errands.get(node)
            if errand is None or node not in waiting.left:
                continue
            # A node that has lost its memory remembers the stop, and would launch after it what it has forgotten.
            if not isinstance(errand, LaunchHere) or errand.generation > self._stopping:
                self.tell(node, errand)

    async def end_at_once(self) -> None:
        """End every node at once, and stop waiting for any answer."""
        self._hurried = True
        self._stepping.set()
        await self._give_back_all("told to hurry")
        for waiting in self._waiting.values():
            waiting.left.clear()
            waiting.answered.set()

    def _note_answer(self, waiting: PendingAction, node: str, error: str) -> None:
        waiting.left.discard(node)
        if error:
            waiting.failed[node] = error
        if not waiting.left:
            waiting.answered.set()

    async def _gather_outcome(self, id: int, errands: dict[str, Errand], within_s: float) -> Outcome:
        waiting = await self._send_and_wait(id, errands, within_s)
        departed = tuple(sorted(rank for done in waiting.answers.values() for rank in done.departed))
        failed = dict(sorted(waiting.failed.items()))
        return Outcome(action=id, ok=not waiting.failed, failed=failed, departed=departed)

    async def _ask_nodes(self, id: int, errands: dict[str, Errand], within_s: float) -> dict[str, Done]:
        return (await self._send_and_wait(id, errands, within_s)).answers

    async def _send_and_wait(self, id: int, errands: dict[str, Errand], within_s: float) -> PendingAction:
        waiting = self._waiting[id] = PendingAction(errands, set(errands), {}, asyncio.Event())
        for count, (node, errand) in enumerate(errands.items(), 1):
            if node in self._silent:
                self._note_answer(waiting, node, "it is silent")
            else:
                self.tell(node, errand)
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)  # thousands of sends must not hold up the loop
        try:
            if waiting.left and not self._hurried:
                async with asyncio.timeout(within_s):
                    await waiting.answered.wait()
        except TimeoutError:
            for node in sorted(waiting.left):
                waiting.failed[node] = f"no answer within {within_s:g} s"
        finally:
            del self._waiting[id]
        return waiting

    # --- actions -----------------------------------------------------------------------------------------------

    async def _acquire_nodes(self, action: Acquire) -> Outcome:
        # Nodes that came by an earlier try of this action, of which a crash of ours lost the outcome, count first.
        here = [n for n in self.fleet.nodes() if n not in self.known()][: action.count]
        more = await self.fleet.acquire(action.count - len(here)) if len(here) < action.count else ()
        return Outcome(action=action.id, ok=True, nodes=(*here, *more))

    async def _dismiss_node(self, action: Dismiss) -> Outcome:
        if self.copies.get(action.node):
            await self._wait_until_unneeded()
        self.tell(action.node, Leave(id=action.id, code=EVICTED, grace_s=0.0, reason=action.reason))
        self.forget(action.node)
        await self.fleet.give_back(action.node, action.reason)
        return Outcome(action=action.id, ok=True)

    async def _wait_until_unneeded(self) -> None:
        """Wait for the next generation's first step, since it may restore from copies on the evicted node."""
        self._stepping.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.wait_s):
                await self._stepping.wait()

    def on_step(self) -> None:
        """Note that every rank has made a step, and so has its state."""
        self._stepping.set()
        self._tries.clear()
        # What others hold is of a line that the job has left, or will be told anew when they are seated. A controller
        # that has just come back knows of no launch, and forgets nothing: a step may be told late, amid a stop.
        if self._launched:
            self.copies = {node: held for node, held in self.copies.items() if node in self._launched}

    async def _launch_ranks(self, action: Launch) -> Outcome:
        port = await self.store.open(action.generation)
        self._launched = frozenset(seat.node for seat in action.seats)
        plan = self._recall_or_plan(action)
        # What came after it is of a line that the job leaves: seated nodes drop it, others may never be asked again.
        self.copies = {node: tuple(c for c in held if c.step <= plan.step) for node, held in self.copies.items()}
        errands: dict[str, Errand] = {
            seat.node: LaunchHere(
                id=action.id,
                generation=action.generation,
                seat=seat,
                world_size=world_size(action.seats),
                group_world_size=len(action.seats),
                store_host=self.store.host,
                store_port=port,
                run_id=self.job.run_id,
                mark=self.job.mark,
                max_restarts=self.job.max_restarts or 0,
                began_at=self.began_at,
                restore=self._node_restore(seat, plan),
                astray=seat.node in action.astray,
                aim=self.aim(seat.node),
                release=action.release,
                skips=action.skips,
                eases=action.eases,
            )
            for seat in action.seats
        }
        outcome = await self._gather_outcome(action.id, errands, self.limits.launch_s)
        worth_telling = plan.sources or self.stored >= 0 or plan.doubts
        return msgspec.structs.replace(outcome, detail=plan.reason) if worth_telling else outcome

    def _recall_or_plan(self, launch: Launch) -> Restore:
        """Return the launch's plan, made only once: an earlier controller may have told it to some nodes already."""
        kept = self.newest_plan()
        if kept and kept.id == launch.id:
            return kept.restore
        plan, nodes = self._choose_restore(launch), tuple(seat.node for seat in launch.seats)
        number = launch.release.number
        if plan.sources and kept and kept.release not in (0, number) and plan.step > self.stored:
            plan = msgspec.structs.replace(plan, store=True)
        planned = LaunchPlan(id=launch.id, restore=plan, generation=launch.generation, nodes=nodes, release=number)
        self.notes.put_note("plan.json", msgspec.json.encode(planned))
        return plan

    def newest_plan(self) -> LaunchPlan | None:
        """Return the plan of the newest launch that any node can have heard of, or None."""
        found = self.notes.get_note("plan.json")
        with contextlib.suppress(msgspec.DecodeError):  # a damaged one is none: nodes are waited for instead
            return _PLANNED(found) if found else None
        return None

    def _choose_restore(self, launch: Launch) -> Restore:
        """Choose the state to restore. A state from which the job twice made no step is not tried a third time."""
        least = launch.not_after if launch.not_after is not None else sys.maxsize
        away = set(launch.astray)  # what they hold may be of a line that the job has left
        held = [copy for node, copies in self.copies.items() if node not in away for copy in copies]
        usable = [copy for copy in held if copy.step <= least and self._tries[copy.step] < _TRIES]
        plan = choose_restore(launch.seats, usable, least if launch.verified else None)
        plan = msgspec.structs.replace(plan, doubts=launch.doubts)
        if least >= self.stored > plan.step:
            reason = f"step {self.stored} is on storage, newer than what memory holds for every rank"
            return Restore(doubts=launch.doubts, reason=reason)
        self.stored = min(self.stored, plan.step)
        if plan.sources:
            self._tries[plan.step] += 1
        return plan

    def _node_restore(self, seat: Seat, plan: Restore) -> Restore:
        """Return one node's part of the plan; if it must fetch state, also where copies and keepers are."""
        sources = tuple(source for source in plan.sources if seat.has_rank(source.rank))
        if all(source.own for source in sources):
            return msgspec.structs.replace(plan, sources=sources, kept=())
        keepers = {kept.node: self.keepers[kept.node] for kept in plan.kept if kept.node in self.keepers}
        return msgspec.structs.replace(plan, sources=sources, keepers=keepers)

    async def _stop_ranks(self, action: Stop) -> Outcome:
        self._stopping = action.generation
        errand = StopHere(id=action.id, generation=action.generation, grace_s=action.grace_s)
        return await self._gather_outcome(
            action.id, dict.fromkeys(action.nodes, errand), action.grace_s + self.limits.stop_s
        )

    async def _finish_job(self, action: Finish) -> Outcome:
        self._stepping.set()
        leave = Leave(id=action.id, code=action.code, grace_s=action.grace_s, reason=action.reason)
        errands: dict[str, Errand] = dict.fromkeys(self.present(), leave)
        last_s = 0.0
        if action.last_s > 0 and (kept := self.newest_plan()):
            clock = asyncio.get_running_loop().time
            began_at = clock()
            found = await self._final_copies(action, kept)
            last_s = final_checkpoint.storage_time_s(action.last_s, clock() - began_at) if found else 0.0
            for node in found:
                errands[node] = msgspec.structs.replace(leave, last=found[node], last_s=last_s)
        outcome = await self._gather_outcome(action.id, errands, action.grace_s + last_s + self.limits.stop_s)
        stuck = await self._give_back_all("the job has ended")
        for node, why in stuck.items():
            self.say(f"{node} could not be ended: {why}")
        failed = outcome.failed | stuck
        await self.store.quit()
        return Outcome(action=action.id, ok=not failed, failed=failed)

    async def _final_copies(self, action: Finish, kept: LaunchPlan) -> dict[str, tuple[FinalState, ...]]:
        """End all ranks, then choose the copies for a last checkpoint: only stopped ranks hold stable state."""
        self._stopping = max(self._stopping, kept.generation)
        id = -(_LAST_IDS + action.id)
        errand = StopHere(id=id, generation=kept.generation, grace_s=action.grace_s)
        present = [node for node in self.present() if node in kept.nodes]
        answers = await self._ask_nodes(id, dict.fromkeys(present, errand), action.grace_s + self.limits.stop_s)
        copies = {node: done.copies for node, done in answers.items()}
        stored = max((done.stored for done in answers.values()), default=-1)
        return final_checkpoint.choose_final(copies, stored, action.not_after, verified=action.verified)

    async def _give_back_all(self, reason: str) -> dict[str, str]:
        """Give all nodes back at once; returns errors by node."""
        nodes = self.fleet.nodes()
        for node in nodes:
            self.forget(node)
        results = await asyncio.gather(*(self.fleet.give_back(n, reason) for n in nodes), return_exceptions=True)
        errors = {node: error for node, error in zip(nodes, results, strict=True) if error is not None}
        for error in errors.values():
            if not isinstance(error, OSError):
                raise error
        return {node: str(error) for node, error in errors.items()}
