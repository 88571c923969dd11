"""Disks that were full lately. They may explain that ranks ended or that nodes are gone, and no node is to blame."""

import msgspec

from holdfast.core.incident.first_cause import is_echo
from holdfast.model.decider_events import Successor
from holdfast.model.detector_alarm import MACHINE_LOST, Alarm, Kind

DISK_FULL = "disk_full"  # the class of such failures
_GROUP, _ACTION, _SURE = "data_storage", "fix_config", 0.8  # as the catalog has it
_TITLE = "Disk, quota or inodes are used up"
_LATELY_S = 600.0  # before a failure: a disk that was full then may be what the failure comes of
_ALL = ""  # of the run directory: the disk that the controller and all nodes of its host write to


class FullDisks:
    """The disks that were seen full, by the nodes that write to them, and when that was last."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, str]] = {}

    def on_alarm(self, alarm: Alarm) -> None:
        """Note the disk of a health alarm, whose signature names the reading and the path."""
        if alarm.kind is Kind.HEALTH and alarm.klass == DISK_FULL and not alarm.over:
            path = alarm.signature.partition(" ")[2]
            self._seen |= {node: (alarm.at, path) for node in alarm.suspects if path}

    def on_successor(self, event: Successor) -> None:
        """Note the disk for which the controller before had ended."""
        if event.full_disk:
            self._seen[_ALL] = (event.full_until, event.full_disk)

    def explain(self, now: float, alarm: Alarm) -> str:
        """Return the path of the full disk that explains an alarm; "" if none does.

        A node that is gone may have ended because it could write nothing, unless its machine has failed. A rank may
        have raised that it could not, or have left no words at all. What else it says is no sign of a full disk.
        """
        if alarm.full_disk:
            return alarm.full_disk
        mute = alarm.kind is Kind.CRASH and (alarm.code or 0) > 0 and not (alarm.klass or alarm.raised)
        gone = alarm.kind is Kind.SILENCE and alarm.signature != MACHINE_LOST
        if not (gone or mute or alarm.klass == DISK_FULL):
            return ""
        seen = [self._seen[node] for node in (*alarm.suspects, _ALL) if node in self._seen]
        return next((path for at, path in seen if min(now, alarm.at) <= at + _LATELY_S), "")


def blame_disk(alarm: Alarm, path: str) -> Alarm:
    """Return the alarm as one about a full disk. A node that is gone stays gone, whatever the reason."""
    if alarm.kind is not Kind.CRASH or alarm.klass not in ("", DISK_FULL) or is_echo(alarm):
        return msgspec.structs.replace(alarm, full_disk=path)
    hint = f"Free space on the disk that holds {path}, or write elsewhere."
    sure = max(_SURE, alarm.confidence)  # of ranks that only said that they could not write, too
    blamed = msgspec.structs.replace(alarm, title=_TITLE, confidence=sure, hint=hint, full_disk=path)
    return blamed if alarm.klass else msgspec.structs.replace(blamed, klass=DISK_FULL, group=_GROUP, action=_ACTION)


def name_disk(path: str, failed: str) -> str:
    """Return what failed, with the full disk as its cause; only what failed if `path` is empty."""
    return f"the disk that holds {path} was full: {failed}" if path else failed
