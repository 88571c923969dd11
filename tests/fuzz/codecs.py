"""Every decoder of messages and small files: how it decodes, what type it is of, and how such a value is encoded."""

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.agent import probes
from holdfast.agent.diagnostics import probe_runner
from holdfast.agent.probes.nccl_all_to_all import ExchangeRound
from holdfast.agent.probes.parallel_reference import PlayedStep
from holdfast.agent.probes.probe_team import TeamTask
from holdfast.agent.rank import last_words_judge, stack_tracer
from holdfast.agent.snapshots.parity_encoder import ParityPair
from holdfast.agent.sources.network import WatchedLinks
from holdfast.chaos import rank_orders, undo_guard
from holdfast.chaos.job_observer import ObservedStatus
from holdfast.chaos.matrix.__main__ import CellResult
from holdfast.chaos.network_switch import LinkFaults
from holdfast.checkpoint import peer_transport, snapshot_metadata_record
from holdfast.checkpoint.disk_state_record import DiskNote
from holdfast.checkpoint.doubt_notes import DoubtedRun, DoubtNote
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.manifest import Author, CheckpointPart, Manifest
from holdfast.checkpoint.snapshot_metadata_record import GeneratorStates
from holdfast.checkpoint.storage_owner import StorageOwner
from holdfast.checkpoint.tls_relay_client import RelayStart
from holdfast.checkpoint.trainer_checkpoint_export.trainer_checkpoint_converter import Exported
from holdfast.checkpoint.trainer_checkpoints import TrainerCheckpoint, Verified
from holdfast.cli.launch.stoppable_wait import WaitNote
from holdfast.cli.run_dirs.remembered_imports import RememberedImports
from holdfast.client.boot import tcp_store_server
from holdfast.client.elastic.layer_state import UnitHeader
from holdfast.client.elastic.recovery_settlement import RankReport
from holdfast.controller.access.block_list_file import Entries
from holdfast.controller.access.caller_admission import UserToken
from holdfast.controller.access.enrolment_token_api import MintBody
from holdfast.controller.access.enrolment_tokens import TokenRecord
from holdfast.controller.actions import launch_plan
from holdfast.controller.api_description import TraceBody
from holdfast.controller.order_admission import OrderBody
from holdfast.controller.user_hooks import HookProgress
from holdfast.core.diagnose.fleet_baseline import MeasurementHistory
from holdfast.dash.page_server import PageCode, PageOrder, StackQuestion
from holdfast.decoding import from_json, from_msgpack
from holdfast.fleet import kubernetes_lease
from holdfast.fleet.kubernetes_fleet import FleetRecords
from holdfast.fleet.pod_manifest import PodShape
from holdfast.fleet.slurm_node_file import SlurmRecords
from holdfast.fleet.slurm_node_presence import NodeRecord
from holdfast.journal import entry_chain, file_lease, high_water_mark
from holdfast.linux.preimported_fork import Program
from holdfast.logs import model_request, opinion_process
from holdfast.logs.past_cases import PastCase
from holdfast.model.decider_events import Event
from holdfast.model.job_and_seats import Dims
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.message_bounds import Number
from holdfast.model.node_errands import Done, LaunchHere, Leave
from holdfast.model.observation import Departure
from holdfast.model.probe_findings import PairMeeting
from holdfast.model.rank_traces import Frame
from holdfast.wire import (
    agent_messages,
    holder_messages,
    holder_zygote_messages,
    program_fork_server,
    rank_keeper_messages,
    run_and_node_specs,
    survivor_messages,
)
from holdfast.wire.credentials import enrolment
from holdfast.wire.credentials.admitted_peers import AdmittedPeers
from holdfast.wire.rank_keeper_messages import ArenaRequest
from holdfast.wire.rank_memory import flight_log_reader
from holdfast.wire.releases import secret_file_search
from holdfast.wire.releases.release_tree_sync import TreeIndex

Codec = tuple[Callable[[bytes], Any], Any, Callable[[Any], bytes]]
PACK = msgspec.msgpack.encode
TEXT = msgspec.json.encode


def _json(kind: Any) -> Codec:
    return (lambda content: from_json(content, kind)), kind, TEXT


def _msgpack(kind: Any) -> Codec:
    return (lambda content: from_msgpack(content, kind)), kind, PACK


