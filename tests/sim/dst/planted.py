"""Mutants of the protocol: bugs that somebody could write, planted into the real code one at a time."""

import contextlib
from typing import Any

import msgspec

from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.keeper import Keeper
from holdfast.agent.snapshots.other_size_arenas import OtherSizeArenas
from holdfast.agent.snapshots.peer_arenas import PeerArena
from holdfast.controller.actions.action_executor import ActionExecutor
from holdfast.controller.agent_ingest import AgentIngest
from holdfast.controller.node_links import NodeLinks
from holdfast.core.agent_state_machine import AgentProtocol
from holdfast.core.decide import launching, surviving_ranks
from holdfast.core.decide.action_ids import ActionIds
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.detect.silence import SilenceDetector
from holdfast.core.membership import job_nodes, seating
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.membership.standbys import Standbys
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch, read_launch
from holdfast.model.decider_events import Outcome
from holdfast.model.node_errands import Leave, StopHere
from holdfast.model.restore_sources import Restore, Source
from holdfast.model.state_copy import Copy
from holdfast.sim.dst.controller_disk import DiskJournal
from holdfast.sim.dst.real_program_protocols import AgentCrashed
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.simulated_agent_notes import SimNotes
from holdfast.wire import agent_messages
from holdfast.wire.rank_keeper_messages import KeeperRefusal, StateGrant
from tests.sim.dst.mutant import Mutant, Patch, draw_grouped, draw_surviving, draw_with_disks, lines_are_unknown


def no_fence(patch: Patch) -> None:
    """A node that comes back is taken as ready although old ranks run on it."""
    told = AgentIngest._on_hello

    def hello(self: AgentIngest, now: float, hello: agent_messages.Hello, outbox: Any) -> None:
        told(self, now, msgspec.structs.replace(hello, generation=0), outbox)

    patch.setattr(AgentIngest, "_on_hello", hello)


def launch_under_way_untold(patch: Patch) -> None:
    """A node tells only of ranks that run, not of a launch that it is about to carry out."""
    patch.setattr(AgentProtocol, "occupied_by", lambda self, running: running)


def acks_before_disk(patch: Patch) -> None:
    """What an agent tells is acknowledged at once."""
    heard = AgentIngest._on_message

    def hears(self: AgentIngest, message: Any, outbox: Any, node: str) -> str:
        found = heard(self, message, outbox, node)
        self.links.send_acks()
        return found

    patch.setattr(AgentIngest, "_on_message", hears)


def acts_before_disk(patch: Patch) -> None:
    """The journal is never waited for before something is done."""
    append = DiskJournal.append
    patch.setattr(DiskJournal, "append", lambda self, entry, durable: append(self, entry, False))


def ids_reused(patch: Patch) -> None:
    """After a restart actions are numbered from the beginning."""

    def above(self: ActionIds, number: int) -> None:
        self._next = 1

    patch.setattr(ActionIds, "skip_to", above)


def plan_made_anew(patch: Patch) -> None:
    """Every life of the controller decides anew what the launch goes on from."""
    patch.setattr(ActionExecutor, "_recall_or_plan", ActionExecutor._choose_restore)


def seats_are_unheard(patch: Patch) -> None:
    """A controller that has taken over plans a launch from what those nodes hold that have called by then."""

    async def hears(self: ActionExecutor, launch: Any) -> bool:
        return True

    patch.setattr(ActionExecutor, "_hear_seats", hears)


def restore_without_all(patch: Patch) -> None:
    """The newest step that anybody has is taken, whoever lacks it."""

    def choose(seats: Any, copies: Any, not_after: int | None = None) -> Restore:
        best = max((c.step for c in copies), default=0)
        ranks = range(sum(seat.nproc for seat in seats))
        held = {rank: [c for c in copies if c.rank == rank] for rank in ranks}
        if not best or not all(held.values()):
            return Restore()
        return Restore(step=best, sources=tuple(_newest(seats, rank, held[rank]) for rank in ranks))

    patch.setattr("holdfast.core.snapshots.restore_choice.choose_restore", choose)
    patch.setattr(OtherSizeArenas, "verify_state", _grant_newest)


def _newest(seats: Any, rank: int, held: list[Copy]) -> Source:
    node = next(seat.node for seat in seats if seat.has_rank(rank))
    mine = any(c.node == node and c.whole for c in held)
    return Source(rank=rank, own=mine, nodes=(node,) if mine else tuple(c.node for c in held))


def strangers_copies(patch: Patch) -> None:
    """What a node without a seat holds is believed, whatever line it is of."""
    lines_are_unknown(patch)
    told = AgentIngest._on_hello

    def hello(self: AgentIngest, now: float, hello: agent_messages.Hello, outbox: Any) -> None:
        told(self, now, hello, outbox)
        self.registry.record_copies(hello.node, hello.copies)

    patch.setattr(AgentIngest, "_on_hello", hello)


