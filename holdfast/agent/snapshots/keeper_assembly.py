"""Puts a keeper together with the memory, the files and the sockets of its node."""

from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter
from holdfast.agent.snapshots.keeper import Keeper, KeeperParts
from holdfast.agent.snapshots.keeper_identity import KeeperIdentity
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts
from holdfast.agent.snapshots.keeper_note_folder import KeeperNoteFolder
from holdfast.agent.snapshots.keeper_sockets import KeeperSockets
from holdfast.agent.snapshots.peer_arenas import wait_for_loop
from holdfast.agent.snapshots.snapshot_disk import SnapshotDisk
from holdfast.agent.system.snapshot_memory import SnapshotBudget


def build_keeper(place: KeeperIdentity, ports: KeeperPorts, budget: SnapshotBudget | None = None) -> Keeper:
    arenas, notes = ArenaTable(), KeeperNoteFolder(place.socket_path.parent)
    parts = KeeperParts(
        arenas=arenas,
        wait_for_loop=wait_for_loop,
        notes=notes,
        links=KeeperSockets(place.socket_path, place.run_id, place.keys, place.host),
        disk=SnapshotDisk(place.disk, notes, arenas, ports),
        persisting=CheckpointWriter(ports.say, ports.clock, ports.report_checkpoints),
    )
    return Keeper(place, ports, parts, budget)
