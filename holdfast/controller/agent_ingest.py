"""Receives the messages of agents, over one WebSocket for each agent, and turns them into events for the job."""

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import WSMsgType, web

from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import ANY_NODE, CALLER
from holdfast.controller.access.link_opener import LinkOpener
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.actions.action_executor import EVICTED
from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.controller.control_loop import Controller
from holdfast.controller.node_links import Outbox, send_packets
from holdfast.controller.stack_tracing import StackTracing
from holdfast.controller.tracker_figures import TrackerFigures
from holdfast.controller_interfaces import Socket
from holdfast.core.agent_state_machine import PING_S, Post
from holdfast.core.detect import nonfinite_loss
from holdfast.core.detect.rebooted_node import RebootDetector
from holdfast.core.detect.vanished_ranks import MissingRanksDetector
from holdfast.core.diagnose.trace_texts import clean_told_trace
from holdfast.core.incident.alarm_rate_limit import RepeatFilter
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.model.decider_events import Ended, MeshReport, Ready
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import Done, Leave, StopHere
from holdfast.model.observation import Beat, Reach
from holdfast.model.rank_traces import Trace
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import (
    EndWarning,
    HashReport,
    Hello,
    NodeNotice,
    ScriptImports,
    TraceAnswer,
    TrafficReport,
    Welcome,
)
from holdfast.wire.request_rates import RequestRates

_AUDITED_S = 60.0  # the same refusal of the same caller is a line in the audit log once in so long
_SPIKE_S = 60.0  # a loss that all ranks share stands out on all nodes, and one word of it is enough
_TEXT_CHARS, _TEXTS = 2000, 100  # of a text that a node tells, and how many of them
_A_SECOND, _AT_ONCE = 0.5, 20.0  # sentences of one node for the console
_MOST_LOST = 1000  # epochs and generations that a journal may have lost