def astray_believed(patch: Patch) -> None:
    """What a node holds that was away while the others went on is believed."""
    lines_are_unknown(patch)
    launch = ActionExecutor._launch_ranks

    async def launches(self: ActionExecutor, action: Any) -> Any:
        return await launch(self, msgspec.structs.replace(action, astray=()))

    patch.setattr(ActionExecutor, "_launch_ranks", launches)


def astray_kept(patch: Patch) -> None:
    """A node that was away is seated again, and keeps what it holds of a line that was left."""
    lines_are_unknown(patch)
    launched = Keeper.begin_launch

    def launches(self: Keeper, errand: Any) -> str:
        return launched(self, msgspec.structs.replace(errand, astray=False))

    patch.setattr(Keeper, "begin_launch", launches)


def nothing_is_dropped(patch: Patch) -> None:
    """A keeper does not know which snapshots a launch gives up, and keeps them all."""

    def reads(errand: Any) -> KeeperLaunch:
        return msgspec.structs.replace(read_launch(errand), shared_step=10**9, line=())

    patch.setattr("holdfast.agent.snapshots.keeper.read_launch", reads)


def copies_are_not_dropped(patch: Patch) -> None:
    """A keeper drops its own snapshots that a launch gives up, but not the copies that it holds for others."""
    patch.setattr(PeerArena, "forget_left", lambda self, launch: None)


def any_own_snapshot_is_granted(patch: Patch) -> None:
    """A rank gets its newest snapshot, whichever step the job goes on from, and nothing is dropped."""
    patch.setattr(OtherSizeArenas, "verify_state", _grant_newest)
    patch.setattr(ArenaTable, "drop_left", lambda self, launch: None)


async def _grant_newest(self: OtherSizeArenas, own: Any, step: int) -> Any:
    for newest in own.arena.list_sealed():
        return StateGrant(source="memory", step=newest.step, arena=own.path, slot=newest.slot)
    return KeeperRefusal(why="there is none")


def nobody_leaves(patch: Patch) -> None:
    """A node that has lost its controller goes on for ever."""
    patch.setattr(AgentProtocol, "_on_clock", lambda self, now: ())


def leaving_is_forgotten(patch: Patch) -> None:
    """An agent that is killed amid leaving has ended ranks, and the next one neither leaves nor tells of their end."""
    recall = AgentProtocol.restore_state

    def recalls(self: AgentProtocol, done: Any, generation: int, ranks: Any, *rest: Any, epoch: int) -> Any:
        stopped, _leave = rest
        return recall(self, done, generation, ranks, stopped, epoch=epoch)

    patch.setattr(AgentProtocol, "restore_state", recalls)


def full_disks_matter(patch: Patch) -> None:
    """An agent dies of a disk that takes nothing, before it has ended the ranks that it is to end."""
    write = SimNotes.write_stopped

    def writes(self: SimNotes, generation: int) -> None:
        if self._disk.full:
            self._machine.kill_agent()
            raise AgentCrashed
        write(self, generation)

    patch.setattr(SimNotes, "write_stopped", writes)


def stops_are_believed(patch: Patch) -> None:
    """A stop counts as done when it was told, not when it was answered."""

    async def stops(self: ActionExecutor, action: Any) -> Any:
        errand = StopHere(id=action.id, generation=action.generation, grace_s=action.grace_s)
        for name in action.nodes:
            self.links.send_errand(name, errand)
        return Outcome(action=action.id, ok=True)

    patch.setattr(ActionExecutor, "_stop_ranks", stops)


def nobody_is_waited_for(patch: Patch) -> None:
    """Where nobody confirms a stop the next generation is launched at once."""
    patch.setattr(Fence, "raise_fence", lambda self, now, nodes: [])


def fleets_are_believed(patch: Patch) -> None:
    """A node counts as ended although its fleet could not tell."""
    release = ActionExecutor._dismiss_node

    async def releases(self: ActionExecutor, action: Any) -> Any:
        with contextlib.suppress(OSError):
            return await release(self, action)
        return Outcome(action=action.id, ok=True)

    patch.setattr(ActionExecutor, "_dismiss_node", releases)


def wall_clock(patch: Patch) -> None:
    """Agents tell times by a clock that somebody may set."""

    def read(self: ControllerClock) -> float:
        offset_s: float = vars(self)["from_wall_s"] + self._clock.wall() - self._clock.monotonic()
        return offset_s

    def write(self: ControllerClock, offset_s: float) -> None:
        vars(self)["from_wall_s"] = offset_s - self._clock.wall() + self._clock.monotonic()

    patch.setattr(ControllerClock, "offset_s", property(read, write), raising=False)


def forgets_reborn(patch: Patch) -> None:
    """Nobody notices that a node has lost its ranks with its memory."""
    patch.setattr(AgentIngest, "_look_for_ranks", lambda self, now, beat: None)


