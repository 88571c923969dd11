"""A thread in the rank that records each second which collectives the rank has entered, and its stacks on request.

The records lie in shared memory, so the node can read them when the rank is stopped or can no longer run Python. The
thread is unknown to `threading`, takes no signals and no lock, and does not keep the process from ending. A dump of
torch's recorder takes half a millisecond for 64 entries. The thread holds the GIL meanwhile, so no fork happens then.
A large recorder, as pipelines get it, is dumped less often, and once more soon after the rank has come to a stand.
"""

import _thread
import os
import signal
import sys
import time
from types import FrameType

from holdfast.client.training.gpu_collective_progress import (
    Dump,
    Entry,
    GpuProgress,
    PgStatus,
    find_gpu,
    has_ended,
    held_gpu_s,
    idle_gpu,
    is_of_nccl,
    last_completed,
    operation_name,
)
from holdfast.client.training.network_looks import NetworkLooks, step_reader
from holdfast.client.training.p2p_counts import find_counts
from holdfast.client.training.p2p_progress import MessageProgress, find_groups_across, leave_batches_out
from holdfast.client.training.set_up_times import SetUpWatch
from holdfast.client.training.torch_recorder_dumps import load_dump
from holdfast.linux import own_process_settings
from holdfast.wire.rank_memory.flight_log_writer import NAME_CHARS, ChannelState, FlightLog, GroupArrival, GroupState
from holdfast.wire.rank_memory.network_look_writer import NetworkLookLog
from holdfast.wire.rank_memory.slot_writer import open_slot_memory

_LOOK_S = 0.25  # how often a question for stacks is looked for
_SHARE = 0.002  # of a core that dumps may take: a large buffer is dumped less often
_RARELY_S = 10.0  # but not more rarely than this
_STANDS_S = 1.0  # a rank that has not moved for so long stands; recorded again after twice as long, and so on
_KEEP = 16  # arrivals of one group
_A_SECOND = 6  # arrivals of one group, about
_SPREAD, _WHOLE = 0x9E3779B1, 1 << 32  # multiples of the golden ratio of it lie evenly, whatever they are counted by
_DEPTH = 64  # frames of one thread
_NAME_CHARS = 200  # of a function and of a file
_NCCL_MS, _OTHER_MS = 600_000, 1_800_000  # torch's timeouts of collectives, for a recorder that does not tell them

_NEWEST: list["FlightRecorder"] = []  # the one that records


def start_recorder(place: str, generation: int, rank: int, slot: str = "") -> SetUpWatch | None:
    """Start recording at `place`, "<path of the shared memory>:<offset of the log>". Return the watch that measures the
    script's set-up; None if no log can be opened at `place`. With the place of its slot, look at the network, too."""
    path, _, at = place.rpartition(":")
    try:
        memory = open_slot_memory(path)
        log = FlightLog(memory, int(at), generation=generation, rank=rank)
    except (OSError, ValueError):
        return None
    own_process_settings.allow_stack_reads()
    os.register_at_fork(after_in_child=own_process_settings.allow_stack_reads)  # what was allowed here is not inherited
    # What torch's recorders hold of an earlier generation has the names of groups of this one.
    looks = NetworkLooks(NetworkLookLog(memory, int(at)), step_reader(memory, slot)) if slot else None
    recorder = FlightRecorder(log, _thread.get_ident(), time.time_ns() if _NEWEST else 0, looks)
    _NEWEST[:] = [recorder]
    _thread.start_new_thread(recorder.run, ())
    return recorder.set_up


