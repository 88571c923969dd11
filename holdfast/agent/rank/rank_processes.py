"""The ranks of one node: starts them through the holder, watches them, and makes sure that they end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.rank import last_words
from holdfast.agent.rank.progress_slots import ProgressSlots
from holdfast.agent.rank.rank_environment import rank_variables
from holdfast.agent.rank.survivors import Survivors
from holdfast.agent.rank.zygote_preload import ZygotePreload
from holdfast.core.decoding import from_json
from holdfast.core.rank_ranges import format_ranks
from holdfast.linux import process_attributes
from holdfast.model.errand import LaunchHere
from holdfast.model.job_and_seats import Dims
from holdfast.model.release import Release
from holdfast.wire import (
    holder_messages,
    progress_environment,
    replay_environment,
    run_and_node_specs,
    survivor_messages,
)
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
from holdfast.wire.inherited_environment import make_rank_environment
from holdfast.wire.releases.staged_release import StagedRelease, skip_variables, staged_entry, staged_environment
from holdfast.wire.run_and_node_specs import CACHE_VARIABLE, EntryPoint, NodeSpec

_log = logging.getLogger("holdfast.agent")
# Together less than recovery.stop_s, so that our answer comes before nobody waits for it any more.
_UNKILLABLE_S = 10.0
_SLOW_END_S = 5.0  # after SIGTERM: then a person who waits learns for whom, and for how long
_SOURCE_BYTES = 200  # of the file in which a rank says where its losses are read from
_SWEPT_S = 8.0  # the holder takes less
_EXECUTED = str(Path(__file__).parents[2] / "client" / "boot" / "executed_rank.py")


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
        self.warm = asyncio.Event()
        self.cold = ""  # why there is no zygote, for the log
        self.slots = ProgressSlots(node.nproc)
        self.kept = 0  # ranks that went on in their processes at the newest launch, if no stop came since
        self._say = say
        self._staged = staged
        self._clock = clock
        self._key = ""  # of the zygote: the environment of its release, as JSON
        self._sock = sock
        self._sock.setblocking(False)
        self._on_rank_exit = on_rank_exit
        self._started: dict[RankKey, asyncio.Future[str]] = {}  # asked for, not answered
        self._stopped = 0  # ranks of generations up to this one may not start any more
        self._spares_parked = False  # those that are parked are not ended
        self._changed = asyncio.Event()
        self.survivors = Survivors(node_dir / survivor_messages.SOCKET, self._changed.set)
        self._swept: asyncio.Future[tuple[int, ...]] | None = None
        self.arenas: tuple[KeptArena, ...] = ()  # of snapshots, from before this agent
        self.keeper_path = node_dir / "keeper.sock"
        self._made: dict[str, asyncio.Future[str]] = {}
        self._imports = node_dir / "imports.json"  # written by a rank at its first step
        self._mesh = node_dir / "mesh.json"  # parallel groups, if the script tells them
        self._preloading = ZygotePreload(node, self._imports, clock)

    # --- talking to the holder ---------------------------------------------------------------------------------

    async def listen(self, listed: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(self._sock, holder_messages.PACKET_BYTES):
            match holder_messages.to_agent(packet):
                case HolderListing() as listing:
                    self._on_listing(listing)
                    listed.set()
                case RankStarted(key=text, pid=pid):
                    key = RankKey.parse_text(text)
                    self.held[key] = HolderRank(key=text, pid=pid)
                    if key.generation <= self._stopped:  # told to stop while it was being born
                        self._send_holder(KillRank(key=text, signal=signal.SIGKILL))
                    self._answer_start(key, "")
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
                case RankEnded(rank=rank):
                    self.held[rank.rank_key] = rank
                    self._changed.set()
                    self._on_rank_exit(rank)
        os._exit(1)  # without a holder there is nothing to be an agent of

    def _on_listing(self, listing: HolderListing) -> None:
        self.held = {rank.rank_key: rank for rank in listing.ranks}
        self.arenas = listing.arenas
        self.slots.open_memory(listing.arena)
        if listing.warm:
            self._key = listing.key
            self._preloading.adopt_modules(listing.modules)
            self.warm.set()
        elif self.spec.entry.zygote:
            self._send_holder(self._preloading.first_preload())
        else:
            self.cold = "this job uses no zygote"
            self.warm.set()

    def _answer_start(self, key: RankKey, error: str) -> None:
        future = self._started.pop(key, None)
        if future and not future.done():
            future.set_result(error)
        self._changed.set()

    def _send_holder(self, message: holder_messages.ToHolder) -> None:
        packet = holder_messages.encode(message)
        if len(packet) > holder_messages.PACKET_BYTES:
            raise ValueError(
                f"arguments and environment take {len(packet)} bytes, and the limit is {holder_messages.PACKET_BYTES}"
            )
        with contextlib.suppress(BlockingIOError):
            self._sock.send(packet)
            return
        self._sock.setblocking(True)  # the holder is busy for a moment; it never waits for us
        self._sock.send(packet)
        self._sock.setblocking(False)

    async def make_arena(self, name: str, size_bytes: int) -> str:
        """Have the holder make an arena, which outlives agent and ranks; return its path."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._made[name] = future
        self._send_holder(MakeArena(name=name, bytes=size_bytes))
        return await future

    def quit_holder(self, code: int) -> None:
        self._send_holder(QuitHolder(code=code))

    # --- starting ----------------------------------------------------------------------------------------------

    async def launch_ranks(self, errand: LaunchHere) -> str:
        """Start or continue every rank of the seat; return an error in words, empty if all have started."""
        if errand.generation > 1:
            self.learn_imports()  # a fault so early that nobody has yet: once for all is sooner than in each rank
        for key, rank in list(self.held.items()):
            if rank.code is not None and key.generation < errand.generation:
                del self.held[key]
                self._send_holder(ForgetRank(key=rank.key))
        try:
            await self._have_zygote(errand.release.env)
        except ValueError as e:
            return str(e)
        await self._preloading.wait_until_made(errand.seat.nproc)
        kept = tuple(self.parked) if errand.keep else ()
        await self.end_parked(tuple(key for key in kept if errand.seat.has_rank(key.rank)))
        errors = await asyncio.gather(*(self._start_rank(errand, local) for local in range(errand.seat.nproc)))
        return "; ".join(e for e in errors if e)

    async def _have_zygote(self, env: dict[str, str]) -> None:
        """Make sure that the zygote has the release's environment; if not, request a new one and wait for it."""
        key = json.dumps(env, sort_keys=True) if env else ""
        if not self.spec.entry.zygote or key == self._key:
            return
        self._send_holder(self._preloading.preload_for(env, key))
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
            where.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            return f"rank {rank}: cannot make its log folder {where}: {e.strerror}"
        self.slots.clear_rank(local)
        env = self.environment_for(errand, local)
        env["TORCHELASTIC_ERROR_FILE"] = str(where / "error.json")
        if local == 0:
            env["HOLDFAST_IMPORTS"] = str(self._imports)
            self._mesh.unlink(missing_ok=True)
            env["HOLDFAST_MESH"] = str(self._mesh)
        if errand.keep:
            if await self._rejoin_rank(key, env):
                return self._note_pid(where, rank, key)
            env[progress_environment.REHEARSAL] = "1"
        staged, entry = self._staged(errand.release), self.entry_for(errand.release)
        argv = tuple(a.replace("${local_rank}", str(local)) for a in entry.argv)
        out, err = str(where / "stdout.log"), str(where / "stderr.log")
        reads = self.spec.stdin if rank == 0 else ""
        if entry.zygote and not self.cold:
            fork = ForkRank(
                key=str(key),
                argv=argv,
                module=entry.module,
                env=env,
                cwd=entry.cwd,
                stdout=out,
                stderr=err,
                stdin=reads,
                path=staged.staged_path(entry.cwd) if entry.module else "",
                root=staged.root,
                staged=staged.at,
            )
            if not await self._request_start(key, fork):
                return self._note_pid(where, rank, key)
        program = (*_interpreter(entry, staged), *argv)
        files = {"stdin": reads, "stdout": out, "stderr": err}
        error = await self._request_start(key, ExecRank(key=str(key), argv=program, env=env, cwd=entry.cwd, **files))
        return f"rank {rank}: {error}" if error else self._note_pid(where, rank, key)

    def _note_pid(self, where: Path, rank: int, key: RankKey) -> str:
        """Write the rank's pid to its log folder, for people's own tools; return an error or an empty text."""
        try:
            run_and_node_specs.publish_file(where / "pid", f"{self.held[key].pid}\n".encode())
        except OSError as e:
            return f"rank {rank}: cannot write to its log folder {where}: {e.strerror}"
        return ""

    async def _request_start(self, key: RankKey, message: ExecRank | ForkRank | RekeyRank) -> str:
        if key.generation <= self._stopped:
            return "the rank was stopped before it had started"
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started[key] = future
        try:
            self._send_holder(message)
        except ValueError as e:
            del self._started[key]
            return str(e)
        return await future

    def read_mesh(self) -> Dims:
        """Return the parallel groups that a rank here has reported; empty if the file is missing or damaged."""
        try:
            return from_json(self._mesh.read_bytes(), Dims)
        except (OSError, msgspec.DecodeError):
            return ()

    def read_replayable(self) -> str:
        """Return "seeded" or "unseeded", as the script declared for replays; empty if it declared nothing."""
        try:
            note = from_json((self.keeper_path.parent / replay_environment.NOTE).read_bytes(), dict[str, object])
        except (OSError, msgspec.DecodeError):
            return ""
        return "seeded" if note.get("seeded") else "unseeded"

    def read_loss_source(self) -> str:
        """Return where a rank's losses are read from; empty if nowhere, or if the script reports them itself."""
        try:
            source = (self.keeper_path.parent / progress_environment.LOSS_SOURCE).read_bytes()
        except OSError:
            return ""
        return source[:_SOURCE_BYTES].decode("utf-8", "replace")

    def entry_for(self, release: Release) -> EntryPoint:
        """Return the entry point that ranks of a release run."""
        return staged_entry(self.spec.entry, release, self._staged(release))

    def environment_for(self, errand: LaunchHere, local: int) -> dict[str, str]:
        """Return the whole environment of a rank."""
        staged = self._staged(errand.release)
        given = make_rank_environment(os.environ)
        if self.spec.compiled and not given.get(CACHE_VARIABLE):
            given[CACHE_VARIABLE] = self.spec.compiled
        own = staged_environment(given, self.spec.entry, errand.release, staged)
        ours = rank_variables(self.spec, errand, local, self.slots.path, self.keeper_path)
        return own | ours | skip_variables(errand.skips, errand.eases)

    def learn_imports(self, trains: bool = True) -> None:
        """Ask the holder for a new zygote if the present one lacks modules that the next generation will import."""
        if self.cold or not self.warm.is_set():
            return
        if preload := self._preloading.better_preload(bool(self.held), trains, self._key):
            try:
                self._send_holder(preload)
            except ValueError:  # too many to tell: the zygote stays as it is
                self._preloading.on_warm(self._preloading.proven)

    def hear_imports(self, modules: tuple[str, ...]) -> None:
        """Note the script's imports on another node; the zygote preloads them while this node has no ranks."""
        self._preloading.on_told(modules)

    @property
    def proven_imports(self) -> tuple[str, ...]:
        """The modules learned from the script that the zygote has preloaded and that a fork is known to work with."""
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
        """Ranks that have left their generation and wait for the next one."""
        return frozenset(key for key, rank in self.held.items() if rank.code is None and self.survivors.is_parked(key))

    async def _park_ranks(self, up_to: int, until: float) -> None:
        """Tell ranks to leave their generation; wait for those that can park."""
        self.survivors.part_ranks(up_to)
        while any(self._may_park(rank) for rank in self.running_ranks(up_to)):
            if not await self._wait_changed(until):
                return

    def _may_park(self, rank: HolderRank) -> bool:
        return self.survivors.is_there(rank.rank_key) and process_attributes.process_state(rank.pid) not in ("T", "t")

    async def _rejoin_rank(self, key: RankKey, env: dict[str, str]) -> bool:
        """Let the parked rank of this number go on in the new generation; return False if there is none."""
        old = next((one for one in self.parked if one.rank == key.rank and one.generation < key.generation), None)
        if old is None or await self._request_start(key, RekeyRank(key=str(key), old=str(old))):
            return False
        del self.held[old]
        self.kept += 1
        if not self.survivors.rejoin(old, env):
            self._send_holder(KillRank(key=str(key), signal=signal.SIGKILL))  # as a rank that fails at its start
        return True

    async def end_parked(self, but: tuple[RankKey, ...] = ()) -> None:
        """Kill all parked ranks except those in `but`."""
        ending = self.parked.difference(but)
        for key in ending:
            self._send_holder(KillRank(key=str(key), signal=signal.SIGKILL))
        until = self._clock.monotonic() + _UNKILLABLE_S
        while any(self.held[key].code is None for key in ending) and await self._wait_changed(until):
            pass

    async def stop_ranks(self, up_to: int, grace_s: float, park_s: float = 0.0) -> str:
        """Give ranks that can park `park_s` to do so. End the others by SIGTERM and, after the grace, SIGKILL; kill
        stopped ones at once. Return in words which processes still live."""
        self._stopped = max(self._stopped, up_to)
        self._spares_parked, self.kept = park_s > 0, 0
        if park_s > 0:
            await self._park_ranks(up_to, self._clock.monotonic() + park_s)
        grace_until = self._clock.monotonic() + grace_s
        for rank in self.running_ranks(up_to):
            stopped = process_attributes.process_state(rank.pid) in ("T", "t")
            self._send_holder(
                KillRank(key=rank.key, signal=signal.SIGKILL if stopped or grace_s <= 0 else signal.SIGTERM)
            )
        if grace_s > 2 * _SLOW_END_S:
            await self._wait_ended(up_to, grace_until - grace_s + _SLOW_END_S)
            self._say_unended(up_to, grace_until)
        await self._wait_ended(up_to, grace_until)
        for rank in self.running_ranks(up_to):
            self._send_holder(KillRank(key=rank.key, signal=signal.SIGKILL))
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
        return [key for key in self._started if key.generation <= up_to]

    async def _sweep_orphans(self) -> list[str]:
        """Have the holder kill processes left behind by ranks, such as data loaders; return in words which remain."""
        if self._swept is None or self._swept.done():
            self._swept = asyncio.get_running_loop().create_future()
            self._send_holder(SweepLeftovers())
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
        """Wait until a rank's state changes or `until` passes; return False if it has already passed."""
        if (left_s := until - self._clock.monotonic()) <= 0:
            return False
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._changed.wait()
        return True


def _interpreter(entry: EntryPoint, staged: StagedRelease) -> tuple[str, ...]:
    """Return the command before a rank's arguments. Our own Python also runs our start code, which another may lack."""
    if entry.python != sys.executable:
        return entry.interpreter_argv()
    return (entry.python, "-u", _EXECUTED, staged.staged_path(entry.cwd) if entry.module else "script")