def old_ranks_stay(patch: Patch) -> None:
    """A node whose old ranks cannot be ended is left alone."""
    tell = NodeLinks.send_errand

    def tells(self: NodeLinks, name: str, errand: Any) -> bool:
        return (errand.id < 0 and isinstance(errand, Leave)) or tell(self, name, errand)

    patch.setattr(NodeLinks, "send_errand", tells)


def silence_unheard(patch: Patch) -> None:
    """Nobody is ever thought silent."""
    patch.setattr(SilenceDetector, "overdue_alarms", lambda self, now: ())


def not_refilled(patch: Patch) -> None:
    """Standbys that were used are not replaced."""
    patch.setattr("holdfast.core.membership.standbys.RETRY_S", 1e9)


def disks_are_cleared_at_the_end(patch: Patch) -> None:
    """Whatever storage has, the end of the job removes all from the disks."""
    patch.setattr(
        "holdfast.sim.dst.simulated_local_checkpoints.list_stored_ranks", lambda newest, stored, spared: newest
    )


def disks_are_cleared_by_a_launch_without_sources(patch: Patch) -> None:
    """A launch that goes on from nothing, or from storage, gives up all that lies on disks."""
    gives_up = KeeperLaunch.gives_up

    def given_up(self: KeeperLaunch, generation: int, step: int) -> bool:
        return not self.restore.sources or gives_up(self, generation, step)

    patch.setattr(KeeperLaunch, "gives_up", given_up)


def disks_are_cleared_by_eviction(patch: Patch) -> None:
    """An evicted node removes its states at once."""
    told = NodeLinks.send_errand

    def sends(self: NodeLinks, node: str, errand: Any) -> None:
        leaves = isinstance(errand, Leave) and not errand.ended
        told(self, node, msgspec.structs.replace(errand, disk_over=True) if leaves else errand)

    patch.setattr(NodeLinks, "send_errand", sends)


def parked_ranks_get_new_code(patch: Patch) -> None:
    """Ranks that survive are told to go on though the next generation has another release or world size."""
    keeps = surviving_ranks.keeps_ranks
    patch.setattr(launching, "keeps_ranks", lambda state, *, changed: keeps(state, changed=False))


def parked_ranks_are_untold(patch: Patch) -> None:
    """A node that comes back does not tell of ranks that are parked on it, so nobody ends them."""
    occupied = AgentProtocol.occupied_by
    patch.setattr(
        AgentProtocol, "occupied_by", lambda self, running: occupied(self, running) * (running > self.stopped)
    )


def shrinks_by_the_users_mesh(patch: Patch) -> None:
    """A job shrinks by whole replicas if the user gave the parallel groups, not if the script reported them."""
    seats = seating.next_seats
    patch.setattr(job_nodes, "next_seats", lambda job, *given, mesh, **more: seats(job, *given, mesh=job.mesh, **more))
    patch.setattr(JobNodes, "replica_nodes", 1)


def left_over_nodes_are_forgotten(patch: Patch) -> None:
    """A node that is one too many for whole replicas loses its seat and is no standby either."""
    patch.setattr(Standbys, "unseat_node", lambda self, node: None)


PLANTED = (
    Mutant(no_fence, 4),
    Mutant(launch_under_way_untold, 109),
    Mutant(acks_before_disk, 5),
    Mutant(acts_before_disk, 0),
    Mutant(ids_reused, 0),
    Mutant(plan_made_anew, 598),
    Mutant(seats_are_unheard, 78, draw_setup),
    Mutant(restore_without_all, 6),
    Mutant(strangers_copies, 330),
    Mutant(astray_believed, 138),
    Mutant(astray_kept, 138),
    Mutant(nobody_leaves, 35, draw_setup),
    Mutant(nothing_is_dropped, 12),
    Mutant(copies_are_not_dropped, 61),
    Mutant(any_own_snapshot_is_granted, 11),
    Mutant(leaving_is_forgotten, 86),
    Mutant(full_disks_matter, 7, draw_setup),
    Mutant(stops_are_believed, 1),
    Mutant(nobody_is_waited_for, 2),
    Mutant(fleets_are_believed, 672),
    Mutant(wall_clock, 2),
    Mutant(forgets_reborn, 731),
    Mutant(old_ranks_stay, 779, draw_setup),
    Mutant(silence_unheard, 48),
    Mutant(not_refilled, 31),
    Mutant(disks_are_cleared_at_the_end, 2, draw_with_disks),
    Mutant(disks_are_cleared_by_a_launch_without_sources, 43, draw_with_disks),
    Mutant(disks_are_cleared_by_eviction, 22, draw_with_disks),
    Mutant(parked_ranks_get_new_code, 33, draw_surviving),
    Mutant(parked_ranks_are_untold, 9, draw_surviving),
    Mutant(shrinks_by_the_users_mesh, 0, draw_grouped),
    Mutant(left_over_nodes_are_forgotten, 98, draw_grouped),
)
