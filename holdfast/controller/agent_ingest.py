"""Where agents arrive: one WebSocket each; turns their beats and posts into job-level events."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping

import msgspec
from aiohttp import WSMsgType, web

from holdfast.config import Settings
from holdfast.controller.access.caller_admission import ANY_NODE, ANYBODY, CALLER, Caller
from holdfast.controller.actions.action_executor import EVICTED, ActionExecutor
from holdfast.controller.job_stall_watch import StallWatch
from holdfast.controller.stack_tracing import StackTracing
from holdfast.core.agent_state_machine import PING_S, Post
from holdfast.core.decide.job_view import JobView
from holdfast.core.detect.job_progress import JobPace
from holdfast.core.detect.rankless_nodes import MissingRanksDetector
from holdfast.core.detect.rebooted_node import RebootDetector
from holdfast.core.detect.replica import ReplicaDetector
from holdfast.core.detect.silence import SilenceDetector
from holdfast.core.incident.alarm_rate_limit import RepeatFilter
from holdfast.core.snapshots.recovery_floor import RecoveryFloor
from holdfast.model.action import Launch
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.errand import Done, Errand, Leave, StopHere
from holdfast.model.event import Ended, Event, Phase, Ready
from holdfast.model.job_seats import Dims, Seat
from holdfast.model.release import Release
from holdfast.model.signal import Beat
from holdfast.model.state_copy import Aim
from holdfast.ports import Socket
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import (
    Ack,
    AimMessage,
    ErrandMessage,
    HashReport,
    Hello,
    NodeNotice,
    TraceAnswer,
    TraceRequest,
    Welcome,
)
from holdfast.wire.credentials.mutual_tls import NODE

_OUTBOX = 64
_HANG_UP = b""
_SPIKE_S = 60.0  # a loss that all ranks share stands out on all nodes, and one word of it is enough
_RECONNECT_S = 5.0  # agents find a restarted controller within this


Outbox = asyncio.Queue[bytes]


class AgentIngest:
    def __init__(self, settings: Settings, view: JobView, hands: ActionExecutor, hear: Callable[[Event], None]) -> None:
        self.settings = settings
        self.view = view
        self.hands = hands
        self.hear = hear
        self.now: Callable[[], float] = lambda: 0.0
        self.epoch = 0  # of the controller
        self.outrun: Callable[[Hello], None] = lambda hello: None  # a node knows of more than the journal
        self.orphaned = 0  # a generation that the journal has lost: what it left on nodes may be gone on from
        self.releases: Callable[[], tuple[Release, ...]] = tuple  # that nodes are to have: one runs, one may wait
        self.silence = SilenceDetector(settings.silence)
        self.pace = JobPace(settings.pace)
        self.reborn, self.deserted = RebootDetector(), MissingRanksDetector()
        self.floor = RecoveryFloor(settings.backup)
        self.replicas = ReplicaDetector(settings.replica)
        self.floor.equal = self.replicas.newest_equal_step
        self._spiked = RepeatFilter(_SPIKE_S)
        self.beats: dict[str, Beat] = {}  # the newest of each node, for people
        self._links: dict[str, Outbox] = {}
        self._here: set[str] = set()  # nodes that called by the socket of this host
        self.tracing = StackTracing(lambda: tuple(sorted(self._links)), self._send_look)
        self.watching = StallWatch(settings, view, self.tracing, self._announce_news)
        self._exposed: tuple[str, ...] = ()
        self._seats: tuple[Seat, ...] = ()
        self._sitting: frozenset[str] = frozenset()  # nodes of these
        self.mesh: Dims = ()  # the parallel groups, as the script tells them or as the user did
        self._left: set[str] = set()  # told to leave: their silence is no news
        self._stale: dict[str, tuple[int, Hello]] = {}  # being emptied of an old generation before they are ready
        self._stale_id = 0
        self.serials: Mapping[str, str] = {}  # of the certificates of nodes that call from other hosts
        self._unkept: list[tuple[Outbox, Ack]] = []  # posts that the journal may not have on disk yet
        hands.tell, hands.present = self.send_errand, self._present_nodes
        hands.forget, hands.known = self._forget_node, self._known_nodes
        hands.aim = self._aim_of

    # --- links -------------------------------------------------------------------------------------------------

    async def serve_agent(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=agent_messages.MAX_BYTES, heartbeat=PING_S)
        await ws.prepare(request)
        await self.attend_link(ws, CALLER.get())
        return ws

    async def attend_link(self, ws: Socket, caller: Caller = ANYBODY) -> None:
        """Talk with one agent until its link ends."""
        outbox: Outbox = asyncio.Queue(_OUTBOX)
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(_send_all(ws, outbox))
            await self._listen_to_agent(ws, outbox, caller)
            sender.cancel()

    async def _listen_to_agent(self, ws: Socket, outbox: Outbox, caller: Caller) -> None:
        node = "" if caller.node == ANY_NODE else caller.node
        try:
            async for message in ws:
                if message.type is not WSMsgType.BINARY:
                    break
                heard = agent_messages.decode_from_agent(message.data)
                if isinstance(heard, Hello) and node not in ("", heard.node):
                    await ws.close(code=1008, message=b"this link is another node's")
                    break
                node = self._on_message(heard, outbox, node)
                if isinstance(heard, Hello):
                    (self._here.add if caller.node == ANY_NODE else self._here.discard)(node)
        except msgspec.DecodeError:
            await ws.close(code=1003, message=b"not a message of this version of holdfast")
        finally:
            if node and self._links.get(node) is outbox:
                del self._links[node]

    def send_errand(self, node: str, errand: Errand) -> bool:
        """Send an errand if the node is linked; otherwise it is sent again when the node comes back."""
        return self._put_packet(
            self._links.get(node), agent_messages.encode(ErrandMessage(errand=errand, epoch=self.epoch))
        )

    def _send_look(self, node: str, look: TraceRequest) -> bool:
        return self._put_packet(self._links.get(node), agent_messages.encode(look))

    def _put_packet(self, outbox: Outbox | None, packet: bytes) -> bool:
        if outbox is None:
            return False
        with contextlib.suppress(asyncio.QueueFull):
            outbox.put_nowait(packet)
            return True
        return False

    # --- messages ----------------------------------------------------------------------------------------------

    def _on_message(self, message: agent_messages.FromAgent, outbox: Outbox, node: str) -> str:
        now = self.now()
        match message:
            case Hello():
                self._on_hello(now, message, outbox)
                return message.node
            case Beat() if message.node == node:
                if self._links.get(node) is outbox:  # what comes late from an older link was said before the launch
                    self._look_for_ranks(now, message)
                self._on_beat(now, message)
            case NodeNotice() if message.node == node:
                self.hands.say(f"{node}: {message.text}")
            case HashReport() if message.node == node:
                for alarm in self.replicas.on_marks(now, node, message.generation, message.marks):
                    self.flush_progress()
                    self.hear(alarm)
                if self.floor.tick(now):
                    self._tell_aims()
            case TraceAnswer() if node:
                self.tracing.on_trace(node, message)
            case Post() if node:
                self._note_alive(now, node)
                if self._may_say(node, message.body):
                    self._on_post(now, message)
                else:
                    self.hands.say(f"{node} spoke of nodes that are not its own; it was not heeded")
                self._unkept.append((outbox, Ack(seq=message.seq)))
        return node

    def _may_say(self, node: str, body: Alarm | Ended | Done) -> bool:
        """Whether a node may report this. It may accuse only itself, or, if it called by this host's socket, nodes
        that did so too, because one agent reports for all nodes of its host."""
        if isinstance(body, Alarm):
            return set(body.suspects) <= ({node} | self._here if node in self._here else {node})
        return body.node == node

    def acknowledge_posts(self) -> None:
        """Acknowledge posts whose events the journal now has on disk, so agents stop repeating them."""
        for outbox, ack in self._unkept:
            self._put_packet(outbox, agent_messages.encode(ack))
        self._unkept.clear()

    def _note_alive(self, now: float, node: str) -> None:
        if node not in self._left:
            self.silence.on_message(now, node)

    def _forget_node(self, node: str) -> None:
        self._left.add(node)
        self.silence.forget_node(node)
        self.hands.copies.pop(node, None)
        self.hands.keepers.pop(node, None)
        self.beats.pop(node, None)
        if node in self.serials:
            self._tell_aims()  # and that its certificate counts no more

    def _on_hello(self, now: float, hello: Hello, outbox: Outbox) -> None:
        if hello.epoch > self.epoch or hello.generation > self.view.generation:
            self.outrun(hello)
        fresh = self._links.get(hello.node) is not outbox
        self._links[hello.node] = outbox
        self._left.discard(hello.node)
        self.silence.on_message(now, hello.node)
        self.hands.keepers[hello.node] = hello.keeper
        self.hands.hosts[hello.node] = hello.host
        if self._is_seated(hello.node):  # others may hold steps of a line that the job has left
            self.hands.copies[hello.node] = hello.copies
        waits = hello.node in self.view.pool
        seated = self._is_seated(hello.node) and hello.node not in self.view.coming  # evicted, and to report anew
        if hello.generation and (waits or not seated) and (fresh or hello.ready):
            self._empty(now, hello)  # before the welcome: after it the node may be without us for `node.lost_s` again
        if fresh:
            beat_s, releases = self.settings.silence.beat_s, self.releases()
            welcome = Welcome(at=now, beat_s=beat_s, releases=releases, revoked=self._revoked_ids(), epoch=self.epoch)
            self._put_packet(outbox, agent_messages.encode(welcome))
            self.hands.on_relink(hello.node)
            self._tell_aims(self._nodes_concerned(hello.node))
        if hello.ready and not hello.generation and not (waits or seated):
            self._stale.pop(hello.node, None)
            self._announce_ready(hello)

    def _empty(self, now: float, hello: Hello) -> None:
        """Stop the ranks of an old generation on a node that was thought lost."""
        # The node remembers for ever what it was told under an id, so one is never used again.
        self._stale_id = min(self._stale_id - 1, -int(now * 1e6))
        self._stale[hello.node] = (self._stale_id, hello)
        self.send_errand(hello.node, StopHere(id=self._stale_id, generation=hello.generation, grace_s=0.0))

    def _is_seated(self, node: str) -> bool:
        if self._seats is not self.view.seats:  # asked at every beat of every node
            self._seats = self.view.seats
            self._sitting = frozenset(seat.node for seat in self._seats)
        return node in self._sitting and node not in self._lost_nodes()

    def _lost_nodes(self) -> set[str]:
        """Return nodes that have no seat, or will lose it because they fell silent in the open incident."""
        return {*self.view.gone, *self.view.silent_nodes}

    def _present_nodes(self) -> tuple[str, ...]:
        """Return nodes that are linked or expected soon; after a controller restart none is linked yet."""
        awaited = {seat.node for seat in self.view.seats} - self._lost_nodes()
        return tuple(sorted({*self._links, *awaited, *self.view.pool, *self.view.under_probe}))

    def _known_nodes(self) -> set[str]:
        """Return the nodes that the decider has heard of."""
        view = self.view
        return {*(seat.node for seat in view.seats), *view.pool, *view.coming, *view.gone, *view.under_probe}

    def _announce_ready(self, hello: Hello) -> None:
        self.hear(Ready(node=hello.node, host=hello.host, nproc=hello.nproc, order=hello.order))

    def _on_beat(self, now: float, beat: Beat) -> None:
        self._note_alive(now, beat.node)
        self.beats[beat.node] = beat
        if beat.generation == self.view.generation:
            self.hands.stored = max(self.hands.stored, beat.stored)
        if beat.generation == self.view.generation and self._is_seated(beat.node):
            self._read_script_facts(beat)
        if progress := self.pace.on_beat(now, beat):
            self.hands.on_step()
            self.hear(progress)
        if self.floor.on_beat(now, beat):
            self._tell_aims()
        self.watching.on_beat(now, beat)

    def _look_for_ranks(self, now: float, beat: Beat) -> None:
        view = self.view
        under_way = view.phase in (Phase.STARTING, Phase.TRAINING) and not view.has_ended(beat.node)
        seated = under_way and self._is_seated(beat.node)
        watched = (self.reborn, self.deserted) if seated else ()
        for alarm in [d.on_beat(now, view.generation, beat) for d in watched]:
            if alarm:
                self._announce_news(alarm)

    def _read_script_facts(self, beat: Beat) -> None:
        """Take over what the script reports about itself: its parallel groups, and whether it may be replayed."""
        if beat.mesh and beat.mesh != self.mesh and not self.view.job.mesh:
            self.mesh = self.watching.mesh = beat.mesh
            self.hands.say(f"parallel groups, as the script tells: {','.join(f'{n}={s}' for n, s in beat.mesh)}")
            self._place_copies(self.view.generation, self.view.seats)
            self._tell_aims()
        if beat.step >= 0:  # before that nobody looks
            self.hands.replaying.allowed = beat.replayable

    def _announce_news(self, news: Alarm | Ended) -> None:
        self.flush_progress()
        self.hear(news)

    def on_launch(self, launch: Launch) -> None:
        """Prepare detectors and copies for a generation that is about to start."""
        self.mesh = self.watching.mesh = self.view.job.mesh or self.mesh
        self.replicas.on_launch(launch.generation)
        self.watching.on_launch(self.now(), launch)
        self.pace.on_launch(launch.generation, tuple(seat.node for seat in launch.seats))
        self._place_copies(launch.generation, launch.seats)

    def _place_copies(self, generation: int, seats: tuple[Seat, ...]) -> None:
        """Choose which node keeps copies of which node's snapshots, and warn of nodes without copies."""
        exposed = self.floor.on_launch(generation, seats, self.mesh)
        if exposed != self._exposed:
            self._exposed = exposed
            for sentence in exposed:
                self.hands.say(sentence)

    def _aim_of(self, node: str) -> Aim:
        aim, at = self.floor.aim_for(node), self.hands.keepers
        halves = tuple(msgspec.structs.replace(half, keeper_at=at.get(half.keeper, ("", 0))) for half in aim.halves)
        return msgspec.structs.replace(aim, peer_at=at.get(aim.peer, ("", 0)), halves=halves)

    def is_linked(self, node: str) -> bool:
        return node in self._links

    def is_valid_certificate(self, node: str, serial: str) -> bool:
        """Whether this is the node's certificate, and the node has not left or may come back."""
        return self.serials.get(node) == serial and self.view.may_return(node)

    def _revoked_ids(self) -> tuple[str, ...]:
        """Return serials and names of nodes that have left; names, as a user may sign other certificates."""
        gone = [node for node in self.view.gone if node in self.serials]
        return tuple(sorted((*(self.serials[node] for node in gone), *(NODE + node for node in gone))))

    def _nodes_concerned(self, node: str) -> set[str]:
        """Return a node and the nodes whose aims hold its keeper's address. Telling all nodes at every hello would
        cost the square of their number."""
        peers = {own for own, peer in self.floor.peers.items() if peer == node}
        halved = {own for own, halves in self.floor.halves.items() if any(half.keeper == node for half in halves)}
        return {node, *peers, *halved} & self.floor.nodes

    def _tell_aims(self, nodes: Collection[str] | None = None) -> None:
        """Send aims to these nodes, or to all if `nodes` is None."""
        revoked = self._revoked_ids()
        for node in sorted(self.floor.nodes if nodes is None else nodes):
            self._put_packet(
                self._links.get(node), agent_messages.encode(AimMessage(aim=self._aim_of(node), revoked=revoked))
            )

    def _on_post(self, now: float, post: Post) -> None:
        match post.body:
            case Done(id=id, node=node) as done:
                asked, hello = self._stale.get(node, (0, None))
                if hello is None or asked != id:
                    self.hands.on_done(done)
                    return
                del self._stale[node]
                if hello.generation == self.orphaned:
                    self.hands.copies[node] = done.copies
                if done.ok and hello.ready and node not in self.view.pool:
                    self._announce_ready(hello)
                elif not done.ok:  # of no use to anybody while old ranks hold its devices
                    self._stale_id -= 1
                    reason = f"ranks of an old generation could not be ended: {done.detail}"
                    self.send_errand(node, Leave(id=self._stale_id, code=EVICTED, grace_s=0.0, reason=reason))
            case Alarm(kind=Kind.LOSS, stance=Stance.OBSERVE | Stance.NOTIFY) as alarm if self._spiked.is_repeat(
                now, (alarm.generation, alarm.signature)
            ):
                pass
            case body:
                self.flush_progress()
                self.hear(body)

    def flush_progress(self) -> None:
        """Report the newest step, which must be known before an alarm or an outcome is."""
        if progress := self.pace.flush_progress(self.now()):
            self.hear(progress)

    # --- the clock ---------------------------------------------------------------------------------------------

    def expect_nodes(self, nodes: set[str]) -> None:
        """Expect nodes from before a controller restart; they get some time to reconnect before silence counts."""
        for node in nodes:
            self.silence.on_message(self.now() + _RECONNECT_S, node)

    def tick(self) -> None:
        now = self.now()
        for alarm in self.silence.overdue_alarms(now):
            self._on_silence(alarm)
        if self.floor.tick(now):
            self._tell_aims()
        self.watching.tick(now)

    def _on_silence(self, alarm: Alarm) -> None:
        self.flush_progress()
        self.hear(alarm)
        for node in alarm.suspects:
            self.beats.pop(node, None)
            self._hang_up(node)
            self.hands.on_silent(node)

    def _hang_up(self, node: str) -> None:
        """Close a node's link; a node that is alive dials again and says what it holds."""
        outbox = self._links.pop(node, None)
        if outbox is not None:
            while not outbox.empty():
                outbox.get_nowait()
            outbox.put_nowait(_HANG_UP)


async def _send_all(ws: Socket, outbox: Outbox) -> None:
    with contextlib.suppress(ConnectionError):
        while (packet := await outbox.get()) is not _HANG_UP:
            await ws.send_bytes(packet)
        await ws.close()