class FlightRecorder:
    def __init__(self, log: FlightLog, main: int, since_ns: int = 0, looks: NetworkLooks | None = None) -> None:
        self._log, self._looks, self._since_ns = log, looks, since_ns
        self.set_up = SetUpWatch(main)
        self._main = main  # thread that started us, which is the main one unless threads were made before
        self._groups: dict[str, GroupState] = {}
        self._gpus: dict[str, GpuProgress] = {}
        self.messages = MessageProgress()
        self._on_gpus: set[str] = set()  # torch's names of groups that speak over NCCL
        self._pg_ids: dict[str, str] = {}  # torch's number of each group
        self._with_messages: set[str] = set()  # groups whose status counts messages and collectives alike
        self._across: frozenset[str] = frozenset()  # our names of groups that have both ends of a message
        self._arrivals: dict[str, dict[int, tuple[float, float | None]]] = {}
        self._answered = log.newest_question()
        self._place: tuple[object, ...] = ()  # where the main thread is, and how many messages it has posted
        self._place_at, self._stands_s = 0.0, _STANDS_S

    def run(self) -> None:
        """Record at whole seconds, so that ranks sample the same collectives. Ends when another recorder starts."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        due = time.time()
        try:
            while self in _NEWEST:
                now = time.time()
                self._wait(_LOOK_S - now % _LOOK_S)
                self._answer_stacks()
                self.set_up.look()
                stands = self._stands(now)
                if now >= due or stands:
                    # On a busy machine most of a dump's time is spent waiting for a core, which costs nobody anything.
                    began = time.thread_time()
                    self._note_flight()
                    due = int(now) + min(max(1.0, (time.thread_time() - began) / _SHARE), _RARELY_S)
        except Exception:
            return  # of no use to the script, so nothing to tell it

    def _wait(self, wait_s: float) -> None:
        """Wait, and meanwhile look at the network as often as the agent has ordered."""
        until = time.monotonic() + wait_s
        while (now := time.monotonic()) < until:
            if self._looks is None or self._looks.next_at > now:
                time.sleep(min(self._looks.next_at if self._looks else until, until) - now)
            else:
                self._looks.look()

    def _stands(self, now: float) -> bool:
        """Return whether the rank has stood still for long enough to record once more what it waits for. A main thread
        is often seen at the same place; one that posts messages meanwhile does not stand."""
        frame, counts = sys._current_frames().get(self._main), find_counts()
        posted = sum(count for count, _, _ in list(counts.posted.values())) if counts else 0
        place = (frame.f_code, frame.f_lasti, posted) if frame else (posted,)
        if place != self._place:
            self._place, self._place_at, self._stands_s = place, now, _STANDS_S
        if now - self._place_at < self._stands_s:
            return False
        self._stands_s *= 2
        return True

    def _note_flight(self) -> None:
        counts = find_counts()
        before = dict(counts.posted) if counts else {}
        dumps, names = _read_dumps(), _group_names()
        if counts is None or not counts.complete:
            self.note_collectives(dumps, names, time.time())
            return
        posted, members = dict(counts.posted), _group_members()
        entries = [e for dump in dumps for e in dump.get("entries", ())] if posted == before else []  # else they move
        channels = self.messages.list_channels(posted, entries, members, names, self._log.rank)
        self._across = find_groups_across(channels, members, names)
        self.note_collectives(dumps, names, time.time(), channels, self._main in counts.waiting)

    def note_collectives(
        self,
        dumps: list[Dump],
        names: dict[str, str],
        now: float,
        channels: list[ChannelState] | None = None,
        waits: bool = False,
    ) -> None:
        """Write collectives and message channels to the flight log. A group without new entries is written as idle."""
        entries = self._sort_entries(dumps, names)
        statuses = {pg_id: status for dump in dumps for pg_id, status in dump.get("pg_status", {}).items()}
        for name in names.values():
            self._groups.setdefault(name, (name, 0, 0, "", "", 0.0, 0.0, None))
        for name, (_, entered, _, op, _, at, _, gpu) in self._groups.items():
            if name not in entries:
                completed, gpu = idle_gpu(entered, op, gpu, self._find_status(statuses, name))
                self._groups[name] = (name, entered, completed, op, op if completed == entered else "", at, 0.0, gpu)
        timed = any(gpu.timed for gpu in self._gpus.values())
        for name, found in entries.items():
            status = self._find_status(statuses, name)
            gpu = self._gpus.setdefault(name, GpuProgress()).on_entries(found, status, timed)
            self._groups[name] = (*newest_collective(name, found, status if gpu else None), gpu)
            kept = self._arrivals.setdefault(name, {})
            kept.update(self._choose_arrivals(name, found, channels))
            for seq in sorted(kept)[:-_KEEP]:
                del kept[seq]
        came: list[GroupArrival] = [
            (name, seq, *told) for name, kept in self._arrivals.items() for seq, told in kept.items()
        ]
        if timed and not self._log.gpu:  # the driver has answered
            self._log.gpu = find_gpu(os.environ.get("LOCAL_RANK", ""))
        ended_at = max((gpu.unbegun.ended_at for gpu in self._gpus.values()), default=0.0)
        self._log.unbegun = self.messages.unbegun(ended_at)
        self._log.write_flight(now, list(self._groups.values()), came, channels, waits)

    def _sort_entries(self, dumps: list[Dump], names: dict[str, str]) -> dict[str, list[Entry]]:
        """Return the collectives by holdfast's name of their group. In a group with both NCCL and gloo, each backend
        numbers its collectives separately, so the collectives of gloo get a group name of their own."""
        found: dict[str, list[Entry]] = {}
        entries = [e for dump in dumps for e in dump.get("entries", ()) if e["time_created_ns"] >= self._since_ns]
        self._on_gpus.update(str(e["process_group"][0]) for e in entries if is_of_nccl(e))
        collectives = {id(e) for e in leave_batches_out(entries)}
        for entry in entries:
            given = str(entry["process_group"][0])
            name = names.get(given, given[:NAME_CHARS])
            if given in self._on_gpus and not is_of_nccl(entry):
                name = f"{name} on CPUs"
            self._pg_ids[name] = str(entry.get("pg_id"))
            if entry["is_p2p"]:
                self._with_messages.add(name)
            elif id(entry) in collectives:
                found.setdefault(name, []).append(entry)
        return found

    def _choose_arrivals(
        self, name: str, entries: list[Entry], channels: list[ChannelState] | None
    ) -> dict[int, tuple[float, float | None]]:
        """Return, for a sample of collectives, when the process entered each and how long the collective held the GPU.
        If torch reports GPU times, only collectives with a known time are sampled. In a pipeline the GPU time is None:
        the GPUs of several stages reach a collective at different times by design."""
        staged = name in self._across or (channels is None and self._with_messages)
        if staged or not self._gpus[name].timed or not is_of_nccl(entries[-1]):
            return {seq: (at, None) for seq, at in sample_arrivals(entries).items()}
        held = {e["collective_seq_id"]: held_s for e in entries if (held_s := held_gpu_s(e)) is not None}
        return {
            seq: (at, held[seq])
            for seq, at in sample_arrivals([e for e in entries if e["collective_seq_id"] in held]).items()
        }

    def _find_status(self, statuses: dict[str, PgStatus], name: str) -> PgStatus | None:
        return None if name in self._with_messages else statuses.get(self._pg_ids.get(name, ""))

    def _answer_stacks(self) -> None:
        asked = self._log.newest_question()
        if asked != self._answered:
            self._answered = asked
            self._log.write_stacks(asked, thread_stacks(self._main))


def newest_collective(
    name: str, entries: list[Entry], status: PgStatus | None = None
) -> tuple[str, int, int, str, str, float, float]:
    """Return a group's state: its newest collective, the last completed one, and when an open one times out first."""
    last = max(entries, key=lambda e: (e["collective_seq_id"], e["record_id"]))
    still = [e for e in entries if not has_ended(e)]
    expires_at = min((_expiry_of(e) for e in still), default=0.0)
    completed = last_completed(entries, status)
    return (
        name,
        last["collective_seq_id"],
        completed,
        operation_name(last),
        next((operation_name(e) for e in entries if e["collective_seq_id"] == completed), ""),
        last["time_created_ns"] / 1e9,
        expires_at,
    )


