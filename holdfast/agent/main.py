"""The agent: dials the controller, carries out its errands on this node, reports what becomes of the ranks."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

from holdfast.agent import judge, memory, remembering, words
from holdfast.agent.asking import Asking
from holdfast.agent.beating import beat_of, returned
from holdfast.agent.dialing import Dialing
from holdfast.agent.keeper import Keeper
from holdfast.agent.latching import Latches
from holdfast.agent.losses import Losses
from holdfast.agent.monitor import Monitor, Ties
from holdfast.agent.placing import place_of
from holdfast.agent.ranks import Ranks, generation_of
from holdfast.agent.rotating import Rotating
from holdfast.agent.staging import Staging
from holdfast.agent.steady import Steady
from holdfast.agent.tracer import Asked, Tracer, fitted
from holdfast.agent.trying import Trying
from holdfast.core.node import (
    OWN,
    Acked,
    Carried,
    Carry,
    Clock,
    Deed,
    Exited,
    Heed,
    Intend,
    Judge,
    Judged,
    Linked,
    NodeLife,
    Noticed,
    Remember,
    Send,
    Spoilt,
    Told,
    Unlinked,
)
from holdfast.linux import python_fork
from holdfast.model.alarm import Alarm
from holdfast.model.errand import Errand, LaunchHere, Leave, MeetHere, PlayHere, ProbeHere, StageHere, StopHere
from holdfast.model.release import Release
from holdfast.model.signal import Beat, Exit, Loss, Mark
from holdfast.wire import messages, slot, spec
from holdfast.wire.holding import Held
from holdfast.wire.messages import Ack, Hello, Hold, Look, Looked, Marked, Notice, Tell, Welcome

POLL_S = 0.1  # how often the slots are read until every rank has made its first step
_STEADY_S = 0.25  # and then: waking up is most of what an agent costs
_OUTBOX = 256
_REDIAL_S = 0.05  # after a link that broke; then longer and longer
_AGAIN_S = 5.0  # a release that could not be had is tried again
_ENVELOPE = 1 << 10  # of a message around a trace
_log = logging.getLogger("holdfast.agent")


class Agent:
    def __init__(self, node_dir: Path, sock: socket.socket, judge: Callable[[Exit, Path], Awaitable[Alarm]]) -> None:
        self.node_dir, self.judge = node_dir, judge
        self.spec = spec.read(node_dir / "spec.json", spec.NodeSpec)
        self.ranks = Ranks(self.spec, node_dir, sock, self._over)
        budget = memory.Budget(lambda: memory.room(node_dir, self.spec))
        self.keeper = Keeper(place_of(self.spec, self.ranks.keeper_path), self.ranks.make_arena, budget)
        self.dialing = Dialing(self.spec)
        self.staging = Staging(self.spec, node_dir, self.dialing)
        self.ranks.staged, self.keeper.told, self.keeper.hashing.told = self.staging.place, self._beat, self._marked
        self.ranks.say = self.staging.say = self.keeper.say = self._notice
        self.losses = Losses(self.spec.node, self.spec.settings.loss)
        self.tracer = Tracer(self.spec.node, self.spec.nproc)
        self.trying = Trying(self.spec, node_dir, self.ranks.environment)
        self.trying.entry = self.ranks.entry
        self.life = NodeLife(self.spec.node, self.spec.settings.node, remembering.parted(node_dir))
        self.life.on_bad_loss = self.spec.settings.loss.stance
        self.clock = Steady()
        ties = Ties(self._noticed, lambda: [*self.ranks.held.values()], self.clock.wall_s)
        self.monitor = Monitor(node_dir, self.spec, ties)
        self.beat_s = self.spec.settings.silence.beat_s
        self._undated: list[Held] = []  # ended before we knew the controller's time
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_OUTBOX)
        self._tasks: asyncio.TaskGroup
        self._beat_at, self._first_said = 0.0, 0  # the latter: generation whose first step was reported
        self._latches = Latches()
        self._staged = False  # what the controller has said that ranks may run here
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.ranks.listen(listed))
            await listed.wait()
            self._recall()
            self.keeper.recall(self.ranks.arenas)
            own = (self._poll, self.monitor.run, self.staging.watch, self._say_when_warm)
            for deed in (self.keeper.serve, self.keeper.watch, self.keeper.check, self.keeper.hashing.run, *own):
                self._tasks.create_task(deed())
            self._tasks.create_task(Rotating(self.spec).run(self.ranks.running))
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._asked_to_leave)
            await self._link()

    # --- state that outlives an agent --------------------------------------------------------------------------

    def _recall(self) -> None:
        done = remembering.recall(self.node_dir / "done.jsonl")
        keys = [tuple(int(part) for part in key.split(":")) for key in self.ranks.held]
        newest = max((generation for generation, _ in keys), default=0)
        ranks = tuple(rank for generation, rank in keys if generation == newest)
        stopped, leave = remembering.stopped(self.node_dir), remembering.intended(self.node_dir)
        self._do(self.life.recall(done, newest, ranks, stopped, leave, epoch=remembering.heeded(self.node_dir)))
        for held in self.ranks.held.values():
            if held.code is not None:
                self._over(held)

    def _do(self, deeds: tuple[Deed, ...]) -> None:
        for deed in deeds:
            match deed:
                case Send(post):
                    self._put(messages.encode(post))
                case Heed() | Remember() | Intend():
                    remembering.keep(self.node_dir, deed)
                case Carry(errand):
                    self._tasks.create_task(self._carry(errand))
                case Judge(exit):
                    self._tasks.create_task(self._judge(exit))

    def _put(self, packet: bytes) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # posts stay in the machine's outbox until acknowledged
            self._outbox.put_nowait(packet)

    # --- the link ----------------------------------------------------------------------------------------------

    async def _link(self) -> None:
        wait_s = _REDIAL_S
        while True:
            wait_s = _REDIAL_S if await self._dial() else min(2 * wait_s, 1.0)
            self._do(self.life.step(time.monotonic(), Unlinked()))
            remembering.parted(self.node_dir)
            await asyncio.sleep(wait_s)

    async def _dial(self) -> bool:
        """One link, from its beginning to its end; whether there was any."""
        linked = False
        try:
            async with self.dialing.link() as ws:
                linked = True
                await self._converse(ws)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as e:
            _log.info("no link to the controller: %s", e)
        return linked

    async def _converse(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
        await ws.send_bytes(self._hello())
        sender = self._tasks.create_task(self._send_all(ws))
        try:
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._heard(messages.decode_from_controller(message.data))
        finally:
            sender.cancel()

    async def _send_all(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while True:
                await ws.send_bytes(await self._outbox.get())

    def _heard(self, message: messages.FromController) -> None:
        now = time.monotonic()
        match message:
            case Welcome(at=at, beat_s=beat_s, releases=releases, revoked=revoked, epoch=epoch):
                self.keeper.revoked = frozenset(revoked)
                self.beat_s = beat_s
                self.clock.welcomed(at)
                if not self._staged:
                    self._tasks.create_task(self._stage(releases))
                self._do(self.life.step(now, Linked(epoch)))
                remembering.met(self.node_dir)
                self._beat()
                undated, self._undated = self._undated, []
                for held in undated:
                    self._over(held)
            case Ack(seq=seq):
                self._do(self.life.step(now, Acked(seq)))
            case Tell(errand=errand, epoch=epoch):
                if isinstance(errand, StopHere):
                    self._look_at_losses()  # whose went wrong first is to be heard before it is judged
                self._do(self.life.step(now, Told(errand, epoch)))
            case Hold(aim=aim, revoked=revoked):
                self.keeper.revoked = frozenset(revoked)
                self._tasks.create_task(self.keeper.aimed(aim))
            case Look():
                self._tasks.create_task(self._look(message))

    async def _look(self, look: Look) -> None:
        """In a thread, for it takes a while; of several at once the last ones wait for the first."""
        held = self.ranks.held.values()  # but for those that have ended well: nobody waits for them
        newest = tuple(r for r in held if generation_of(r.key) == self.life.generation and r.code != 0)
        asked = Asked(ranks=newest, deadline_s=look.deadline_s, native=look.native, offset_s=self.clock.wall_s())
        async with self._looking:
            trace = await asyncio.to_thread(self.tracer.take, asked, self.ranks.arena)
        self._put(messages.encode(Looked(id=look.id, trace=fitted(trace, messages.MAX_BYTES - _ENVELOPE))))

    def _hello(self) -> bytes:
        running = max((generation_of(r.key) for r in self.ranks.running()), default=0)
        hello = Hello(
            node=self.spec.node,
            host=socket.gethostname(),
            nproc=self.spec.nproc,
            order=self.spec.order,
            generation=self.life.occupied(running),
            ready=self._staged and self.ranks.warm.is_set() and not self.life.leaving,
            copies=self.keeper.copies(),
            keeper=self.keeper.address,
            epoch=self.life.epoch,
        )
        return messages.encode(hello)

    def _notice(self, text: str) -> None:
        _log.warning("%s", text)
        self._put(messages.encode(Notice(node=self.spec.node, text=text)))

    async def _say_when_warm(self) -> None:
        await self.ranks.warm.wait()
        if self.ranks.cold:
            _log.warning("ranks are started afresh, not forked: %s", self.ranks.cold)
        self._put(self._hello())

    async def _stage(self, releases: tuple[Release, ...]) -> None:
        """A node is not ready before it has the code that it may have to run."""
        told = ""
        while error := await self.staging.all(releases):
            if error != told:
                self._notice(error)
            told = error
            await asyncio.sleep(_AGAIN_S)
        self._staged = True
        self._put(self._hello())

    def _asked_to_leave(self) -> None:
        """By somebody on this host, who does not want to wait for the controller's word."""
        grace_s = self.spec.settings.recovery.shutdown_grace_s
        leave = Leave(id=OWN, code=128 + signal.SIGINT, grace_s=grace_s, reason="asked to, on this host")
        self._do(self.life.step(time.monotonic(), Told(leave)))

    # --- errands -----------------------------------------------------------------------------------------------

    async def _carry(self, errand: Errand) -> None:
        if isinstance(errand, ProbeHere | MeetHere | PlayHere):
            error, tried = await self.trying.carry(errand)
            carried = Carried(errand, not error, error, findings=tried.findings, played=tried.played)
            self._do(self.life.step(time.monotonic(), carried))
            return
        if isinstance(errand, StageHere):  # beside whatever else goes on
            error, refused = await self.staging.carry(errand)
            self._do(self.life.step(time.monotonic(), Carried(errand, not error, error, refused=refused)))
            return
        await self.trying.stop()
        if isinstance(errand, LaunchHere):
            self.losses.eases = errand.eases
            first = errand.seat.first_rank == 0
            error = self.keeper.launched(errand) or await self.staging.launched(errand.release, first=first)
            error = error or await self.ranks.launch(errand)
        else:
            generation = errand.generation if isinstance(errand, StopHere) else self.life.generation
            remembering.stop(self.node_dir, generation)
            self._beat()  # the last steps, before the ranks are gone
            self.life.returned = returned(self._readings().values(), generation)
            error = await self.ranks.stop(generation, errand.grace_s)
            await self.staging.gather()
        if isinstance(errand, Leave):
            await self.keeper.parting.write(errand.last, errand.last_s)
        copies = self.keeper.copies() if isinstance(errand, StopHere) else ()
        self._do(self.life.step(time.monotonic(), Carried(errand, not error, error, copies, stored=self.keeper.stored)))
        if isinstance(errand, Leave):
            _log.info("leaving with code %d: %s", errand.code, errand.reason)
            remembering.leave(self.node_dir, errand)
            await asyncio.sleep(0.2)  # for the answer to go out
            self.ranks.quit(errand.code)

    # --- ranks -------------------------------------------------------------------------------------------------

    def _over(self, held: Held) -> None:
        if not self.clock.known:
            self._undated.append(held)
            return
        generation, rank = (int(part) for part in held.key.split(":"))
        code = held.code if held.code is not None else 1
        if code and generation > self.life.stopped:
            self.monitor.hurry(held.at + self.clock.offset_s)
        reading = self._readings().get(held.key)
        exit = Exit(
            node=self.spec.node,
            generation=generation,
            rank=rank,
            code=code,
            at=held.at + self.clock.offset_s,
            starved=code == -signal.SIGKILL and self.monitor.kills.lately(),
            pressed=self.monitor.scarcely() if code == -signal.SIGKILL else "",
            latched=reading.failure if reading and reading.failed else "",
        )
        self._beat()
        self._do(self.life.step(time.monotonic(), Exited(exit)))

    async def _judge(self, exit: Exit) -> None:
        alarm = await self.judge(exit, words.folder(self.spec.log_dir, exit.generation, exit.rank))
        self._do(self.life.step(time.monotonic(), Judged(exit, alarm)))

    def _noticed(self, alarm: Alarm) -> None:
        self._do(self.life.step(time.monotonic(), Noticed(alarm)))

    def _readings(self) -> dict[str, slot.Reading]:
        """What the ranks last told, by their keys."""
        found = [slot.read(arena, at) for at in range(self.spec.nproc)] if (arena := self.ranks.arena) else []
        return {f"{r.generation}:{r.rank}": r for r in found if r is not None}

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self.clock.known:
            beat = msgspec.structs.replace(self._summary(), running=self.ranks.count(self.life.generation))
            self._put(messages.encode(beat))

    def _summary(self) -> Beat:
        """The slowest rank speaks for the node."""
        generation, arena = self.life.generation, self.ranks.arena
        readings = [r for r in self._readings().values() if r.generation == generation and r.step >= 0]
        if generation == 0 or arena is None or len(readings) < self.spec.nproc:
            return Beat(node=self.spec.node, generation=generation, step=-1, at=0.0)
        backing, wall_s = self.keeper.backing, self.clock.offset_s
        return msgspec.structs.replace(
            beat_of(self.spec.node, readings, wall_s),
            sent=time.monotonic() + wall_s,
            arrivals=self.tracer.arrivals(arena, generation, self.clock.wall_s()),
            sealed=backing.sealed(),
            backed=backing.backed,
            backing_s=backing.took_s,
            kept=self.keeper.kept,
            stored=self.keeper.stored,
            verifies=backing.verifies(),
            compares=self.keeper.hashing.compares,
            mesh=self.ranks.mesh(),
            replayable=self.ranks.replayable(),
        )

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_STEADY_S if self._first_said == self.life.generation else POLL_S)
            now = time.monotonic()
            self._do(self.life.step(now, Clock()))
            self._look_for_latches(now)
            self._look_at_losses()
            due = now >= self._beat_at + self.beat_s
            if due or (self._first_said != self.life.generation and self._summary().step >= 0):
                if due:
                    self.ranks.learn(trains := self._first_said == self.life.generation)
                    self.staging.complete(trains)
                    self.tracer.watch(self.ranks.held.values())
                else:
                    self._first_said = self.life.generation
                self._beat()

    def _look_for_latches(self, now: float) -> None:
        for held in self._latches.overdue(now, self.ranks.held, self._readings()):
            self._over(held)

    def _look_at_losses(self) -> None:
        if (arena := self.ranks.arena) is None or not self.clock.known:
            return
        for found in self.losses.look(arena, self.spec.nproc, self.clock.offset_s):
            news = Spoilt(found) if isinstance(found, Loss) else Noticed(found)
            self._do(self.life.step(time.monotonic(), news))
        self._marked(self.losses.marks())

    def _marked(self, marks: tuple[Mark, ...]) -> None:
        if marks:
            self._put(messages.encode(Marked(node=self.spec.node, generation=self.life.generation, marks=marks)))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    node_dir = Path(sys.argv[1])
    line = judge.start(node_dir)  # while we have no threads, and nothing open that it should not have
    asyncio.run(Agent(node_dir, socket.socket(fileno=int(sys.argv[2])), Asking(line).alarm).run())


if __name__ == "__main__":
    python_fork.run(main)
