"""The agent: talks with the controller, carries out its errands on this node, and reports the state of its ranks.

The agent owns and steps the state machine of the node protocol. It reaches everything else through its ports.
"""

import asyncio
import contextlib
import logging
import signal

import msgspec

from holdfast.agent.agent_interfaces import AgentEvents, AgentIdentity, AssembleParts, ControllerLink
from holdfast.agent.connection.controller_dialer import LinkRefusedError
from holdfast.agent.masked_news import learn_secrets, mask_beat, mask_listing, mask_news
from holdfast.agent.rank.failed_not_exited import LatchedFailures
from holdfast.agent.rank.loss_alarms import LossAlarms
from holdfast.agent.rank.node_beat import make_beat, make_hello, returned_ranks, show_first_step
from holdfast.core.agent_state_machine import (
    OWN,
    AgentProtocol,
    AlarmNoticed,
    BadLossSeen,
    CarryOut,
    ClockTick,
    Deed,
    ErrandDone,
    ErrandReceived,
    ExitJudged,
    HeedEpoch,
    JudgeExit,
    LinkLost,
    LinkOpened,
    News,
    PostAcknowledged,
    RankExited,
    RememberDone,
    RememberLeaving,
    SendPost,
)
from holdfast.core.detect.job_progress import LEAD, made_steps
from holdfast.model.code_release import Release
from holdfast.model.detector_alarm import Alarm
from holdfast.model.node_errands import (
    Errand,
    LaunchHere,
    Leave,
    PairTestHere,
    ProbeHere,
    ReplayHere,
    StageHere,
    StopHere,
)
from holdfast.model.observation import Beat, Departure, Exit, Loss, Mark
from holdfast.model.state_copy import Address
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import (
    Ack,
    AimMessage,
    ControllerPacket,
    EndWarning,
    ErrandMessage,
    HashReport,
    JobFigures,
    NodeNotice,
    PeersMessage,
    ReachRequest,
    ScriptImports,
    TraceAnswer,
    TraceRequest,
    TrafficReport,
    Welcome,
)
from holdfast.wire.holder_messages import HolderRank, RankKey
from holdfast.wire.rank_memory.slot_reader import SlotReading

POLL_S = 0.1  # how often the slots are read until every rank has made its first step
_STEADY_S = 0.25  # and then: waking up is most of what an agent costs
COLD_START = "ranks start as new processes, not as forks of the zygote"
_OUTBOX = 256
_REDIAL_S = 0.05  # after a link that broke; then longer and longer
_AGAIN_S = 5.0  # a release that could not be had is tried again
_ANSWERED_S = 0.2  # for the answer to go out before the node is gone
_OUR_SIGNALS = (-signal.SIGTERM, -signal.SIGKILL)
_log = logging.getLogger("holdfast.agent")