def _expiry_of(entry: Entry) -> float:
    """Return when an open collective times out."""
    usual_ms = _NCCL_MS if str(entry["profiling_name"]).startswith("nccl:") else _OTHER_MS
    expires_at: float = entry["time_created_ns"] / 1e9 + (entry.get("timeout_ms") or usual_ms) / 1e3
    return expires_at


def sample_arrivals(entries: list[Entry]) -> dict[int, float]:
    """Return by number when this rank entered each collective of a sample. All ranks choose the same sample, because
    only the collectives' numbers and their rate decide. If ranks see different rates, the smaller sample is a part of
    the larger one. The sample varies from step to step: a slow rank is late to only some of a step's collectives."""
    times = {e["collective_seq_id"]: e["time_created_ns"] / 1e9 for e in reversed(entries)}
    if not times:
        return {}
    places = {seq: seq * _SPREAD % _WHOLE for seq in times}
    span_s = max(times.values()) - min(times.values())
    room = _WHOLE
    while len(times) * room > _WHOLE * _A_SECOND * max(span_s, 0.1) and sum(p < room // 2 for p in places.values()) > 1:
        room //= 2
    return {seq: at for seq, at in times.items() if places[seq] < room}


def thread_stacks(main: int) -> list[object]:
    """Return the stacks of all threads of this process except this one, the main thread first."""
    me, threading = _thread.get_ident(), sys.modules.get("threading")
    first = threading.main_thread().ident if threading else main
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    return [(tid, tid == first, "", _list_frames(frame)) for tid, frame in frames if tid != me]


def _list_frames(frame: FrameType | None) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        found.append((_fit_name(code.co_qualname, "."), _fit_name(code.co_filename, "/"), frame.f_lineno or 0))
        frame = frame.f_back
    return found[::-1]


def _fit_name(name: str, mark: str) -> str:
    """Return the end of a name that is too long, without the part that the cut made shorter: nobody could tell that it
    is a secret."""
    return name if len(name) <= _NAME_CHARS else name[-_NAME_CHARS:].partition(mark)[2] or name[:_NAME_CHARS]


def _read_dumps() -> list[Dump]:
    """Return the records of torch's flight recorders, without stacks; empty before init_process_group."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if c10d is None or initialized is None or not initialized():
        return []
    asks = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    return [load_dump(ask, True) for ask in asks if ask is not None]


def _group_names() -> dict[str, str]:
    """Map torch's names of this rank's groups to ours. Split groups share a name, so ours add the first rank."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    ranks = getattr(world, "pg_group_ranks", {})
    known = {}
    for group, name in list(getattr(world, "pg_names", {}).items()):
        members = ranks.get(group) or {}
        part = f" from rank {min(members)}" if 0 < len(members) < int(os.environ.get("WORLD_SIZE", "1")) else ""
        known[str(name)] = f"{str(name)[:NAME_CHARS]}{part}"
    return known


def _group_members() -> dict[str, dict[int, int]]:
    """Map each group's name in torch to a map from a member's rank in the group to its rank in the job."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    ranks = getattr(world, "pg_group_ranks", {})
    return {
        str(name): {inner: outer for outer, inner in (ranks.get(group) or {}).items()}
        for group, name in list(getattr(world, "pg_names", {}).items())
    }