CODECS: dict[str, Codec] = {
    "from agent": (agent_messages.decode_from_agent, agent_messages.FromAgent, PACK),
    "from controller": (agent_messages.decode_from_controller, agent_messages.ControllerPacket, PACK),
    "to holder": (holder_messages.to_holder, holder_messages.ToHolder, PACK),
    "to agent": (holder_messages.to_agent, holder_messages.ToAgent, PACK),
    "to keeper": (rank_keeper_messages.to_keeper, rank_keeper_messages.ToKeeper, TEXT),
    "from keeper": (rank_keeper_messages.from_keeper, rank_keeper_messages.FromKeeper, TEXT),
    "to zygote": (holder_zygote_messages.to_zygote, holder_zygote_messages.ForkRank, PACK),
    "from zygote": (holder_zygote_messages.from_zygote, holder_zygote_messages.FromZygote, PACK),
    "fork": _msgpack(Program),
    "forked": _msgpack(program_fork_server.ForkAnswer),
    "layout": _msgpack(ImageLayout),
    "ask": _json(peer_transport.PeerRequest),
    "reply": _json(peer_transport.PeerReply),
    "author": _json(Author),
    "run": _json(run_and_node_specs.RunSpec),
    "remembered imports": _json(RememberedImports),
    "a rank's imports": _json(tuple[str, ...]),
    "node": _json(run_and_node_specs.NodeSpec),
    "listening": _json(run_and_node_specs.ControllerAddress),
    "ended": _json(run_and_node_specs.RunEnd),
    "full disk": _json(run_and_node_specs.FullDiskNote),
    "waiting": _json(WaitNote),
    "challenge": _json(enrolment.Challenge),
    "enrol": _json(enrolment.EnrolmentRequest),
    "enrolled": _json(enrolment.EnrolmentGrant),
    "order": _json(OrderBody),
    "order on the page": _json(PageOrder),
    "question for stacks": _json(StackQuestion),
    "trace": _json(TraceBody),
    "plan": (launch_plan._DECODER, launch_plan.LaunchPlan, TEXT),
    "past": _json(dict[str, MeasurementHistory]),
    "mesh": _json(Dims),
    "leaving": _json(Leave),
    "store": _json(tcp_store_server.StoreRequest),
    "py-spy": (stack_tracer._dump, list[stack_tracer._SpyThread], TEXT),
    "probe": (probe_runner._told, probes.ProbeLine, TEXT),
    "team step": _json(PlayedStep),
    "team exchange": _json(ExchangeRound),
    "chaos order": _json(rank_orders.RankOrder),
    "departure": _json(Departure),
    "done": _json(Done),
    "launch": _json(LaunchHere),
    "peers": _json(AdmittedPeers),
    "arena request": _json(ArenaRequest),
    "pair of a parity": _json(ParityPair),
    "state on disk": _msgpack(DiskNote),
    "watched links": _json(WatchedLinks),
    "pair test": _json(PairMeeting),
    "team task": _json(TeamTask),
    "to the judge": (last_words_judge.to_judge, last_words_judge.JudgeRequest, PACK),
    "of the judge": (last_words_judge.to_agent, last_words_judge.Answer, PACK),
    "doubt": _json(DoubtNote),
    "doubted runs": _json(tuple[DoubtedRun, ...]),
    "owner": _json(StorageOwner),
    "manifest": _json(Manifest),
    "part": _json(CheckpointPart),
    "generators": _msgpack(GeneratorStates),
    "generators and more": _msgpack(tuple[GeneratorStates, bytes]),
    "metadata": (snapshot_metadata_record._decode, snapshot_metadata_record.ImageMetadata, PACK),
    "relay": _json(RelayStart),
    "verified": _json(Verified),
    "trainer checkpoints": _json(list[TrainerCheckpoint]),
    "exported": _json(Exported),
    "unit": _json(UnitHeader),
    "rank report": _msgpack(RankReport),
    "node tokens": _json(dict[str, TokenRecord]),
    "people": _json(tuple[UserToken, ...]),
    "blocked": _json(Entries),
    "mint": _json(MintBody),
    "hooked": _json(HookProgress),
    "code of the page": _json(PageCode),
    "pods": _json(FleetRecords),
    "nodes on Slurm": _json(SlurmRecords),
    "note of a lease": _json(kubernetes_lease._Note),
    "lease in files": _json(file_lease._Content),
    "pod": _json(PodShape),
    "nodes in Slurm": _json(dict[str, NodeRecord]),
    "event": (entry_chain._EVENT, Event, PACK),
    "decision": (entry_chain._DECISION, Decision, PACK),
    "entries": _json(list[Entry]),
    "mark": _msgpack(high_water_mark._Half),
    "serial": _json(tuple[str, str, str]),
    "serials": _json(dict[str, str]),
    "handed over": _msgpack(dict[str, bytes]),
    "opinion request": (opinion_process.to_request, opinion_process.Request, TEXT),
    "opinion": (opinion_process.to_reply, opinion_process.OpinionReply, TEXT),
    "reply of a model": _json(model_request._Reply),
    "past cases": _json(tuple[PastCase, ...]),
    "flights": _json(list[tuple[Number, bool, str, list[Frame]]]),
    "flight": _json(flight_log_reader._FlightRecord),
    "survivor": (survivor_messages.to_agent, survivor_messages.SurvivorState, TEXT),
    "to a survivor": (survivor_messages.to_rank, survivor_messages.SurvivorOrder, TEXT),
    "tree": _json(TreeIndex),
    "run of any version": _json(secret_file_search._RunNote),
    "persons of any version": _json(list[secret_file_search._PersonNote]),
    "chaos done": _json(rank_orders.RankDone),
    "chaos links": _json(dict[str, LinkFaults]),
    "chaos undo": (undo_guard._asked, undo_guard.KeepUndo | undo_guard.RunUndo, TEXT),
    "chaos status": _json(ObservedStatus),
    "chaos cell": _json(CellResult),
}