class AgentIngest:
    def __init__(
        self,
        controller: Controller,
        beat_s: float,
        tracing: StackTracing,
        certificates: NodeCertificates,
        *,
        admission: HostAdmission,
        say: Callable[[str], None],
    ) -> None:
        """`controller` gets the events that messages lead to. Nodes shall send beats every `beat_s` seconds."""
        self.controller, self.view = controller, controller.view
        self.links, self.registry, self.aims = controller.links, controller.registry, controller.aims
        self.detectors, self.dispatch, self.executor = controller.detectors, controller.dispatch, controller.executor
        self.tracing, self.certificates, self.admission = tracing, certificates, admission
        self._beat_s, self._say = beat_s, say
        self._figures = TrackerFigures(self.view, controller.ledger, self.links, say)
        self._reborn, self._deserted = RebootDetector(), MissingRanksDetector()
        self._spiked, self._told, self._audited = RepeatFilter(_SPIKE_S), RepeatFilter(), RepeatFilter(_AUDITED_S)
        self._sentences = RequestRates(_A_SECOND, _AT_ONCE, controller.clock)
        self._openers: dict[str, LinkOpener] = {}  # of the link of each node
        self._stale: dict[str, tuple[int, Hello]] = {}  # being emptied of an old generation before they are ready
        self._stale_id = 0

    # --- links -------------------------------------------------------------------------------------------------

    async def serve_agent(self, request: web.Request, audit: AuditLog) -> web.WebSocketResponse:
        # A kilobyte may unpack to a message of the largest size, and a read holds hundreds of them.
        ws = web.WebSocketResponse(max_msg_size=agent_messages.MAX_BYTES, heartbeat=PING_S, compress=False)
        await ws.prepare(request)
        await self.attend_link(ws, LinkOpener(CALLER.get(), ws.get_extra_info("socket"), audit))
        return ws

    async def attend_link(self, ws: Socket, opener: LinkOpener) -> None:
        """Exchange messages with one agent until its link ends."""
        outbox = self.links.make_outbox()
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(send_packets(ws, outbox))
            await self._listen_to_agent(ws, outbox, opener)
            sender.cancel()

    async def _listen_to_agent(self, ws: Socket, outbox: Outbox, opener: LinkOpener) -> None:
        node = "" if opener.caller.node == ANY_NODE else opener.caller.node
        try:
            async for message in ws:
                if message.type is not WSMsgType.BINARY:
                    break
                heard = _without_others_copies(agent_messages.decode_from_agent(message.data))
                if isinstance(heard, Hello) and (why := await self._meet_node(heard, node, opener)):
                    self._audit_refusal(heard.node, opener, why)
                    await ws.close(code=1008, message=why.encode())
                    break
                node = self._on_message(heard, outbox, node)
        except msgspec.DecodeError:
            await ws.close(code=1003, message=b"not a message of this version of holdfast")
        finally:
            self.links.close_link(node, outbox)
            if self._openers.get(node) is opener:
                del self._openers[node]

    async def _meet_node(self, hello: Hello, node: str, opener: LinkOpener) -> str:
        """Return why a node's hello is refused, else "". Reads the block list for an accepted node without a seat."""
        local = opener.caller.node == ANY_NODE
        if why := self._hello_refusal(hello, node, local=local):
            return why
        if not self._is_seated(hello.node):
            await self.admission.read_list(hello.identity)
        older = self._openers.get(hello.node)  # asked last: others may come meanwhile
        if older and not opener.may_replace(older):
            self._say_once(
                hello.node,
                f"refused a second {hello.node}, at {opener.caller.origin}: {older.caller.origin} has its link",
            )
            return "another process speaks for this node"
        self._openers[hello.node] = opener
        self.registry.record_origin(hello.node, local=local)
        return ""

    def _audit_refusal(self, node: str, opener: LinkOpener, why: str) -> None:
        if not self._audited.is_repeat(self.controller.clock(), (opener.caller, node, why)):
            opener.record_refusal(node, why)

    def _hello_refusal(self, hello: Hello, node: str, *, local: bool) -> str:
        """Return in a few words why a node's hello is refused; "" if it is accepted.

        A hello may name a later epoch or generation than the journal has. Such a claim is accepted only from nodes of
        this host and from nodes that had a seat: any other node could stop the job with it. If the whole journal is
        lost, nobody knows who had a seat, and nodes that joined before are believed.
        """
        if node not in ("", hello.node):
            return "this link is another node's"
        epochs, generations = hello.epoch - self.links.epoch, hello.generation - self.view.generation
        if epochs <= 0 and generations <= 0:
            return ""
        if (
            (local or self._was_launched(hello.node))
            and max(epochs, generations) <= _MOST_LOST
            and hello.epoch < agent_messages.MOST_EPOCHS
        ):
            return ""
        self._say_once(
            hello.node,
            f"refused {hello.node}: it claims to know of controller {hello.epoch} and generation "
            f"{hello.generation}, but this is controller {self.links.epoch} and generation {self.view.generation}",
        )
        return "this job has had no such controller or generation"

    def _was_launched(self, node: str) -> bool:
        """Return whether a node has a seat, or had one in the newest launch that a node may have received."""
        plan = self.executor.newest_plan()
        launched = plan.nodes if plan else self._nodes_before_loss()
        return self.registry.has_seat(node) or node in launched

    def _nodes_before_loss(self) -> frozenset[str]:
        """Return the nodes that an earlier controller let in, if the whole journal is lost: they may have had seats."""
        return self.certificates.recorded if self.controller.began_job else frozenset()

    def _had_lost_seat(self, node: str, generation: int) -> bool:
        """Return whether the journal has lost all entries of this generation, and the node had a seat in it."""
        return 0 < generation == self.registry.orphaned and self._was_launched(node)

    # --- messages ----------------------------------------------------------------------------------------------

    def _say_once(self, node: str, sentence: str) -> None:
        """Say that a node is refused or ignored, unless the same was said of this node in the last hour."""
        if not self._told.is_repeat(self.controller.clock(), (node, sentence.split()[0])):
            self._say(sentence)

    def _on_message(self, message: agent_messages.FromAgent, outbox: Outbox, node: str) -> str:
        now = self.controller.clock()
        match message:
            case Hello(node=name) | Beat(node=name) if self.registry.has_left(name):
                return node
            case Post(body=Alarm() | Ended()) if self.registry.has_left(node):
                self.links.hold_ack(outbox, message.seq)
            case Hello():
                if not self.links.has_newer_link(message.node, outbox):
                    self._on_hello(now, message, outbox)
                return message.node
            case Beat() if message.node == node:
                if self.links.is_newest(node, outbox):  # what comes late from an older link was said before the launch
                    self._look_for_ranks(now, message)
                self._on_beat(now, self._believable_beat(message))
            case NodeNotice() if message.node == node:
                if self._sentences.may_call(node):
                    self._say(f"{node}: {_shorten(message.text)}")
            case EndWarning() if message.node == node:
                self.controller.survey_soon()
            case HashReport() if message.node == node:
                marks = tuple(mark for mark in message.marks if self.registry.owns_rank(node, mark.rank))
                for alarm in self.detectors.replicas.on_marks(now, node, message.generation, marks):
                    self.controller.announce_news(alarm)
                self.aims.tick(now)
            case TrafficReport() if message.node == node:
                self.detectors.network.on_traffic(now, node, message.links)
            case Reach() if message.node == node:
                self.detectors.network.on_reach(message)
            case ScriptImports() if node:
                self._on_imports(node, message)
            case CheckpointListing() if self._speaks_for_job(node, message.generation):
                if self.controller.checkpoint_table:
                    self.controller.checkpoint_table.put_listing(message)
            case TraceAnswer() if node:
                self.tracing.on_trace(
                    node, msgspec.structs.replace(message, trace=self._own_trace(node, message.trace))
                )
            case Post() if node:
                self.registry.record_alive(now, node)
                if self._may_say(node, message.body):
                    self._on_post(now, _shorten_texts(message.body))
                else:
                    what = (
                        "other nodes"
                        if self.registry.has_seat(node)
                        else "other nodes or the job, in which it has no seat"
                    )
                    self._say_once(node, f"ignored what {node} reported about {what}: a node speaks for itself")
                self.links.hold_ack(outbox, message.seq)
        return node

    def _may_say(self, node: str, body: Alarm | Ended | Done) -> bool:
        match body:
            case Alarm():
                return self.registry.may_raise_alarm(node, body) or (
                    self._had_lost_seat(node, body.generation) and self.registry.may_accuse(node, body.suspects)
                )
            case Ended(generation=generation):
                seated = self.registry.has_seat(node) or self._had_lost_seat(node, generation)
                return body.node == node and (generation != self.view.generation or seated)
            case Done():
                return body.node == node

    def _believable_beat(self, beat: Beat) -> Beat:
        """Return a beat without claims about other nodes, or about a generation in which its node has no seat. What it
        calls the phase of its ranks is one line."""
        beat = msgspec.structs.replace(beat, phase=plain_line(beat.phase)) if beat.phase else beat
        may, strains = self.registry.may_accuse, beat.strains
        if not all(may(beat.node, strain.nodes) for strain in strains):
            own = (tuple(node for node in strain.nodes if may(beat.node, (node,))) for strain in strains)
            strains = tuple(msgspec.structs.replace(s, nodes=nodes) for s, nodes in zip(strains, own, strict=True))
        if beat.generation == self.view.generation and not self.registry.has_seat(beat.node):
            bare = Beat(node=beat.node, generation=0, step=-1, at=beat.at, sent=beat.sent)
            return msgspec.structs.replace(bare, strains=strains, links_read=beat.links_read)
        return beat if strains is beat.strains else msgspec.structs.replace(beat, strains=strains)

    def _own_trace(self, node: str, trace: Trace) -> Trace:
        """Return a node's stacks without other nodes' processes, because stacks decide which ranks block the job. Their
        texts are cleaned again, because a node's credentials may be in other hands than its agent's."""
        own = [p for p in trace.processes if p.node == node and self.registry.owns_rank(node, p.rank)]
        flights = [flight for flight in trace.flights if self.registry.owns_rank(node, flight.rank)]
        return clean_told_trace(msgspec.structs.replace(trace, processes=tuple(own), flights=tuple(flights)))

    def _on_hello(self, now: float, hello: Hello, outbox: Outbox) -> None:
        if hello.epoch > self.links.epoch or hello.generation > self.view.generation:
            names_all = self.certificates.knows_all and not self.executor.newest_plan()
            self.controller.on_newer_node(hello, self._nodes_before_loss() if names_all else ())
        fresh = self.links.open_link(hello.node, outbox)
        self.registry.record_hello(now, hello)
        waits = hello.node in self.view.pool
        seated = self._is_seated(hello.node)
        if hello.generation and (waits or not seated) and (fresh or hello.ready):
            self._empty(now, hello)  # before the welcome: after it the node may be without us for `node.lost_s` again
        if fresh:
            self.links.send_welcome(hello.node, self._make_welcome(now))
            if not seated:
                self._send_imports(hello.node)
            self.dispatch.on_relink(hello.node)
            self.aims.on_hello(hello.node)
        if not (hello.generation or waits or seated):
            self._announce_ready(hello)

    def _is_seated(self, node: str) -> bool:
        # One that is coming was evicted, and has to report anew.
        return self.registry.is_seated(node) and node not in self.view.coming

    def _make_welcome(self, now: float) -> Welcome:
        waiting = self.view.waiting_release
        return Welcome(
            at=now,
            ahead_s=self.controller.clock.ahead_s,
            beat_s=self._beat_s,
            releases=(self.view.running_release, *((waiting,) if waiting else ())),
            peers=self.certificates.admitted_peers(),
            run=self.view.job.marked_id,
        )

    def _on_imports(self, node: str, told: ScriptImports) -> None:
        """Record the imports of the script that the node of rank 0 reports, and send them to nodes without ranks."""
        if not self._speaks_for_job(node, told.generation):
            return
        self.registry.record_imports(told.modules)
        for other in self.links.linked_nodes:
            if not self.registry.is_seated(other):
                self._send_imports(other)

    def _speaks_for_job(self, node: str, generation: int) -> bool:
        """Whether the node has rank 0 of the running generation: what concerns all ranks is believed of it alone."""
        seats = self.view.seats
        return generation == self.view.generation and bool(seats) and node == seats[0].node

    def _send_imports(self, node: str) -> None:
        if modules := self.registry.imports:
            self.links.send_message(node, ScriptImports(generation=self.view.generation, modules=modules))

    def _empty(self, now: float, hello: Hello) -> None:
        """Stop the ranks of an old generation on a node that was thought lost and has come back."""
        # The node remembers for ever what it was told under an id, so one is never used again.
        self._stale_id = min(self._stale_id - 1, -int(now * 1e6))
        self._stale[hello.node] = (self._stale_id, hello)
        self.links.send_errand(hello.node, StopHere(id=self._stale_id, generation=hello.generation, grace_s=0.0))

    def _announce_ready(self, hello: Hello) -> None:
        blocked = self.admission.refusal_of(hello.host, hello.identity)
        if not hello.ready and not blocked:  # one that is refused need not get ready first
            return
        self._stale.pop(hello.node, None)
        self.controller.process_event(
            Ready(
                node=hello.node,
                host=hello.host,
                nproc=hello.nproc,
                order=hello.order,
                identity=hello.identity,
                blocked=blocked,
            )
        )

    def _on_beat(self, now: float, beat: Beat) -> None:
        self.registry.record_beat(now, beat)
        if beat.generation == self.view.generation and self.registry.is_seated(beat.node):
            self._read_script_facts(beat)
        if progress := self.detectors.pace.on_beat(now, beat):
            self.executor.on_step(progress)
            self.controller.process_event(progress)
        self.aims.on_beat(now, beat)
        if self.registry.is_seated(beat.node):
            self._figures.on_beat(now, beat)
        if written := self.registry.storage.take_news(now):
            self.controller.process_event(written)
        if links := self.detectors.network.on_beat(beat):
            self.controller.process_event(links)
        if alarm := self.detectors.stalls.on_beat(now, beat):
            self.controller.announce_news(alarm)
        if slow := self.detectors.stalls.measure_slow_time(now):
            self.controller.process_event(slow)
        # What was no training ends with the first step, not with the next report.
        if self.detectors.stalls.hang.resumed and (progress := self.detectors.pace.flush_progress(now)):
            self.controller.process_event(progress)

    def _look_for_ranks(self, now: float, beat: Beat) -> None:
        view = self.view
        under_way = view.phase in (Phase.STARTING, Phase.TRAINING) and not view.has_ended(beat.node)
        seated = under_way and self.registry.is_seated(beat.node)
        watched = (self._reborn, self._deserted) if seated else ()
        for alarm in [d.on_beat(now, view.generation, beat) for d in watched]:
            if alarm:
                self.controller.announce_news(alarm)

    def _read_script_facts(self, beat: Beat) -> None:
        """Record what a beat says about the script: its parallel groups, its loss, whether its work may be replayed."""
        # The node of rank 0 speaks for all: nodes that disagree would contradict each other for ever.
        told = beat.mesh if beat.node == self.view.seats[0].node and not self.view.job.mesh else ()
        if told and told != self.view.mesh:
            self.controller.process_event(MeshReport(mesh=told))
            self.aims.send_aims()
        if self.registry.record_loss_source(beat.loss_source):
            self._say(f"loss: read from {beat.loss_source}")
        if beat.step >= 0:  # before that nobody looks
            self.registry.record_replayable(beat.replayable)

    def _on_post(self, now: float, body: Alarm | Ended | Done) -> None:
        match body:
            case Done(id=id, node=node) as done:
                if self._is_seated(node):  # others tell of a generation that is over
                    self.registry.record_stored(now, done)
                asked, hello = self._stale.get(node, (0, None))
                if hello is None or asked != id:
                    self.dispatch.on_done(done)
                    return
                del self._stale[node]
                if self._had_lost_seat(node, hello.generation):
                    self.registry.record_copies(node, done.copies)
                if done.ok and hello.ready and node not in self.view.pool:
                    self._announce_ready(hello)
                elif not done.ok:  # of no use to anybody while old ranks hold its devices
                    self._stale_id -= 1
                    reason = f"ranks of an old generation do not end: {done.detail}"
                    self.links.send_errand(node, Leave(id=self._stale_id, code=EVICTED, grace_s=0.0, reason=reason))
            case Alarm(kind=Kind.LOSS | Kind.REDONE, stance=Stance.OBSERVE | Stance.NOTIFY) as alarm if (
                self._spiked.is_repeat(now, (alarm.generation, alarm.signature))
            ):
                pass
            case Alarm(kind=Kind.LINES, klass=nonfinite_loss.BAD_LOSS) if self.registry.knows_losses:
                pass  # the loss itself is judged, and not what a rank prints of it
            case Alarm() as alarm:
                if judged := self.detectors.network.judge_alarm(alarm):
                    self.controller.announce_news(judged)
            case Ended() as ended:
                self.controller.announce_news(ended)


