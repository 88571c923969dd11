"""Carries out actions: sends them to nodes as errands and gathers the answers into one outcome per action."""

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable

import msgspec

from holdfast.controller.actions.errand_dispatch import ErrandDispatch
from holdfast.controller.actions.launch_plan import LaunchPlan, known_lines, read_plan
from holdfast.controller.actions.node_probing import NodeProbing
from holdfast.controller.actions.release_staging import ReleaseStaging
from holdfast.controller.actions.replay_runs import ReplayRuns
from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.peer_copies_and_aims import SnapshotAims
from holdfast.controller_interfaces import Fleet, FleetRefusal, Notes, Store
from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.restore_source_sentences import describe_source
from holdfast.core.record.ledger import Ledger
from holdfast.core.snapshots import final_checkpoint
from holdfast.core.snapshots.lineage import add_launch, bans_before, is_of_line
from holdfast.core.snapshots.recut_choice import choose_recut
from holdfast.core.snapshots.restore_choice import (
    choose_known_restore,
    choose_replicated,
    count_disks,
    leave_out_disks,
    newest_doubted,
    steps_on_disks,
)
from holdfast.linux.local_time import clock_text
from holdfast.model.action import (
    Acquire,
    Action,
    Block,
    Dismiss,
    Dismissal,
    Finish,
    Launch,
    Probe,
    Replay,
    Say,
    Stage,
    Stop,
)
from holdfast.model.decider_events import Outcome, Progress
from holdfast.model.job_and_seats import Seat, world_size
from holdfast.model.node_errands import Errand, FinalState, LaunchHere, Leave, StopHere
from holdfast.model.restore_sources import LaunchOrigin, Restore
from holdfast.model.state_doubt import Doubt

_TRIES = 2
WITHOUT_GRACE = "the job was stopped without grace"
_LAST_IDS = 10**15  # the stop that an end begins with is numbered downwards from here: no other errand gets there
EVICTED = 1  # exit code of a node that the job no longer wants


