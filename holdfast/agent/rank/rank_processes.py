"""The ranks of one node: starts them through the holder, watches them, and makes sure that they end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.rank import last_words, rank_exchange_files
from holdfast.agent.rank.holder_connection import HolderConnection
from holdfast.agent.rank.progress_slots import ProgressSlots
from holdfast.agent.rank.rank_environment import rank_variables, release_environment
from holdfast.agent.rank.rank_start_requests import RankStart
from holdfast.agent.rank.recorder_sizes import RecorderSizes
from holdfast.agent.rank.spare_ranks import SPARE, SpareRanks, spare_key
from holdfast.agent.rank.survivors import Survivors
from holdfast.agent.rank.zygote_preload import ZygotePreload
from holdfast.core.rank_ranges import format_ranks
from holdfast.linux import own_process_settings
from holdfast.model.code_release import Release
from holdfast.model.node_errands import LaunchHere, Parking
from holdfast.wire import (
    holder_messages,
    progress_environment,
    survivor_messages,
)
from holdfast.wire.agent_messages import JobFigures
from holdfast.wire.holder_messages import (
    ArenaMade,
    ExecRank,
    ForgetRank,
    HolderListing,
    HolderRank,
    KeptArena,
    KillRank,
    MakeArena,
    QuitHolder,
    RankEnded,
    RankKey,
    RankStarted,
    RekeyRank,
    StartRefused,
    SweepDone,
    SweepLeftovers,
    ZygoteWarmed,
)
from holdfast.wire.holder_zygote_messages import ForkRank
from holdfast.wire.releases.staged_release import StagedRelease, staged_entry
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec

_log = logging.getLogger("holdfast.agent")
# Together less than recovery.stop_s, so that our answer comes before nobody waits for it any more.
_UNKILLABLE_S = 10.0
_SLOW_END_S = 5.0  # after SIGTERM: then a person who waits learns for whom, and for how long
_SWEPT_S = 8.0  # the holder takes less


class RankProcesses:
    def __init__(
        self,
        node: NodeSpec,
        node_dir: Path,
        sock: socket.socket,
        clock: AgentClock,
        *,
        on_rank_exit: Callable[[HolderRank], None],
        say: Callable[[str], None],  # to the person
        staged: Callable[[Release], StagedRelease],
    ) -> None:
        self.spec = node
        self.held: dict[RankKey, HolderRank] = {}
        self.warm, self.cold = asyncio.Event(), ""  # the latter: why there is no zygote, for the log
        self.slots = ProgressSlots(node.nproc)
        self.kept = 0  # ranks that went on in their processes at the newest launch, if no stop came since
        self._say = say
        self._staged = staged
        self._clock = clock
        self._key, self.lost_agent = "", ""  # the zygote's environment, as JSON; how the agent before this one ended
        self._holder = HolderConnection(sock)
        self._on_rank_exit = on_rank_exit
        self._started: dict[RankKey, asyncio.Future[str]] = {}  # asked for, not answered
        self._stopped = 0  # ranks of generations up to this one may not start any more
        self._spares_parked = False  # those that are parked are not ended
        self._changed = asyncio.Event()
        self._spares = SpareRanks(node.nproc, self._end_spare, say)
        self._errand: LaunchHere | None = None  # the newest
        self._moved = 0  # by how much ranks of this node have other numbers than in the generation before
        self.survivors = Survivors(node_dir / survivor_messages.SOCKET, self._changed.set)
        self._swept: asyncio.Future[tuple[int, ...]] | None = None
        self.arenas: tuple[KeptArena, ...] = ()  # of snapshots, from before this agent
        self.keeper_path = node_dir / "keeper.sock"
        self._made: dict[str, asyncio.Future[str]] = {}
        self._imports = node_dir / "imports.json"  # written by a rank at its first step
        self._mesh = node_dir / "mesh.json"  # parallel groups, if the script tells them
        self._preloading, self._recorders = ZygotePreload(node, self._imports, clock), RecorderSizes()

    # --- talking to the holder ---------------------------------------------------------------------------------

    async def listen(self, listed: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(self._holder.sock, holder_messages.PACKET_BYTES):
            match holder_messages.to_agent(packet):
                case HolderListing() as listing:
                    self._on_listing(listing)
                    listed.set()
                case RankStarted(key=text, pid=pid):
                    self._on_started(RankKey.parse_text(text), HolderRank(key=text, pid=pid))
                case StartRefused(key=text, error=error):
                    self._answer_start(RankKey.parse_text(text), error)
                case SweepDone(left=left):
                    if self._swept and not self._swept.done():
                        self._swept.set_result(left)
                case ZygoteWarmed(ok=ok, detail=detail, key=zygote, lost=lost, learned=learned) if zygote == self._key:
                    if lost and self.warm.is_set():
                        then = "another one is ready" if ok else "ranks now start as new processes, which takes longer"
                        self._say(f"the zygote {lost}; {then}")
                    self.cold = "" if ok else detail
                    if self.warm.is_set():
                        _log.info("zygote: %s", detail)
                    self.warm.set()
                    self._preloading.on_warm(learned)
                case ArenaMade(arena=arena):
                    made = self._made.pop(arena.name, None)
                    if made and not made.done():
                        made.set_result(arena.path)
                case RankEnded(rank=rank) if rank.rank_key.generation == SPARE:
                    self._spares.on_end(rank.rank_key.rank)
                    self._holder.send(ForgetRank(key=rank.key))
                case RankEnded(rank=rank):
                    self.held[rank.rank_key] = rank
                    self._changed.set()
                    self._on_rank_exit(rank)
                    self._fork_spare(rank)
        os._exit(1)  # without a holder there is nothing to be an agent of

    def _on_started(self, key: RankKey, rank: HolderRank) -> None:
        if key.generation != SPARE:
            self.held[key] = rank
        if SPARE < key.generation <= self._stopped or key not in self._started:  # told to stop while it was being born
            self._holder.send(KillRank(key=rank.key, signal=signal.SIGKILL))
        self._answer_start(key, "")

    def _on_listing(self, listing: HolderListing) -> None:
        self.held = {rank.rank_key: rank for rank in listing.ranks if rank.rank_key.generation != SPARE}
        for rank in listing.ranks:
            if rank.rank_key.generation == SPARE:  # of an agent that is gone
                self._end_spare(rank.rank_key)
        self.arenas, self.lost_agent = listing.arenas, listing.lost
        self.slots.open_memory(listing.arena)
        if listing.warm:
            self._key = listing.key
            self._preloading.adopt_modules(listing.modules)
            self.warm.set()
        elif self.spec.entry.zygote:
            self._holder.send(self._preloading.first_preload())
        else:
            self.cold = "this job uses no zygote"
            self.warm.set()

    def _answer_start(self, key: RankKey, error: str) -> None:
        future = self._started.pop(key, None)
        if future and not future.done():
            future.set_result(error)
        self._changed.set()

    async def make_arena(self, name: str, size_bytes: int) -> str:
        """Have the holder make an arena, which outlives agent and ranks; return its path."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._made[name] = future
        self._holder.send(MakeArena(name=name, bytes=size_bytes))
        return await future

    def quit_holder(self, code: int) -> None:
        self._holder.send(QuitHolder(code=code))

    # --- starting ----------------------------------------------------------------------------------------------

    async def launch_ranks(self, errand: LaunchHere) -> str:
        """Start or continue every rank of the seat; return an error in words, empty if all have started."""
        if errand.generation > 1:
            self._preloading.forgo_names()
        if errand.generation > 1 or self._preloading.is_crowded:
            self.learn_imports()  # nobody has yet, in this run: once for all is sooner than in each rank
        for key, rank in list(self.held.items()):
            if rank.code is not None and key.generation < errand.generation:
                del self.held[key]
                self._holder.send(ForgetRank(key=rank.key))
        try:
            await self._have_zygote(errand.release.env)
        except ValueError as e:
            return str(e)
        await self._preloading.wait_until_made(errand.seat.nproc)
        before, self._errand = self._errand, errand
        self._moved = errand.seat.first_rank - before.seat.first_rank if before else 0
        if not errand.keep or (before and before.world_size != errand.world_size):
            self._spares.drop_all()
        kept = tuple(self.parked) if errand.keep else ()
        await self.end_parked(tuple(key for key in kept if errand.seat.has_rank(key.rank + self._moved)))
        errors = await asyncio.gather(*(self._start_rank(errand, local) for local in range(errand.seat.nproc)))
        self._spares.on_launched()
        return "; ".join(e for e in errors if e)

    async def _have_zygote(self, env: dict[str, str]) -> None:
        """Make sure that the zygote has the release's environment; if not, request a new one and wait for it."""
        key = json.dumps(env, sort_keys=True) if env else ""
        if not self.spec.entry.zygote or key == self._key:
            return
        self._holder.send(self._preloading.preload_for(env, key))
        self._key, self.cold = key, ""
        self.warm.clear()
        await self.warm.wait()

    async def _start_rank(self, errand: LaunchHere, local: int) -> str:
        rank = errand.seat.first_rank + local
        where = last_words.rank_folder(self.spec.log_dir, errand.generation, rank)
        key = RankKey(errand.generation, rank)
        if key in self.held:
            return ""  # an earlier agent got this far with the same errand
        try:
            last_words.make_rank_folder(where)
        except OSError as e:
            return f"rank {rank}: cannot make its log folder {where}: {e.strerror}"
        self._recorders.learn_and_clear(local, self.slots)
        env = self.environment_for(errand, local)
        env["TORCHELASTIC_ERROR_FILE"] = str(where / "error.json")
        if local == 0:
            env["HOLDFAST_IMPORTS"] = str(self._imports)
            self._mesh.unlink(missing_ok=True)
            env["HOLDFAST_MESH"] = str(self._mesh)
        if errand.keep:
            if await self._rejoin_rank(key, env):
                return rank_exchange_files.note_pid(where, rank, self.held[key].pid)
            env[progress_environment.REHEARSAL] = "1"
        start = self._make_start(errand, key, where, env)
        if start.entry.zygote and not self.cold and not await self._request_start(key, start.fork()):
            return rank_exchange_files.note_pid(where, rank, self.held[key].pid)
        error = await self._request_start(key, start.execute())
        return f"rank {rank}: {error}" if error else rank_exchange_files.note_pid(where, rank, self.held[key].pid)

    def _make_start(self, errand: LaunchHere, key: RankKey, where: Path, env: dict[str, str]) -> RankStart:
        return RankStart(
            key=key,
            local=key.rank - errand.seat.first_rank,
            entry=self.entry_for(errand.release),
            staged=self._staged(errand.release),
            env=env,
            where=where,
            stdin=self.spec.stdin if key.rank == 0 else "",
        )

    def _fork_spare(self, dead: HolderRank) -> None:
        """Fork a spare rank to replace a dead rank whose script can survive, unless the ranks have been stopped."""
        key, errand = dead.rank_key, self._errand
        if errand is None or not dead.code or key.generation != errand.generation or key.rank in self._spares:
            return
        if not self.survivors.has_announced(key) or (key.generation <= self._stopped and not self._spares_parked):
            return
        self._begin_spare(errand, key.rank, progress_environment.SEATLESS)

    def keep_spares(self, trains: bool) -> None:
        """Start a spare rank for a rank without one, if the settings say so and all ranks train and can survive."""
        errand = self._errand
        if not (self.spec.settings.recovery.spares and trains and errand) or errand.generation <= self._stopped:
            return
        if all(self.survivors.is_there(RankKey(errand.generation, rank)) for rank in errand.seat.ranks):
            rank = self._spares.next_standing(errand.seat.ranks, self.survivors.is_parked)
            if rank is not None:
                self._begin_spare(errand, rank, progress_environment.STANDING)

    def _begin_spare(self, errand: LaunchHere, rank: int, how: str) -> None:
        where = last_words.rank_folder(self.spec.log_dir, errand.generation + 1, rank)
        local = rank - errand.seat.first_rank
        env = self.environment_for(errand, local) | self._spares.environment(local, how)
        env["TORCHELASTIC_ERROR_FILE"] = str(where / "error.json")
        start = self._make_start(errand, spare_key(rank), where, env)
        if start.entry.zygote and not self.cold:
            last_words.make_rank_folder(where)
            self._spares.start(rank, self._request_start(start.key, start.fork()), how)

    def _end_spare(self, key: RankKey) -> None:
        self._holder.send(KillRank(key=str(key), signal=signal.SIGKILL))
        self._answer_start(key, "it is not needed any more")

    async def _request_start(self, key: RankKey, message: ExecRank | ForkRank | RekeyRank) -> str:
        if SPARE < key.generation <= self._stopped:
            return "the rank was stopped before it had started"
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started[key] = future
        try:
            self._holder.send(message)
        except ValueError as e:
            del self._started[key]
            return str(e)
        return await future

    def read_notes(self) -> dict[str, Any]:
        return rank_exchange_files.read_notes(self._mesh)

    def read_loss_source(self) -> str:
        return rank_exchange_files.read_loss_source(self.keeper_path.parent)

    def write_figures(self, figures: JobFigures) -> None:
        rank_exchange_files.write_figures(self.keeper_path.parent, figures)

    def entry_for(self, release: Release) -> EntryPoint:
        """Return the entry point that ranks of a release run."""
        return staged_entry(self.spec.entry, release, self._staged(release))

    def environment_for(self, errand: LaunchHere, local: int) -> dict[str, str]:
        """Return the whole environment of a rank."""
        given = release_environment(self.spec, errand.release, self._staged(errand.release))
        sized = given | self._recorders.variables(local, given, errand.mesh)
        return sized | rank_variables(self.spec, errand, local, self.slots.path, self.keeper_path)

    def learn_imports(self, trains: bool = True) -> None:
        """Ask the holder for a new zygote if the present zygote lacks modules that the next generation will import."""
        if self.cold or not self.warm.is_set():
            return
        if preload := self._preloading.better_preload(bool(self.held), trains, self._key):
            try:
                self._holder.send(preload)
            except ValueError:  # too many to tell: the zygote stays as it is
                self._preloading.on_warm(self._preloading.proven)

    def hear_imports(self, modules: tuple[str, ...]) -> None:
        """Note modules that the script imported on other nodes, to be preloaded while no rank runs here."""
        self._preloading.on_told(modules)

    @property
    def proven_imports(self) -> tuple[str, ...]:
        """Return the script's modules that the zygote has preloaded, once a rank is known to start well with them."""
        return self._preloading.proven

    # --- watching and ending -----------------------------------------------------------------------------------

    def running_ranks(self, up_to: int | None = None) -> list[HolderRank]:
        """Return the ranks that have not ended; with `up_to`, only those of generations up to that number."""
        alive = [r for r in self.held.values() if r.code is None]
        return [r for r in alive if up_to is None or (r.rank_key.generation <= up_to and not self._is_spared(r))]

    def _is_spared(self, rank: HolderRank) -> bool:
        return self._spares_parked and self.survivors.is_parked(rank.rank_key)

    @property
    def parked(self) -> frozenset[RankKey]:
        """Return the ranks that have left their generation and wait for the next one."""
        return frozenset(key for key, rank in self.held.items() if rank.code is None and self.survivors.is_parked(key))

    async def _park_ranks(self, up_to: int, parking: Parking) -> None:
        """Tell ranks to leave their generation. Wait for those that can park."""
        self.survivors.part_ranks(up_to, parking.hand_over)
        until, hung = self._clock.monotonic() + parking.within_s, parking.standing
        while any(self._may_park(one) for one in self.running_ranks(up_to) if one.rank_key.rank not in hung):
            if not await self._wait_changed(until):
                return

    def _may_park(self, rank: HolderRank) -> bool:
        return self.survivors.is_there(rank.rank_key) and own_process_settings.process_state(rank.pid) not in ("T", "t")

    async def _rejoin_rank(self, key: RankKey, env: dict[str, str]) -> bool:
        """Have a parked or spare rank go on as the rank `key`; return False if there is none or its start fails."""
        was, generation = key.rank - self._moved, key.generation
        old = next((one for one in self.parked if one.rank == was and one.generation < generation), None)
        if old is None and await self._spares.take(key.rank):
            if await self._request_start(key, RekeyRank(key=str(key), old=str(spare_key(key.rank)))):
                return False
            self.survivors.seat_spare(spare_key(key.rank), env)
            return True
        if old is None or await self._request_start(key, RekeyRank(key=str(key), old=str(old))):
            return False
        del self.held[old]
        self.kept += 1
        if not self.survivors.rejoin(old, env):
            self._holder.send(KillRank(key=str(key), signal=signal.SIGKILL))  # as a rank that fails at its start
        return True

    async def end_parked(self, but: tuple[RankKey, ...] | None = None) -> None:
        """End the parked ranks, except those in `but`. Without `but`, also end the spare ranks."""
        if but is None:
            self._spares.drop_all()
        ending = self.parked.difference(but or ())
        for key in ending:
            self._holder.send(KillRank(key=str(key), signal=signal.SIGKILL))
        until = self._clock.monotonic() + _UNKILLABLE_S
        while any(self.held[key].code is None for key in ending) and await self._wait_changed(until):
            pass

    async def stop_ranks(self, up_to: int, grace_s: float, parking: Parking | None = None) -> str:
        """End ranks up to a generation by SIGTERM, then by SIGKILL; spare those that park. Return as in the port."""
        self._stopped = max(self._stopped, up_to)
        self._spares_parked, self.kept = parking is not None, 0
        if parking:
            await self._park_ranks(up_to, parking)
        else:
            self._spares.drop_all()
        grace_until = self._clock.monotonic() + grace_s
        for rank in self.running_ranks(up_to):
            stopped = own_process_settings.process_state(rank.pid) in ("T", "t")
            by = signal.SIGKILL if stopped or grace_s <= 0 else signal.SIGTERM
            self._holder.send(KillRank(key=rank.key, signal=by))
        if grace_s > 2 * _SLOW_END_S:
            await self._wait_ended(up_to, grace_until - grace_s + _SLOW_END_S)
            self._say_unended(up_to, grace_until)
        await self._wait_ended(up_to, grace_until)
        for rank in self.running_ranks(up_to):
            self._holder.send(KillRank(key=rank.key, signal=signal.SIGKILL))
        await self._wait_ended(up_to, self._clock.monotonic() + _UNKILLABLE_S)
        undead = [f"rank {r.rank_key.rank} (pid {r.pid}) outlives SIGKILL" for r in self.running_ranks(up_to)]
        undead += [f"rank {key.rank} is still starting" for key in self._starting_keys(up_to)]
        return "; ".join([*undead, *await self._sweep_orphans()])

    def _say_unended(self, up_to: int, grace_until: float) -> None:
        left_s = grace_until - self._clock.monotonic()
        if ranks := [rank.rank_key.rank for rank in self.running_ranks(up_to)]:
            not_ended, doomed = ("has not ended", "it is") if len(ranks) == 1 else ("have not ended", "they are")
            self._say(f"{format_ranks(ranks)} {not_ended} on SIGTERM; {doomed} killed in {left_s:.0f} s")

    def _starting_keys(self, up_to: int) -> list[RankKey]:
        return [key for key in self._started if SPARE < key.generation <= up_to]

    async def _sweep_orphans(self) -> list[str]:
        """Have the holder kill processes left behind by ranks, such as data loaders; return in words which remain."""
        if self._swept is None or self._swept.done():
            self._swept = asyncio.get_running_loop().create_future()
            self._holder.send(SweepLeftovers())
        try:
            async with asyncio.timeout(_SWEPT_S):
                left = await asyncio.shield(self._swept)
        except TimeoutError:
            return ["the holder does not answer"]
        return [f"pid {pid}, left behind by a rank, outlives SIGKILL" for pid in left]

    async def _wait_ended(self, up_to: int, until: float) -> None:
        while self.running_ranks(up_to) or self._starting_keys(up_to):
            if not await self._wait_changed(until):
                return

    async def _wait_changed(self, until: float) -> bool:
        """Wait until a rank's state changes or `until` comes; return False, without a wait, if `until` is past."""
        if (left_s := until - self._clock.monotonic()) <= 0:
            return False
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._changed.wait()
        return True
