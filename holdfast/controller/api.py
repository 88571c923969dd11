"""The controller's HTTP API: WebSocket for agents, JSON for people, text for Prometheus."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from holdfast.controller import release_api
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import (
    CALLER,
    Admit,
    Caller,
    Proved,
    Refusal,
    Right,
    refuse_foreign_page,
)
from holdfast.controller.access.enrolment_token_api import ON_ONE_HOST, TokenMinting
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.controller.access.user_ca_nodes import CertificateEnrolment
from holdfast.controller.agent_ingest import AgentIngest
from holdfast.controller.api_description import JobStacks, Status, TraceBody, describe_api
from holdfast.controller.composition import BuiltController
from holdfast.controller.control_loop import Controller
from holdfast.controller.metrics import render_metrics
from holdfast.controller.node_views import view_nodes
from holdfast.controller.order_admission import NO_SUCH_ORDER, OrderBody, OrderReceipt, describe_effect, order_refusal
from holdfast.controller.rank_view import find_seat, view_rank
from holdfast.controller.stack_tracing import StackTracing
from holdfast.core.diagnose import blocking_ranks
from holdfast.core.diagnose.blocking_ranks import BlockingRanks
from holdfast.core.incident.incident_text import count_failures
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.core.record.release_pace import describe_paces
from holdfast.decoding import from_json
from holdfast.logs.secret_masking import HIDDEN, make_secret_masker
from holdfast.model.decider_events import Order
from holdfast.model.job_and_seats import world_size
from holdfast.model.job_phase import Phase
from holdfast.wire.credentials import enrolment, mutual_tls
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES

_MAX_BODY = 1 << 16
_MAX_ENTRIES = 1000
_MAX_TRACE_S = 60.0
_MOST_SEQ = 1 << 63
_SHUTDOWN_S = 1.0
_AGENT = "/agent"
_ARCHIVES = "/api/v1/releases/"
_GUARDED = web.RequestKey("guarded", bool)  # the guard has seen this request


def status_of(controller: Controller) -> Status:
    view, account = controller.view, controller.ledger.make_account(controller.clock())
    waiting, floor = view.waiting_release, controller.aims.floor
    slow, slows = account.describe_slow(view.generation, controller.detectors.stalls.slow.tell_present())
    return Status(
        run_id=view.job.run_id,
        phase=view.phase,
        reason=controller.reason,
        queued=(queued := dict(view.queued)),
        now=controller.describe_present(),
        generation=view.generation,
        step=controller.reached_step,
        ettr=account.ettr,
        at_most=account.at_most,
        hour_ettr=account.hour_ettr,
        since=account.since,
        wall_s=account.wall_s,
        run_s=account.spent_s(TimeUse.RUN),
        incidents=view.incidents,
        failures=count_failures(account.incidents) + view.open_failures,
        last_incident=account.incidents[-1].sentence if account.incidents else "",
        last_incident_at=account.incidents[-1].alarm_at if account.incidents else 0.0,
        incident_now=view.open_cause,
        slow=slow,
        slows=slows,
        floor=floor.floor,
        copies=floor.copies,
        copy_age=floor.age_steps,
        pacing=floor.pacing,
        disk=floor.disk.newest_kept,
        behind="; ".join(filter(None, (floor.behind, floor.lone, floor.disk.missed))),
        storage=controller.registry.storage.newest,
        mesh=",".join(f"{name}={size}" for name, size in view.mesh),
        nodes=view_nodes(controller, queued),
        seq=controller.seq,
        changes=len(account.changes),
        last_change=account.changes[-1].sentence if account.changes else "",
        redone=controller.ledger.count_redone(controller.reached_step),
        parted=view.phase is Phase.TRAINING and view.progress is not None and view.progress.parted,
        release=view.running_release.number,
        source=view.running_release.source,
        waiting=waiting.number if waiting else 0,
        waiting_until=view.waits_until,
        held=view.held_by,
        asking=view.question,
        asks_until=view.asks_until,
        pace=describe_paces(account.paces),
        lateness=controller.detectors.stalls.slow.lateness.encode(world_size(view.seats)),
        summary=view.summary,
    )


class ApiEntrance(NamedTuple):
    """One way into the API: who is admitted, and where requests are audited."""

    admit: Admit
    audit: AuditLog
    enrolling: NodeEnrolment | CertificateEnrolment | None = None  # of hosts that are not nodes yet
    proved: Proved | None = None  # told of connections whose caller is proved; None: all are
    minting: TokenMinting | None = None  # of tokens for such hosts; None: there are none


def make_api(built: BuiltController, door: ApiEntrance) -> web.Application:
    """Build the web application; it gives the same answers at every entrance."""
    app = web.Application(middlewares=[_guard_routes(door)], client_max_size=_MAX_BODY)
    app.on_response_prepare.append(_close_unguarded)
    controller = built.controller

    async def status(request: web.Request) -> web.Response:
        return _json_response(msgspec.structs.replace(status_of(controller), right=_right_name(CALLER.get())))

    async def report(request: web.Request) -> web.Response:
        return _json_response(report_of(controller.ledger.make_account(controller.clock())))

    async def entries(request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "0"))
        except ValueError:
            after = -1
        if not 0 <= after < _MOST_SEQ:
            return _error_response(400, "after must be a number: the sequence number of the last entry you have")
        if controller.is_over:
            return _error_response(503, "the job has ended, and its journal is closed; holdfast report reads it")
        controller.journal.flush()
        return _json_response(_redact_for_caller(list(islice(controller.journal.read(after), _MAX_ENTRIES))))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=render_metrics(controller), content_type="text/plain", charset="utf-8")

    async def openapi(request: web.Request) -> web.Response:
        return _json_response(describe_api())

    app.router.add_get(_AGENT, _agent_route(built.ingest, door.audit))
    app.router.add_get("/api/v1/status", status)
    app.router.add_get("/api/v1/ranks/{rank:[0-9]{1,9}}", _rank_route(controller))
    app.router.add_get("/api/v1/report", report)
    app.router.add_get("/api/v1/entries", entries)
    app.router.add_post("/api/v1/orders", _order_route(controller, door.audit))
    # A route of its own: a controller that does not know it must not take the order.
    app.router.add_post("/api/v1/orders/preview", _order_route(controller, door.audit, preview=True))
    app.router.add_get("/api/v1/releases", _releases_route(controller))
    app.router.add_get(f"{_ARCHIVES}{COMPILED_ARCHIVES}", _compiled_route(controller))
    app.router.add_get(f"{_ARCHIVES}{{digest}}", _archive_route(controller))
    app.router.add_post("/api/v1/trace", _trace_route(controller, built.tracing))
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", openapi)
    minting = door.minting or TokenMinting(door.audit, None, ON_ONE_HOST)
    app.router.add_post("/api/v1/node-tokens", minting.mint_route)
    if door.enrolling is not None:
        app.router.add_get(enrolment.PATH, door.enrolling.challenge_route)
        app.router.add_post(enrolment.PATH, door.enrolling.enrol_route)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """Make the app's runner. It never decompresses bodies: a stranger's megabyte may unpack to a gigabyte."""
    return web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S, auto_decompress=False)


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _agent_route(ingest: AgentIngest, audit: AuditLog) -> Answer:
    async def agent(request: web.Request) -> web.StreamResponse:
        return await ingest.serve_agent(request, audit)

    return agent


def _order_route(controller: Controller, audit: AuditLog, *, preview: bool = False) -> Answer:
    async def take(request: web.Request) -> web.Response:
        try:
            body = from_json(await request.read(), OrderBody)
        except msgspec.DecodeError as e:
            return _error_response(400, f'send an order such as {{"verb": "stop"}}: {e}')
        caller, view = CALLER.get(), controller.view
        order, denied = body.make_order(caller.name), _missing_right(caller, body.verb)
        why = denied or (await _order_fault(controller, order) if order else NO_SUCH_ORDER)
        if preview and order and not why:
            return _json_response(OrderReceipt(seq=controller.seq, next=describe_effect(view, order), taken=False))
        audit.record_order(caller.name, caller.origin, body, why)
        if why or order is None:
            return _error_response(403 if denied else 400, why)
        if body.now and body.verb == "stop" and view.phase is Phase.ENDING:
            controller.end_at_once()  # it is stopping already, and takes too long for somebody
        next = describe_effect(view, order)
        controller.process_event(order)
        return _json_response(OrderReceipt(seq=controller.seq, next=next))

    return take


async def _order_fault(controller: Controller, order: Order) -> str:
    """Return why the order cannot be taken; "" if it can."""
    if refusal := order_refusal(controller.view, order, controller.links.linked_nodes):
        return refusal.text
    return release_api.update_fault(controller, order) or await release_api.signature_fault(controller, order)


def _rank_route(controller: Controller) -> Answer:
    async def rank(request: web.Request) -> web.Response:
        found = view_rank(controller, int(request.match_info["rank"]))
        return _json_response(found) if found else _error_response(404, _no_such_rank(controller))

    return rank


def _releases_route(controller: Controller) -> Answer:
    async def releases(request: web.Request) -> web.Response:
        return _json_response(_redact_for_caller(release_api.release_overview(controller)))

    return releases


def _archive_route(controller: Controller) -> Answer:
    async def archive(request: web.Request) -> web.StreamResponse:
        found = release_api.release_archive(controller, request.match_info["digest"])
        return found or _error_response(404, "no release has this digest; GET /api/v1/releases lists all releases")

    return archive


def _compiled_route(controller: Controller) -> Answer:
    async def compiled(request: web.Request) -> web.Response:
        digest = await asyncio.to_thread(release_api.compiled_digest, controller)
        return web.Response(text=digest) if digest else _error_response(404, "no rank of this host has compiled code")

    return compiled


def _trace_route(controller: Controller, tracing: StackTracing) -> Answer:
    async def trace(request: web.Request) -> web.Response:
        try:
            body = from_json(await request.read() or b"{}", TraceBody)
        except msgspec.DecodeError as e:
            return _error_response(400, f'send a request such as {{"deadline_s": 5, "native": false}}: {e}')
        if not 0 < body.deadline_s <= _MAX_TRACE_S:
            return _error_response(400, f"deadline_s must be above 0 and at most {_MAX_TRACE_S:g}")
        seats, at = controller.view.seats, controller.clock()
        only = None if body.rank is None else find_seat(seats, body.rank)
        if body.rank is not None and only is None:
            return _error_response(400, _no_such_rank(controller))
        nodes = tuple(seat.node for seat in seats) if only is None else (only.node,)
        traces = await tracing.take_traces(body.deadline_s, body.native, nodes)
        naming = blocking_ranks.find_blocking(traces, seats, controller.view.mesh) if only is None else BlockingRanks()
        hang = controller.detectors.stalls.hang
        usual_s = hang.usual_step_s if hang.step >= 0 else 0.0  # the first one takes longer
        times = {"usual_step_s": usual_s, "since_step_s": max(0.0, controller.clock() - hang.moved_at)}
        return _json_response(JobStacks(at=at, naming=naming, traces=traces, **times))

    return trace


def _guard_routes(door: ApiEntrance) -> Any:
    """Return middleware that admits only callers with a proved identity, each only to the routes that it may use."""

    @web.middleware
    async def guard(request: web.Request, handler: Answer) -> web.StreamResponse:
        request[_GUARDED] = True
        enrols = request.path == enrolment.PATH and door.enrolling is not None and "Origin" not in request.headers
        caller = refuse_foreign_page(request, mutual_tls.CONTROLLER) if enrols else door.admit(request)
        if caller is None:
            return await _answer_request(request, handler)  # whoever comes to enrol proves itself there; no page does
        if isinstance(caller, Refusal):
            door.audit.record_refusal(request.remote or "", f"{request.method} {request.path}", caller.why)
            answer = _error_response(caller.status, caller.why)
            answer.force_close()  # or he asks a thousand times a second by a link that he has
            return answer
        if why := _why_forbidden(caller, request):
            door.audit.record_order(caller.name, caller.origin, {"path": request.path}, why)
            return _error_response(403, why)
        CALLER.set(caller)
        if door.proved:
            door.proved(request.transport)
        return await _answer_request(request, handler)

    return guard


async def _close_unguarded(request: web.Request, answer: web.StreamResponse) -> None:
    """Close the link after an answer that the server gives by itself, as to a header Expect that it does not know: a
    caller who is not known could ask for as many as it likes by one link."""
    if _GUARDED not in request:
        answer.force_close()


async def _answer_request(request: web.Request, handler: Answer) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.RequestPayloadError:
        return _error_response(400, "the body is incomplete, or not encoded as its headers say")
    except web.HTTPRequestEntityTooLarge as e:
        answer = _error_response(413, e.text or "the body is too large")
        answer.force_close()  # or the rest of it would be read
        return answer


def _why_forbidden(caller: Caller, request: web.Request) -> str:
    """Return why this caller may not make this request; "" if it may."""
    if request.path == _AGENT:
        return "" if caller.node else f"{caller.name} is not a node of this job"
    archives = request.path.startswith(_ARCHIVES)
    if caller.right is None:  # a node
        return "" if archives and request.method == "GET" else "a node may only fetch releases"
    if request.method not in ("GET", "HEAD") and caller.right < Right.OPERATE:
        return f"{caller.name} may only look, not give orders"
    return f"{caller.name} needs the right admin to fetch releases" if archives and caller.right < Right.ADMIN else ""


def _missing_right(caller: Caller, verb: str) -> str:
    """Return in words which right the caller lacks for this order, or "". Updates and rollbacks need ADMIN."""
    needed = Right.ADMIN if verb in ("update", "rollback") else Right.OPERATE
    if (caller.right or 0) >= needed:
        return ""
    return f"{caller.name} may not order '{verb}': that needs the right {needed.name.lower()}"


def _right_name(caller: Caller) -> str:
    return caller.right.name.lower() if caller.right else ""


def _no_such_rank(controller: Controller) -> str:
    count = world_size(controller.view.seats)
    return f"the newest launch has {count} ranks, from 0" if count else "no ranks were launched yet"


def _redact_for_caller(value: object) -> object:
    """Hide the values of environment variables, and secrets in command lines, from callers who may not set them."""
    if CALLER.get().right is Right.ADMIN:
        return value  # `holdfast update` makes the next release of the last one
    return make_secret_masker().mask_commands(_hide_env_values(msgspec.to_builtins(value)))


def _hide_env_values(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return [_hide_env_values(inner) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    hidden = {"env": dict.fromkeys(tree["env"], HIDDEN)} if isinstance(tree.get("env"), dict) else {}
    return {key: _hide_env_values(inner) for key, inner in tree.items()} | hidden


def _json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error_response(status: int, sentence: str) -> web.Response:
    said = sentence.encode("utf-8", "replace").decode()  # it may quote a header of any bytes
    return _json_response({"error": said}, status)
