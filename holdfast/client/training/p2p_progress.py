"""Finds how far a rank's messages have come: how many are posted and, under NCCL, how many have begun and ended.

NCCL's entries in torch's recorder show the state of each message, or of its batch, but have no number that both ends
share. The newest message's number is the count of all messages posted; older ones are numbered by counting back.
"""

import re
from collections.abc import Mapping
from typing import Any

from holdfast.client.training.gpu_collective_progress import Entry, UnbegunTime, has_begun, has_ended
from holdfast.client.training.p2p_counts import ChannelKey
from holdfast.wire.rank_memory.flight_log_writer import NAME_CHARS, ChannelState

_MESSAGE = re.compile(r"nccl:(send|recv) \d+(?:->|<-)(\d+)")  # ranks in the group
_BATCH = "nccl:coalesced"
_Posted = Mapping[ChannelKey, tuple[int, int, int]]
Members = Mapping[str, Mapping[int, int]]  # torch's name of a group -> rank in the group -> rank


class MessageProgress:
    def __init__(self) -> None:
        self._ended: dict[ChannelKey, int] = {}  # known for certain
        self._unbegun = UnbegunTime()
        self._next: Entry | None = None  # the oldest that is queued and has not begun

    def list_channels(
        self, posted: _Posted, entries: list[Entry], members: Members, names: Mapping[str, str], rank: int
    ) -> list[ChannelState]:
        """Return the state of every channel. `posted` has the counts from the moment when `entries` were dumped."""
        found: list[ChannelState] = []
        sorted_entries = sort_messages(entries)
        self._note_unbegun([entry for channel in sorted_entries.values() for entry in channel])
        states = {key: [(has_begun(e), has_ended(e)) for e in channel] for key, channel in sorted_entries.items()}
        for key, (count, tag, size_bytes) in posted.items():
            group, peer, sends = key
            other = members.get(group, {}).get(peer)
            if other is None:
                continue  # of a group that is gone
            begun, ended = self._count_back(key, count, states.get(key, []))
            source, target = (rank, other) if sends else (other, rank)
            found.append((names.get(group, group[:NAME_CHARS]), source, target, count, begun, ended, tag, size_bytes))
        return found

    def unbegun(self, ended_at: float) -> tuple[float, float]:
        """Return two times: since when the next message has been ready to begin on the GPU (0: none), and the longest
        wait of any message. `ended_at` is when the newest collective ended."""
        if not self._unbegun.ended_at:  # none has told how long it took: nobody may tell when they begin
            return 0.0, 0.0
        return self._unbegun.since(self._next, ended_at), round(self._unbegun.longest_s, 3)

    def _note_unbegun(self, entries: list[Entry]) -> None:
        for entry in sorted(entries, key=lambda e: e.get("time_discovered_completed_ns") or 0):
            self._unbegun.note_end(entry)
        queued = [e for e in entries if not has_begun(e)]
        self._next = min(queued, key=lambda e: int(e["time_created_ns"]), default=None)

    def _count_back(self, key: ChannelKey, count: int, seen: list[tuple[bool, bool]]) -> tuple[int | None, int | None]:
        """Return the numbers of a channel's newest begun and newest ended message on the GPU; None if unknown. Messages
        of a channel begin and end in order, so the newest message's number and the states give both numbers."""
        begun = count - sum(not started for started, _ in seen)
        ended = count - sum(not over for _, over in seen)
        unseen = count - len(seen)
        if seen and (unseen == 0 or seen[0][0] or self._ended.get(key, 0) >= unseen):
            self._ended[key] = max(0, ended)
            return begun, ended
        if not seen and self._ended.get(key) == count:
            return count, count
        return None, None


def find_groups_across(channels: list[ChannelState], members: Members, names: Mapping[str, str]) -> frozenset[str]:
    """Return the names of groups that contain both ends of a channel; in a pipeline they span several stages."""
    ends = [{source, target} for _, source, target, *_ in channels]
    return frozenset(
        names.get(group, group[:NAME_CHARS])
        for group, ranks in members.items()
        if any(both <= set(ranks.values()) for both in ends)
    )


def sort_messages(entries: list[Entry]) -> dict[ChannelKey, list[Entry]]:
    """Return the messages in NCCL's recorder by channel, oldest first. A message that was sent in a batch is
    represented by the batch's entry, because only the batch's entry has a state."""
    batches = {_batch_of(e): e for e in entries if e["profiling_name"] == _BATCH}
    found: dict[ChannelKey, list[Entry]] = {}
    for entry in entries:
        match = _MESSAGE.match(str(entry["profiling_name"]))
        if entry["is_p2p"] and match:
            key = (str(entry["process_group"][0]), int(match[2]), match[1] == "send")
            found.setdefault(key, []).append(batches.get(_batch_of(entry), entry))
    return found


def leave_batches_out(entries: list[Entry]) -> list[Entry]:
    """Return only the entries of collectives, without those of messages and of batches of messages."""
    messages = {_batch_of(e) for e in entries if e["is_p2p"]}
    cut = min((e["record_id"] for e in entries), default=0)  # what came before it may have left the buffer
    return [
        e
        for e in entries
        if not e["is_p2p"]
        and not (e["profiling_name"] == _BATCH and (_batch_of(e) in messages or (e["record_id"] == cut > 0)))
    ]


def _batch_of(entry: Entry) -> tuple[Any, ...]:
    """Return a key that a batch's entry shares with the entries of its messages only. The entry of coalesced
    collectives has another key, because its collective number is later."""
    return entry.get("pg_id"), entry["collective_seq_id"], entry.get("p2p_seq_id")