def _without_others_copies(message: agent_messages.FromAgent) -> agent_messages.FromAgent:
    """Return a message without copies that lie on other nodes, because each node may report only its own."""
    match message:
        case Hello(node=node, copies=told):
            own = tuple(copy for copy in told if copy.node == node)
            return message if len(own) == len(told) else msgspec.structs.replace(message, copies=own)
        case Post(body=Done(node=node, copies=told) as done):
            own = tuple(copy for copy in told if copy.node == node)
            kept = done if len(own) == len(told) else msgspec.structs.replace(done, copies=own)
            return message if kept is done else msgspec.structs.replace(message, body=kept)
    return message


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]} ... ({len(text):,} characters)"


def _shorten_texts(body: Alarm | Ended | Done) -> Alarm | Ended | Done:
    """Return a post with long texts cut, because they go to the console and the journal. Stacks in it go: only the
    controller puts these into an alarm."""
    told = msgspec.structs.asdict(body)
    texts = {name: _shorten(value) for name, value in told.items() if type(value) is str and len(value) > _TEXT_CHARS}
    short = msgspec.structs.replace(body, **texts) if texts else body
    if not isinstance(short, Alarm) or not (short.evidence or short.stacks):
        return short
    return msgspec.structs.replace(short, evidence=tuple(map(_shorten, short.evidence[:_TEXTS])), stacks=())