class ActionExecutor:
    def __init__(
        self,
        *,
        fleet: Fleet,
        store: Store,
        notes: Notes,
        say: Callable[[str], None],
        view: JobView,
        ledger: Ledger,
        links: NodeLinks,
        registry: NodeRegistry,
        aims: SnapshotAims,
        dispatch: ErrandDispatch,
        probing: NodeProbing,
        replaying: ReplayRuns,
        staging: ReleaseStaging,
        admission: HostAdmission,
    ) -> None:
        self.fleet, self.store, self.notes, self.say = fleet, store, notes, say
        self.view, self.ledger = view, ledger
        self.links, self.registry, self.aims = links, registry, aims
        self.dispatch, self.probing, self.replaying, self.staging = dispatch, probing, replaying, staging
        self.admission = admission
        self._stepping = asyncio.Event()
        self._evicting: set[str] = set()  # nodes whose hosts are not to come back
        self._launched: frozenset[str] = frozenset()  # nodes of the newest generation
        self._has_stepped = False  # that generation
        self._noted: LaunchPlan | None = None  # the newest, as far as this controller has read or written it
        self._tries: Counter[int] = Counter()  # restores from a step since the last step was made
        self._stored_tried: set[int] = set()  # the same from storage, once: it may be away, and the script gives up

    async def carry_out(self, action: Action) -> Outcome | None:
        """Carry out one action and return its outcome, even a failed one; None for a Say, which has no outcome."""
        if isinstance(action, Say):
            self.say(f"{action.text}{f' (until {clock_text(action.until)})' if action.until else ''}")
            return None
        _ = self.links.epoch  # which raises if another controller acts by now
        try:
            return await self._do_action(action)
        except (OSError, TimeoutError, ValueError) as e:
            return Outcome(action=action.id, ok=False, detail=str(e) or type(e).__name__)

    async def _do_action(
        self, action: Acquire | Dismiss | Block | Launch | Stop | Stage | Probe | Replay | Finish
    ) -> Outcome:
        match action:
            case Acquire():
                return await self._acquire_nodes(action)
            case Dismiss():
                return await self._evict_or_dismiss(action)
            case Block():
                return await self.admission.block_host(action)
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

    async def end_at_once(self, reached: int = -1) -> None:
        """End every node at once, and stop waiting for answers. `reached` is the job's newest step, -1 if not known."""
        lost = self.registry.storage.cut_short(reached)
        if self.dispatch.hurry():
            self.say(f"ending at once, without grace and without a last checkpoint{f': {lost}' if lost else ''}")
        self._stepping.set()
        await self._give_back_all(WITHOUT_GRACE)
        self.dispatch.drop_waiting()

    async def _gather_outcome(self, id: int, errands: dict[str, Errand], within_s: float) -> Outcome:
        waiting = await self.dispatch.send_errands(id, errands, within_s)
        departed = tuple(sorted(rank for done in waiting.answers.values() for rank in done.departed))
        failed = dict(sorted(waiting.failed.items()))
        kept = sum(done.kept for done in waiting.answers.values())
        return Outcome(action=id, ok=not waiting.failed, failed=failed, departed=departed, kept=kept)

    # --- actions -----------------------------------------------------------------------------------------------

    async def _acquire_nodes(self, action: Acquire) -> Outcome:
        # Nodes that came by an earlier try of this action, of which a crash of ours lost the outcome, count first.
        known = self.registry.known_nodes()
        here = [node for node in self.fleet.nodes() if node not in known][: action.count]
        missing = action.count - len(here)
        try:
            more = await self.fleet.acquire(missing, self._evicting) if missing > 0 else ()
        except FleetRefusal as e:
            return Outcome(action=action.id, ok=False, nodes=tuple(here), detail=str(e), refused=True)
        return Outcome(action=action.id, ok=True, nodes=(*here, *more))

    async def _evict_or_dismiss(self, action: Dismiss) -> Outcome:
        if action.cause is Dismissal.EVICTED:
            self._evicting.add(action.node)
        try:
            return await self._dismiss_node(action)
        finally:
            self._evicting.discard(action.node)

    async def _dismiss_node(self, action: Dismiss) -> Outcome:
        if held := bool(self.registry.copies.get(action.node)):
            await self._wait_until_unneeded()
        host, hosts = self.registry.hosts.get(action.node), self.registry.hosts
        alone = host is not None and not any(
            hosts.get(node) == host for node in self.registry.present_nodes() if node != action.node
        )
        over = alone and self._has_stepped and action.node not in self._launched
        if alone and not over and self.aims.floor.disk.limits.path and (held or action.node in self._launched):
            self.say(f"what lies on the disk of {action.node} stays there: no later generation has made a step yet")
        leave = Leave(id=action.id, code=action.code, grace_s=0.0, reason=action.reason, disk_over=over)
        self.links.send_errand(action.node, leave)
        self._forget_node(action.node)
        await self.fleet.give_back(action.node, action.reason, action.cause)
        return Outcome(action=action.id, ok=True)

    def _forget_node(self, node: str) -> None:
        self.registry.record_departure(node)
        self.aims.on_departure(node)

    async def _wait_until_unneeded(self) -> None:
        """Wait a while for the next generation's first step: its restore may need the evicted node's copies."""
        self._stepping.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.view.limits.wait_s):
                await self._stepping.wait()

    def on_step(self, progress: Progress | None = None) -> None:
        """Note that every rank has made a step, and so has restored its state."""
        self._stepping.set()
        self._tries.clear()
        self._stored_tried.clear()
        self._note_step(progress.restored if progress else -1)
        # What others hold is of a line that the job has left, or will be told anew when they are seated. A controller
        # that has just come back knows of no launch, and forgets nothing: a step may be told late, amid a stop.
        if self._launched:
            self._has_stepped = True
            self.registry.keep_copies_on(self._launched)

    def _note_step(self, restored: int) -> None:
        """Record in the launch plan's note that the generation has made a step, and the newest stored step. If all
        memory is lost, the note tells which states on the nodes' disks are of the job's lineage. Ranks whose state
        could not be cut anew have restored an older one from storage, which is then noted as well."""
        kept = self._noted = self._noted or self.newest_plan()
        if kept is None:
            return
        on_disks = bool(self.aims.floor.disk.limits.path)
        last, stored = kept.line[-1:], max(self.registry.stored if on_disks else -1, kept.stored)
        if stored > kept.stored or any(not one.stepped for one in last):
            line = (*kept.line[:-1], *(msgspec.structs.replace(one, stepped=True) for one in last))
            if kept.restore.cut_from and restored not in (-1, kept.restore.step):
                line = (*kept.line[:-1], LaunchOrigin(generation=kept.generation, stepped=True))
            with contextlib.suppress(OSError):  # tried again at the next step
                self._note_plan(msgspec.structs.replace(kept, line=line, stored=stored))

    async def _launch_ranks(self, action: Launch) -> Outcome:
        if not (self._is_planned(action) or await self._hear_seats(action)):
            return Outcome(action=action.id, ok=False, detail="it is stopped")
        plan = self._recall_or_plan(action)  # first: without the plan of a launch that fails no disk would be believed
        port = await self.store.open(action.generation)
        self._launched, self._has_stepped = frozenset(seat.node for seat in action.seats), False
        self._count_try(plan)
        # What came after it is of a line that the job leaves: seated nodes drop it, others may never be asked again.
        self.registry.drop_copies_after(plan.step)
        self.aims.floor.disk.hold_steps(self._steps_on_disks(action, plan))
        disks, line = count_disks(plan), self._noted.line if self._noted else ()
        for sentence in describe_source(plan):
            self.say(sentence)
        job = self.view.job
        errands: dict[str, Errand] = {
            seat.node: LaunchHere(
                id=action.id,
                generation=action.generation,
                seat=seat,
                world_size=world_size(action.seats),
                group_world_size=len(action.seats),
                store_host=self.store.host,
                store_port=port,
                run_id=job.run_id,
                mark=job.mark,
                max_restarts=job.max_restarts or 0,
                began_at=self.ledger.began_at,
                made_up=self.registry.made_up,
                told=self.ledger.newest is not None and self.ledger.newest.is_told,
                restore=self._node_restore(seat, plan),
                line=line,
                astray=seat.node in action.astray,
                aim=self.aims.aim_of(seat.node),
                release=action.release,
                skips=action.skips,
                eases=action.eases,
                # Ranks that have no state to restore would go on from what they had, and others from the beginning.
                keep=action.keep and (plan.is_held or plan.stored >= 0 or action.carries),
                mesh=self.view.mesh,
            )
            for seat in action.seats
        }
        outcome = await self._gather_outcome(action.id, errands, self.view.limits.launch_s)
        outcome = msgspec.structs.replace(outcome, disks=disks, apart=plan.apart)
        worth_telling = plan.is_held or self.registry.stored >= 0 or plan.doubts
        return msgspec.structs.replace(outcome, detail=plan.reason) if worth_telling else outcome

    def _is_planned(self, launch: Launch) -> bool:
        kept = self.newest_plan()
        return kept is not None and kept.id == launch.id

    async def _hear_seats(self, launch: Launch) -> bool:
        """Wait until the nodes of a launch have told this controller what states they hold, or are silent. Without
        this, a controller that has just taken over would find none. Return False if the launch is stopped before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.view.limits.launch_s):
                return await self.dispatch.await_links([seat.node for seat in launch.seats], launch.generation)
        return True

    def _steps_on_disks(self, launch: Launch, plan: Restore) -> set[int]:
        """Return the steps of the launch's lineage that all nodes of the launch have on their disks, as they report."""
        held = [copy for copies in self.registry.copies.values() for copy in copies]
        line, left = (self._noted.line, self._noted.left) if self._noted else ((), ())
        held = [copy for copy in held if is_of_line(line, launch.generation, copy.generation, copy.step)]
        left = (*left, *launch.doubts)
        return steps_on_disks(launch.seats, leave_out_disks(held, left), plan.step if plan.is_held else -1)

    def _recall_or_plan(self, launch: Launch) -> Restore:
        """Return a launch's restore plan: the noted one, if an earlier controller may have sent it, or a new one."""
        kept = self.newest_plan()
        if kept and kept.id == launch.id:
            self._noted = kept
            return kept.restore
        plan, nodes = self._choose_restore(launch, kept), tuple(seat.node for seat in launch.seats)
        number, step = launch.release.number, plan.step if plan.is_held else -1
        if plan.is_held and kept and kept.release not in (0, number) and plan.step > self.registry.stored:
            plan = msgspec.structs.replace(plan, store=True)
        line, left = known_lines(launch, kept)
        line = add_launch(line, LaunchOrigin(generation=launch.generation, step=step, maker=plan.maker))
        self._note_plan(
            LaunchPlan(
                id=launch.id,
                restore=plan,
                generation=launch.generation,
                nodes=nodes,
                release=number,
                line=line,
                left=bans_before(line, left),
                stored=max(self.registry.stored, min(kept.stored, max(step, plan.stored)) if kept else -1),
            )
        )
        return plan

    def _note_plan(self, planned: LaunchPlan) -> None:
        self.notes.put_note("plan.json", msgspec.json.encode(planned))
        self._noted = planned

    def newest_plan(self) -> LaunchPlan | None:
        """Return the plan of the newest launch that a node may have received; None if there is none."""
        return read_plan(self.notes.get_note("plan.json"))

    def _choose_restore(self, launch: Launch, kept: LaunchPlan | None = None) -> Restore:
        """Choose the state to restore. After two tries without a step, try older states once each, then storage."""
        least = launch.not_after if launch.not_after is not None else sys.maxsize
        away = set(launch.astray)  # what they hold in memory may be of a line that the job has left
        held = [c for node, copies in self.registry.copies.items() for c in copies if node not in away or c.disk]
        line, left = known_lines(launch, kept)
        doubted = newest_doubted(launch, held, self.registry.stored, kept.restore.doubted if kept else -1)
        held = leave_out_disks(held, (*left, *launch.doubts))
        most = 1 if any(tries >= _TRIES for tries in self._tries.values()) else _TRIES
        usable = [copy for copy in held if copy.step <= least and self._tries[copy.step] < most]
        known_nodes = {*(seat.node for seat in launch.seats), *(kept.nodes if kept else ()), *self.registry.local_nodes}
        plan = choose_known_restore(launch.seats, usable, known_nodes, least if launch.verified else None, line)
        if launch.resizes and not launch.verified:
            plan = choose_replicated(launch.seats, [one for one in usable if one.node in known_nodes], line, plan)
        same = kept is None or kept.release in (0, launch.release.number)  # another may have a state of another form
        if same and not plan.replicated:
            known = [one for one in usable if one.node in known_nodes]
            plan = choose_recut(launch.seats, known, least if launch.verified else None, line, plan)
        stored = self.registry.stored
        plan = msgspec.structs.replace(plan, doubts=launch.doubts, stored=stored if plan.cut_from else -1)
        if kept and any(source.disk for source in plan.sources):  # all memory was lost, so nobody may know but the note
            stored = max(stored, kept.stored)
        if least >= stored > plan.step and not (plan.is_held and stored in self._stored_tried):
            reason = f"step {stored} on storage is newer than any step that memory or disks hold for every rank"
            plan = Restore(stored=stored, reason=reason, apart=plan.apart, uncut=plan.uncut, doubted=doubted)
            return msgspec.structs.replace(plan, doubts=launch.doubts)
        self.registry.lower_stored(plan.step)
        return plan if plan.is_held else msgspec.structs.replace(plan, doubted=doubted)

    def _count_try(self, plan: Restore) -> None:
        if plan.is_held:
            self._tries[plan.step] += 1
        elif plan.stored >= 0:
            self._stored_tried.add(plan.stored)

    def _node_restore(self, seat: Seat, plan: Restore) -> Restore:
        """Return the plan with this node's ranks only; if they must fetch states, add the addresses of keepers."""
        sources = tuple(source for source in plan.sources if seat.has_rank(source.rank))
        if not plan.cut_from and all(source.own for source in sources):
            return msgspec.structs.replace(plan, sources=sources, kept=())
        at = self.registry.keepers
        keepers = {kept.node: at[kept.node] for kept in plan.kept if kept.node in at}
        return msgspec.structs.replace(plan, sources=sources, keepers=keepers)

    async def _stop_ranks(self, action: Stop) -> Outcome:
        self.dispatch.on_stop(action.generation)
        errand = StopHere.of_action(action)
        within_s = (errand.parking.within_s if errand.parking else 0.0) + action.grace_s + self.view.limits.stop_s
        return await self._gather_outcome(action.id, dict.fromkeys(action.nodes, errand), within_s)

    async def _finish_job(self, action: Finish) -> Outcome:
        self._stepping.set()
        found: dict[str, tuple[FinalState, ...]] = {}
        last_s, kept = 0.0, self.newest_plan()
        if action.last_s > 0 and kept:
            clock = asyncio.get_running_loop().time
            began_at = clock()
            found = await self._final_copies(action, kept)
            last_s = final_checkpoint.storage_time_s(action.last_s, clock() - began_at) if found else 0.0
        leaves = self._leave_errands(action, kept, found, last_s)
        errands: dict[str, Errand] = dict(leaves)
        within_s = action.grace_s + last_s + self.view.limits.stop_s
        answered = await self.dispatch.send_errands(action.id, errands, within_s)
        on_disks = final_checkpoint.newest_on_disks({node: done.copies for node, done in answered.answers.items()})
        promised = max((state.step for one in leaves.values() for state in one.last if not state.doubted), default=-1)
        stuck = await self._give_back_all("the job has ended")
        for node, why in stuck.items():
            self.say(f"cannot end {node}: {why}")
        failed = dict(sorted(answered.failed.items())) | stuck
        await self.store.quit()
        storage = self.registry.storage.close(promised, on_disks, action.not_after)
        return Outcome(action=action.id, ok=not failed, failed=failed, storage=storage)

    def _leave_errands(
        self, action: Finish, kept: LaunchPlan | None, found: dict[str, tuple[FinalState, ...]], last_s: float
    ) -> dict[str, Leave]:
        bad = action.not_after
        stored = max(self.registry.stored, kept.stored if kept else -1)
        leave = Leave(
            id=action.id,
            code=action.code,
            grace_s=action.grace_s,
            reason=action.reason,
            ended=True,
            stored=stored if bad is None or stored <= bad else -1,
            doubts=(Doubt(generation=self.view.generation, not_after=bad),) if bad is not None else (),
        )
        return {
            node: msgspec.structs.replace(
                leave,
                spared=self.registry.ranks_beside(node),
                last=found.get(node, ()),
                last_s=last_s if node in found else 0.0,
            )
            for node in sorted({*self.registry.present_nodes(), *found})
        }

    async def _final_copies(self, action: Finish, kept: LaunchPlan) -> dict[str, tuple[FinalState, ...]]:
        """End all ranks, so that no state changes any more; then choose the copies for a last checkpoint."""
        self.dispatch.on_stop(kept.generation)
        id = -(_LAST_IDS + action.id)
        hand_over, park_s = action.hand_over, self.view.limits.survive_s if action.hand_over else 0.0
        errand = StopHere(id=id, generation=kept.generation, grace_s=action.grace_s, park_s=park_s, hand_over=hand_over)
        present = [node for node in self.registry.present_nodes() if node in kept.nodes]
        within_s = (errand.parking.within_s if errand.parking else 0.0) + action.grace_s + self.view.limits.stop_s
        answers = await self.dispatch.ask_nodes(id, dict.fromkeys(present, errand), within_s)
        copies = {node: done.copies for node, done in answers.items()}
        stored = max((done.stored for done in answers.values()), default=-1)
        seats, bad = self.view.seats, action.not_after
        found = final_checkpoint.choose_final(copies, seats, stored, bad, verified=action.verified)
        if bad is not None and any(copies.values()):
            self.say(final_checkpoint.describe_doubt(found, bad))
        return found

    async def _give_back_all(self, reason: str) -> dict[str, str]:
        """Give all nodes back to the fleet at once; return the errors by node."""
        nodes = self.fleet.nodes()
        for node in nodes:
            self._forget_node(node)
        over = (self.fleet.give_back(node, reason, Dismissal.ENDED) for node in nodes)
        results = await asyncio.gather(*over, return_exceptions=True)
        errors = {node: error for node, error in zip(nodes, results, strict=True) if error is not None}
        for error in errors.values():
            if not isinstance(error, OSError):
                raise error
        return {node: str(error) for node, error in errors.items()}
