"""What requests and answers of the API hold, and its description in the words of OpenAPI."""

from typing import Any

import msgspec

from holdfast.controller.access.enrolment_token_api import MintBody, MintedToken
from holdfast.controller.node_views import NodeView
from holdfast.controller.order_admission import OrderBody, OrderReceipt
from holdfast.controller.rank_view import RankView
from holdfast.core.diagnose.blocking_ranks import BlockingRanks
from holdfast.core.record.job_report import Report
from holdfast.core.record.release_history import ReleaseOverview
from holdfast.model.journal_entry import Entry
from holdfast.model.message_bounds import Number
from holdfast.model.rank_traces import Trace
from holdfast.model.stored_checkpoint_report import StorageReport
from holdfast.wire.agent_messages import TOKEN_HEADER
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES

_ARCHIVES = "/api/v1/releases/"
# Besides what an operation says itself; the body names the fault.
_ANY_ANSWERS = {
    "400": {"description": "not understood, and why"},
    "401": {"description": "no token that counts"},
    "403": {"description": "the token does not allow it, or another site's page asks"},
    "413": {"description": "too large"},
    "429": {"description": "asked too often"},
}


class Status(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    phase: str
    reason: str  # of the newest decision that has one
    now: str  # what the job is doing
    generation: int
    step: int  # newest that every rank has made
    ettr: float | None  # None: no step was ever seen, so it is not known
    hour_ettr: float | None = None  # of the last hour; None: there was none yet
    wall_s: float
    run_s: float = 0.0  # in which ranks ran, of a job in which no step was ever seen
    incidents: int  # one that is open included
    last_incident: str  # the newest that is over
    last_incident_at: float = 0.0  # when its alarm was heard; 0: there was none
    incident_now: str = ""  # what has happened in the open one so far; "": none is open
    floor: int  # newest step that the job can go back to after the loss of a node; -1: none is on peers
    copies: int = 1  # of every state of that step on peers
    copy_age: int = -1  # steps between that step and the newest snapshot; -1: none is on peers
    pacing: str = ""  # of copies: "gaps" between collectives, or "duty" and why; "": none has begun
    disk: int  # newest step that lies on the disks of all nodes; -1: none does
    behind: str  # why copies on peers do not keep up or are too few, and which nodes cannot write to their disks
    storage: StorageReport | None = None  # what was last written there; None: no node has told of any
    nodes: tuple[NodeView, ...]
    queued: dict[str, str] = {}  # nodes that wait in the cluster's queue, each with the cluster's reason
    seq: int = 0  # of the journal's newest entry
    failures: int = 0  # of all incidents; one that fails again before its next step is the same incident
    changes: int = 0  # planned restarts
    last_change: str = ""
    slow: str = ""  # who was said to be slow in this generation, and when
    slows: bool = False  # and is so still
    redone: int = 0  # steps that had been made before
    at_most: str = ""  # as in the report, before the ETTR
    parted: bool = False  # every rank has left its process groups or returned
    release: int = 0  # that runs
    source: str = ""  # of it
    waiting: int = 0  # the release that is staged and waits; 0: none does
    waiting_until: float | None = None  # when it gets a restart of its own
    held: str = ""  # who holds the job
    asking: str = ""  # what a person is asked
    asks_until: float | None = None
    mesh: str = ""  # parallel groups, as in --mesh; "": nobody told
    since: str = ""  # what steps are counted from; "": they have numbers of their own
    pace: tuple[str, ...] = ()  # of each release in steady training, in words; the report has the figures
    lateness: str = ""  # a character for each rank, as core/diagnose/lateness_map.py has it; "": not known
    summary: str = ""  # the part of the newest reason that says what the job does now
    right: str = ""  # of who asks: "view", "operate" or "admin"


class TraceBody(msgspec.Struct, frozen=True, kw_only=True):
    deadline_s: float = 5.0
    native: bool = False  # frames of C and C++ too, which stops each rank for a moment
    rank: Number | None = None  # only of the node of this rank; nobody is named then


class JobStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of all processes, and the ranks that block the others if the job stands still."""

    at: float
    naming: BlockingRanks
    traces: tuple[Trace, ...]
    usual_step_s: float = 0.0  # what a step usually takes; 0: not known
    since_step_s: float = 0.0  # how long ago the newest step was made


def describe_api() -> dict[str, Any]:
    """Return the OpenAPI description, with schemas made from the structs that requests and answers use."""
    shown = {"status": Status, "report": Report, "releases": ReleaseOverview, "entries": list[Entry]}
    sent = (RankView, JobStacks, TraceBody, MintedToken, MintBody, OrderReceipt, OrderBody)
    refs, schemas = msgspec.json.schema_components([*shown.values(), *sent], ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (name, _), ref in zip(shown.items(), refs, strict=False):
        content = {"application/json": {"schema": ref}}
        paths[f"/api/v1/{name}"] = {"get": {"responses": {"200": {"description": name, "content": content}}}}
    number = {"name": "after", "in": "query", "schema": {"type": "integer"}, "description": "entries after this one"}
    paths["/api/v1/entries"]["get"]["parameters"] = [number]
    *_, viewed, traced, trace_body, minted, mint_body, taken, order_body = (
        {"application/json": {"schema": ref}} for ref in refs
    )
    body = {"required": True, "content": order_body}
    done = {"200": {"description": "taken, and what happens next", "content": taken}}
    paths["/api/v1/orders"] = {"post": {"requestBody": body, "responses": done}}
    paths["/api/v1/orders/preview"] = paths["/api/v1/orders"]  # as if it were taken
    found = {"200": {"description": "where all processes are, and whom they wait for", "content": traced}}
    paths["/api/v1/trace"] = {"post": {"requestBody": {"content": trace_body}, "responses": found}}
    rank = {"name": "rank", "in": "path", "required": True, "schema": {"type": "integer"}}
    known = {"200": {"description": "what its node told last of a rank", "content": viewed}}
    known |= {"404": {"description": "no such rank was launched"}}
    paths["/api/v1/ranks/{rank}"] = {"get": {"parameters": [rank], "responses": known}}
    made = {"200": {"description": "a token that enrols one node, once", "content": minted}}
    paths["/api/v1/node-tokens"] = {"post": {"requestBody": {"content": mint_body}, "responses": made}}
    digest = {"name": "digest", "in": "path", "required": True, "schema": {"type": "string"}}
    archive = {"200": {"description": "the tree", "content": {"application/x-tar": {}}}, "404": {"description": "none"}}
    paths["/api/v1/releases/{digest}"] = {"get": {"parameters": [digest], "responses": archive}}
    told = {"200": {"description": "the digest of its archive", "content": {"text/plain": {}}}, "404": archive["404"]}
    paths[f"{_ARCHIVES}{COMPILED_ARCHIVES}"] = {"get": {"responses": told}}
    paths["/metrics"] = {"get": {"responses": {"200": {"description": "Prometheus text"}}}}
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"] = _ANY_ANSWERS | operation["responses"]
    key = {"type": "apiKey", "in": "header", "name": TOKEN_HEADER}
    return {
        "openapi": "3.1.0",
        "info": {"title": "holdfast controller", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": key}},
        "security": [{"token": []}],
    }
