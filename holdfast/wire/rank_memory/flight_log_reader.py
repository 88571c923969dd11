"""Reads a rank's flight log from shared memory."""

import contextlib
from typing import Any

import msgspec

from holdfast.decoding import from_json
from holdfast.model.message_bounds import Number
from holdfast.model.rank_traces import Arrival, Channel, Collective, Flight, Frame, Thread
from holdfast.wire.rank_memory.flight_log_writer import (
    ASKED,
    ASKED_AT,
    HALF_BYTES,
    REGION_BYTES,
    STACKS_AT,
    STACKS_BYTES,
    TOLD_AT,
    Buffer,
    ChannelState,
    GroupArrival,
    GroupState,
    get_record,
)


class _FlightRecord(msgspec.Struct, array_like=True):
    generation: int
    rank: int
    pid: int
    at: float
    groups: list[GroupState]
    arrivals: list[GroupArrival]
    channels: list[ChannelState] | None
    waits: bool
    unbegun: tuple[float, float]
    gpu: str


class FlightReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last wrote about its collectives; times are by the controller's clock."""

    generation: int
    pid: int
    at: float  # when it told it
    flight: Flight
    arrivals: tuple[Arrival, ...]  # the newest of those that other ranks tell of too
    gpu: str  # UUID of the rank's GPU; "": not known


def read_flight(buf: Buffer, at: int, node: str, offset_s: float = 0.0) -> FlightReport | None:
    """Return a flight log's newest whole record, or None; `offset_s` is the controller's clock minus the host's."""
    halves = [get_record(buf, at + TOLD_AT + half * HALF_BYTES, HALF_BYTES) for half in (0, 1)]
    for _, body in sorted((half for half in halves if half), reverse=True):
        with contextlib.suppress(msgspec.DecodeError):  # a rank can write anything there
            report = _make_report(from_json(body, _FlightRecord), node, offset_s)
            return msgspec.convert(msgspec.to_builtins(report), FlightReport)  # with numbers that nobody can have made?
    return None


def _make_report(body: _FlightRecord, node: str, offset_s: float) -> FlightReport:
    groups = tuple(_make_collective(group, offset_s) for group in body.groups)
    return FlightReport(
        generation=body.generation,
        pid=body.pid,
        at=body.at + offset_s,
        flight=Flight(
            node=node,
            rank=body.rank,
            at=body.at + offset_s,
            groups=groups,
            channels=None if body.channels is None else tuple(_make_channel(*one) for one in body.channels),
            waits=body.waits,
            unbegun_since=body.unbegun[0] + offset_s if body.unbegun[0] else 0.0,
            unbegun_s=body.unbegun[1],
        ),
        arrivals=tuple(Arrival(group, seq, at + offset_s, held_s) for group, seq, at, held_s in body.arrivals),
        gpu=body.gpu,
    )


def _make_collective(state: GroupState, offset_s: float) -> Collective:
    name, entered, completed, op, ended_op, at, expires_at, gpu = state
    started, started_op, since, unbegun_s = gpu or (None, "", 0.0, 0.0)
    return Collective(
        group=name,
        entered=entered,
        completed=completed,
        op=op,
        ended_op=ended_op,
        at=at + offset_s,
        expires_at=expires_at + offset_s if expires_at else 0.0,
        started=started,
        started_op=started_op,
        unbegun_since=since + offset_s if since else 0.0,
        unbegun_s=unbegun_s,
    )


def _make_channel(group: str, source: int, target: int, posted: int, *rest: Any) -> Channel:
    begun, ended, tag, size_bytes = rest
    return Channel(
        group=group,
        source=source,
        target=target,
        posted=posted,
        begun=begun,
        ended=ended,
        tag=tag,
        size_bytes=size_bytes,
    )


def clear_flight(buf: Buffer, at: int) -> None:
    """Empty the log before a launch."""
    buf[at : at + REGION_BYTES] = bytes(REGION_BYTES)


def ask_for_stacks(buf: Buffer, at: int) -> int:
    """Ask the rank for its own stacks; return the number of this request, for read_stacks."""
    number: int = ASKED.unpack_from(buf, at + ASKED_AT)[0] + 1
    buf[at + ASKED_AT : at + ASKED_AT + ASKED.size] = ASKED.pack(number)
    return number


def read_stacks(buf: Buffer, at: int, number: int) -> tuple[Thread, ...] | None:
    """Return the rank's stacks, or None until the rank has answered this request."""
    found = get_record(buf, at + STACKS_AT, STACKS_BYTES)
    if found is None or found[0] != number:
        return None
    try:
        threads = from_json(found[1], list[tuple[Number, bool, str, list[Frame]]])
    except msgspec.DecodeError:
        return None
    return tuple(Thread(tid=tid, main=main, name=name, frames=tuple(frames)) for tid, main, name, frames in threads)