class Agent:
    def __init__(self, identity: AgentIdentity, assemble: AssembleParts) -> None:
        self.node, self.identity = identity.node, identity
        parts = assemble(
            AgentEvents(
                say=self._send_notice,
                on_rank_exit=self._on_rank_exit,
                on_alarm=lambda alarm: self._step(AlarmNoticed(alarm)),
                on_copies=self._send_beat,
                on_checkpoints=lambda listing: self._send(mask_listing(self.mask, listing)),
                on_marks=self._send_marks,
                on_traffic=lambda links: self._send(TrafficReport(node=self.node, links=links)),
                on_logged=lambda told, source: self.losses.on_logged(told, source),
                on_leave_request=self._on_leave_request,
                on_end_warning=lambda: self._send(EndWarning(node=self.node)),
            )
        )
        self.clock, self.controller_clock = parts.clock, parts.controller_clock
        self.dialer, self.notes, self.judge, self.mask = parts.dialer, parts.notes, parts.judge, parts.mask
        self.ranks, self.tracer, self.keeper = parts.ranks, parts.tracer, parts.keeper
        self.staging, self.diagnosis, self.health = parts.staging, parts.diagnosis, parts.health
        self._reach, self._background = parts.reach, parts.background
        settings = identity.settings
        self.losses = LossAlarms(self.node, settings.loss)
        self.life = AgentProtocol(self.node, settings.node, self.notes.mark_alone(self.clock.monotonic()))
        self.life.on_bad_loss, self.beat_s = settings.loss.stance, settings.silence.beat_s
        self._undated: list[HolderRank] = []  # ended before we knew the controller's time
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_OUTBOX)
        self._tasks: asyncio.TaskGroup
        self._chores_at = self._beat_at = 0.0
        self._first_said = 0  # the generation whose first step was reported
        self._latches = LatchedFailures()
        self._told_imports: tuple[str, ...] = ()  # on this link
        self._staged = False  # what the controller has said that ranks may run here

    async def run(self) -> None:
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.ranks.listen(listed))
            await listed.wait()
            self._recall_state()
            self.keeper.adopt_arenas(self.ranks.arenas)
            for work in (self._poll_ranks, self._say_when_warm, *self._background):
                self._tasks.create_task(work())
            await self._keep_link()

    def _step(self, news: News) -> None:
        """Pass this news and the present time to the state machine, and carry out the actions that it returns."""
        self._perform_deeds(self.life.step(self.clock.monotonic(), mask_news(self.mask, news)))

    # --- state that outlives an agent --------------------------------------------------------------------------

    def _recall_state(self) -> None:
        notes, keys = self.notes, self.ranks.held
        newest = max((key.generation for key in keys), default=0)
        ranks = tuple(key.rank for key in keys if key.generation == newest)
        stopped, leave = notes.read_stopped(), notes.read_leave_intent()
        self._perform_deeds(
            self.life.restore_state(notes.read_done(), newest, ranks, stopped, leave, epoch=notes.read_epoch())
        )
        for held in list(self.ranks.held.values()):
            if held.code is not None:
                self._on_rank_exit(held)

    def _perform_deeds(self, deeds: tuple[Deed, ...]) -> None:
        for deed in deeds:
            match deed:
                case SendPost(post):
                    self._send(post)
                case HeedEpoch() | RememberDone() | RememberLeaving():
                    self.notes.write_deed(deed)
                case CarryOut(errand):
                    self._tasks.create_task(self._run_errand(errand))
                case JudgeExit(exit):
                    self._tasks.create_task(self._judge_exit(exit))

    def _send(self, message: agent_messages.FromAgent) -> None:
        self._queue_packet(agent_messages.encode(message))

    def _queue_packet(self, packet: bytes) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # posts stay in the machine's outbox until acknowledged
            self._outbox.put_nowait(packet)

    # --- the link ----------------------------------------------------------------------------------------------

    async def _keep_link(self) -> None:
        wait_s = _REDIAL_S
        while True:
            wait_s = _REDIAL_S if await self._run_link() else min(2 * wait_s, 1.0)
            self._step(LinkLost())
            self.notes.mark_alone(self.clock.monotonic())
            await asyncio.sleep(wait_s)

    async def _run_link(self) -> bool:
        """Run one link to the controller until it ends; return whether it was opened, and this node not refused."""
        link, refused = None, False
        try:
            async with self.dialer.open_link() as link:
                await self._exchange_messages(link)
        except (OSError, msgspec.DecodeError) as e:
            refused = isinstance(e, LinkRefusedError)
            _log.info("no link to the controller: %s", e)
        return link is not None and not refused

    async def _exchange_messages(self, link: ControllerLink) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
        await link.send_bytes(self._make_hello())
        sender = self._tasks.create_task(self._send_all(link))
        try:
            async for packet in link:
                self._on_packet(agent_messages.decode_from_controller(packet))
        finally:
            sender.cancel()

    async def _send_all(self, link: ControllerLink) -> None:
        with contextlib.suppress(OSError):  # who reads from the link hears of its end
            while True:
                await link.send_bytes(await self._outbox.get())

    def _on_packet(self, packet: ControllerPacket) -> None:
        if packet.epoch >= self.life.epoch:  # or another controller has taken over, and nothing of it counts
            self._on_message(packet.message, packet.epoch)

    def _on_message(self, message: agent_messages.FromController, epoch: int) -> None:
        match message:
            case Welcome(beat_s=beat_s, releases=releases, peers=peers):
                if peers:
                    self.keeper.admit_peers(peers)
                learn_secrets(self.mask, *releases)
                self.beat_s, self._told_imports = beat_s, ()
                self.controller_clock.on_welcome(message.at, message.ahead_s)
                if not self._staged:
                    self._tasks.create_task(self._stage_releases(message.run, releases))
                self._send_beat()  # the newest step, before posts tell how ranks ended
                self.keeper.report_checkpoints()
                self._step(LinkOpened(epoch))
                self.notes.clear_alone()
                undated, self._undated = self._undated, []
                for held in undated:
                    self._on_rank_exit(held)
            case Ack(seq=seq):
                self._step(PostAcknowledged(seq))
            case ErrandMessage(errand=errand):
                if isinstance(errand, StopHere):
                    self._look_at_losses()  # whose went wrong first is to be heard before it is judged
                self._step(ErrandReceived(errand, epoch))
            case PeersMessage(peers=peers):
                self.keeper.admit_peers(peers)
            case AimMessage():
                self._tasks.create_task(self.keeper.apply_aim(message.aim))
            case TraceRequest():
                self._tasks.create_task(self._trace_stacks(message))
            case JobFigures():
                self.ranks.write_figures(message)
            case ScriptImports(modules=modules):
                self.ranks.hear_imports(modules)
            case ReachRequest(peers=peers):
                self._tasks.create_task(self._try_peers(peers))

    async def _trace_stacks(self, look: TraceRequest) -> None:
        generation = self.life.generation  # but for those that have ended well: nobody waits for them
        newest = tuple(r for key, r in self.ranks.held.items() if key.generation == generation and r.code != 0)
        trace = await self.tracer.trace_ranks(newest, look, self.controller_clock.wall_s())
        self._send(TraceAnswer(id=look.id, trace=trace))

    async def _try_peers(self, peers: dict[str, Address]) -> None:
        self._send(await self._reach(peers))

    def _make_hello(self) -> bytes:
        ready = self._staged and self.ranks.warm.is_set() and not self.life.leaving
        return agent_messages.encode(make_hello(self.identity, self.life, self.ranks, self.keeper, ready=ready))

    def _send_notice(self, text: str) -> None:
        _log.warning("%s", text)
        self._send(NodeNotice(node=self.node, text=self.mask(text)))

    async def _say_when_warm(self) -> None:
        await self.ranks.warm.wait()
        if self.ranks.cold:
            _log.warning("%s: %s", COLD_START, self.ranks.cold)
        self._queue_packet(self._make_hello())

    async def _stage_releases(self, run: str, releases: tuple[Release, ...]) -> None:
        """Stage these releases, retrying until all are here. Then send a new hello: the node is now ready."""
        await self.keeper.use_run(run)  # that hello tells of states on disk
        told = ""
        while error := await self.staging.stage_all(releases):
            if error != told:
                self._send_notice(error)
            told = error
            await asyncio.sleep(_AGAIN_S)
        self._staged = True
        self._queue_packet(self._make_hello())

    def _on_leave_request(self) -> None:
        """Leave because someone on this host asked (SIGINT), without waiting for the controller."""
        grace_s = self.identity.settings.recovery.shutdown_grace_s
        leave = Leave(id=OWN, code=128 + signal.SIGINT, grace_s=grace_s, reason="interrupted on its own host")
        self._step(ErrandReceived(leave))

    # --- errands -----------------------------------------------------------------------------------------------

    async def _run_errand(self, errand: Errand) -> None:
        if isinstance(errand, ProbeHere | PairTestHere | ReplayHere):
            await self.ranks.end_parked()  # nodes are tried with nothing else on their devices
            self._step(await self.diagnosis.run_errand(errand))
            return
        if isinstance(errand, StageHere):  # beside whatever else goes on
            learn_secrets(self.mask, errand.release)
            error, refused = await self.staging.stage_and_check(errand)
            self._step(ErrandDone(errand, not error, error, refused=refused))
            return
        await self.diagnosis.stop()
        if isinstance(errand, LaunchHere):
            self.losses.on_launch(errand)
            learn_secrets(self.mask, errand.release)
            first = errand.seat.first_rank == 0
            error = self.keeper.begin_launch(errand) or await self.staging.begin_launch(errand.release, first=first)
            error = error or await self.ranks.launch_ranks(errand)
        else:
            generation = errand.generation if isinstance(errand, StopHere) else self.life.generation
            self.notes.write_stopped(generation)
            self.keeper.end_training()
            self._send_beat()  # the last steps, before the ranks are gone
            if isinstance(errand, Leave) and self.life.is_alone:
                self.notes.write_departure(self._make_departure(errand.reason))
            self.life.returned = returned_ranks(self._read_slots().values(), generation)
            parking = errand.parking if isinstance(errand, StopHere) else None
            error = await self.ranks.stop_ranks(generation, errand.grace_s, parking)
            await self.staging.gather_outputs()
        if isinstance(errand, Leave):
            await self.keeper.leave_job(errand)
            if self.life.is_alone:
                self.notes.complete_departure(self._complete_beat)
        copies = () if isinstance(errand, LaunchHere) else self.keeper.list_copies()
        copies = tuple(one for one in copies if one.disk or not isinstance(errand, Leave))  # what the job's end leaves
        told = self._complete_beat(Beat(node=self.node, generation=self.life.generation, step=-1, at=0.0))
        done = ErrandDone(errand, not error, error, copies, stored=told.stored, missed=told.missed)
        self._step(msgspec.structs.replace(done, stored_at=told.stored_at, kept=self.ranks.kept))
        if isinstance(errand, Leave):
            _log.info("leaving with code %d: %s", errand.code, errand.reason)
            self.notes.write_leave_reason(errand)
            await asyncio.sleep(_ANSWERED_S)
            self.ranks.quit_holder(errand.code)

    def _make_departure(self, reason: str) -> Departure:
        generation, known = self.life.generation, self.controller_clock.known
        returned = returned_ranks(self._read_slots().values(), generation)
        ranks = [rank for key, rank in self.ranks.held.items() if key.generation == generation]
        well = [rank.code == 0 or (rank.code is None and rank.rank_key.rank in returned) for rank in ranks]
        return Departure(
            node=self.node,
            generation=generation,
            at=self.clock.monotonic() + self.controller_clock.offset_s if known else 0.0,
            reason=reason,
            ended=bool(well) and all(well),
            beat=self._summarize_ranks() if known else None,
        )

    # --- ranks -------------------------------------------------------------------------------------------------

    def _on_rank_exit(self, held: HolderRank) -> None:
        if not self.controller_clock.known:
            self._undated.append(held)
            return
        key, at = held.rank_key, held.at + self.controller_clock.offset_s
        code = held.code if held.code is not None else 1
        if code and key.generation > self.life.stopped:
            self.health.on_rank_exit(at)
        reading = self._read_slots().get(key)
        failed_at = reading.failed_at if reading and reading.failed else held.at if held.code is not None else None
        if reading and reading.failed and code in _OUR_SIGNALS and key.generation <= self.life.stopped:
            code = 1  # it was ending with that when our signal came
        exit = Exit(
            node=self.node,
            generation=key.generation,
            rank=key.rank,
            code=code,
            at=at,
            starved=code == -signal.SIGKILL and self.health.has_oom_kill(),
            pressed=self.health.scarcely() if code == -signal.SIGKILL else "",
            latched=reading.failure if reading and reading.failed else "",
        )
        self._send_beat()
        self._step(RankExited(exit, failed_at))

    async def _judge_exit(self, exit: Exit) -> None:
        self._step(ExitJudged(exit, await self.judge(exit)))

    def _read_slots(self) -> dict[RankKey, SlotReading]:
        """Return what each rank last wrote to its progress slot."""
        return {RankKey(r.generation, r.rank): r for _, r in self.ranks.slots.read_slots()}

    def _send_beat(self) -> None:
        self._beat_at = self.clock.monotonic()
        if self.controller_clock.known:
            generation, held, signs = self.life.generation, self.ranks.held, self.health
            told = {"strains": signs.strains, "links_read": signs.links_read, "tensor_share": signs.tensor_share}
            told["running"] = sum(key.generation == generation and rank.code is None for key, rank in held.items())
            self._send(msgspec.structs.replace(self._summarize_ranks(), **told))

    def _summarize_ranks(self) -> Beat:
        """Return the node's beat, with the step of its slowest rank. If a rank has no step yet, the beat's step is -1.
        Ranks without a step are left out once another rank has made LEAD steps."""
        generation, source = self.life.generation, self.ranks.read_loss_source() or self.losses.source
        ended = {key for key, rank in self.ranks.held.items() if rank.code is not None}
        told = [show_first_step(r, ended=key in ended) for key, r in self._read_slots().items()]
        readings = [r for r in told if r.generation == generation and r.step >= 0]
        stepped = {r.rank: made_steps(r.step, r.first_step) for r in readings}
        lead = max(stepped.values(), default=0)
        if generation == 0 or not readings or (len(readings) < self.identity.nproc and lead < LEAD):
            return Beat(node=self.node, generation=generation, step=-1, at=0.0, loss_source=source)
        offset_s = self.controller_clock.offset_s
        reports = self.tracer.read_reports(generation, self.controller_clock.wall_s())
        beat = msgspec.structs.replace(
            make_beat(self.node, readings, offset_s),
            sent=self.clock.monotonic() + offset_s,
            exact=self.controller_clock.is_exact,
            arrivals={rank: told.arrivals for rank, told in reports.items()},
            gpus={rank: told.gpu for rank, told in reports.items() if told.gpu},
            peak_flops=self.health.peak_flops,
            loss_source=source,
            mute=tuple(sorted({key.rank for key in self.ranks.held if key.generation == generation} - {*stepped})),
            **self.ranks.read_notes(),
        )
        return self._complete_beat(beat)

    def _complete_beat(self, beat: Beat) -> Beat:
        """Add the keeper's progress to a beat, with its times converted to the controller's clock."""
        told, clock = self.keeper.complete_beat(beat), self.controller_clock
        at = told.stored_at + clock.offset_s if told.stored_at and clock.known else 0.0
        return mask_beat(self.mask, msgspec.structs.replace(told, stored_at=at))

    async def _poll_ranks(self) -> None:
        while True:
            await asyncio.sleep(_STEADY_S if self._first_said == self.life.generation else POLL_S)
            now = self.clock.monotonic()
            self._step(ClockTick())
            self._look_for_latches(now)
            self._look_at_losses()
            if now >= self._chores_at + self.beat_s:  # by a clock of their own: news of copies is a beat, too
                self._do_chores(now)
            due = now >= self._beat_at + self.beat_s
            if due or (self._first_said != self.life.generation and self._summarize_ranks().step >= 0):
                if not due:
                    self._first_said = self.life.generation
                self._send_beat()

    def _do_chores(self, now: float) -> None:
        self._chores_at, trains = now, self._first_said == self.life.generation
        self.ranks.learn_imports(trains)
        self.ranks.keep_spares(trains)
        self._tell_imports()
        self.staging.complete(trains)
        self.tracer.watch_ranks(self.ranks.held.values())

    def _tell_imports(self) -> None:
        """If rank 0 runs here, tell the controller which modules of the script the zygote has preloaded."""
        found, generation = self.ranks.proven_imports, self.life.generation
        if found != self._told_imports and RankKey(generation, 0) in self.ranks.held and self.controller_clock.known:
            self._told_imports = found
            self._send(agent_messages.make_script_imports(generation, found))

    def _look_for_latches(self, now: float) -> None:
        for held in self._latches.overdue_ranks(now, self.ranks.held, self._read_slots()):
            self._on_rank_exit(held)

    def _look_at_losses(self) -> None:
        if not self.controller_clock.known:
            return
        news = list(self.losses.read_losses(self.ranks.slots, self.controller_clock.offset_s))
        if any(isinstance(found, Alarm) for found in news):
            self._send_beat()  # the steps that these losses are of
        for found in news:
            self._step(BadLossSeen(found) if isinstance(found, Loss) else AlarmNoticed(found))
        self._send_marks(self.losses.take_marks())

    def _send_marks(self, marks: tuple[Mark, ...]) -> None:
        if marks:
            self._send(HashReport(node=self.node, generation=self.life.generation, marks=marks))
