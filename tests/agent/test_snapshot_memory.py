"""What a node has for snapshots, as the kernel tells it: of the machine, of cgroups, and of what is held already."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.agent.system import snapshot_memory
from holdfast.checkpoint.arena_header import arena_bytes
from holdfast.config import load
from holdfast.core.snapshots.memory_grant import MemoryRoom
from holdfast.model.copy_aim import Aim
from holdfast.wire.rank_keeper_messages import ArenaRequest
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec

M = 1 << 20


class Machine:
    """A root with as much of /proc and /sys as is read."""

    def __init__(self, root: Path, available_bytes: int) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available_bytes // 1024} kB\nHugePages: 0\n")
        self.write("proc/self/cgroup", "0::/\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def group(self, path: str, **files: object) -> None:
        for name, value in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('__', '.')}", f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root", 1000 * M)


def test_a_machine_without_cgroups(machine: Machine) -> None:
    assert snapshot_memory.available_bytes(machine.root) == 1000 * M


def test_the_tightest_cgroup_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/slice/job\n")
    machine.group("slice/job", memory__max="max", memory__high="max", memory__current=300 * M)
    assert snapshot_memory.available_bytes(machine.root) == 1000 * M
    machine.group("slice", memory__max=500 * M, memory__high="max", memory__current=400 * M)
    machine.group("slice", memory__stat=f"anon 1\ninactive_file {50 * M}\nactive_file {9 * M}")
    assert snapshot_memory.available_bytes(machine.root) == 150 * M
    machine.group("slice/job", memory__high=320 * M, memory__stat="inactive_file 0")
    assert snapshot_memory.available_bytes(machine.root) == 20 * M
    machine.group("slice/job", memory__current=400 * M)
    assert snapshot_memory.available_bytes(machine.root) == 0


def test_the_older_kind_of_cgroup(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:cpu,memory:/a\n3:name=systemd:/\n0::/\n")
    machine.group("memory/a", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=5 * M)
    assert snapshot_memory.available_bytes(machine.root) == 1000 * M
    machine.group("memory", memory__limit_in_bytes=100 * M, memory__usage_in_bytes=80 * M)
    machine.group("memory", memory__stat=f"inactive_file 0\ntotal_inactive_file {10 * M}")
    assert snapshot_memory.available_bytes(machine.root) == 30 * M


def test_a_container_that_sees_only_its_own_group(machine: Machine) -> None:
    """The path is the host's, and the mount shows the container's group as its root."""
    machine.write("proc/self/cgroup", "0::/kubepods/pod-1/c-2\n")
    machine.group("", memory__max=64 * M, memory__high="max", memory__current=4 * M, memory__stat="inactive_file 0")
    assert snapshot_memory.available_bytes(machine.root) == 60 * M


def test_this_machine() -> None:
    assert 0 < snapshot_memory.available_bytes() <= psutil.virtual_memory().total


HOLD = """
import mmap, os, sys
fd = os.memfd_create("holdfast-rank-0")
os.ftruncate(fd, 64 << 20)
mmap.mmap(fd, 0)[: 16 << 20] = bytes(16 << 20)
other = os.memfd_create("elsewhere")
os.write(other, bytes(1 << 20))
print(flush=True)
sys.stdin.read()
"""


def node_spec(host_nodes: int) -> NodeSpec:
    settings = load(None, [("snapshot.memory", "50%")])
    return NodeSpec(
        node="n0",
        order=0,
        nproc=2,
        url="",
        log_dir="",
        entry=EntryPoint(argv=("x",)),
        settings=settings,
        run_id="r",
        host_nodes=host_nodes,
    )


def test_what_is_held_by_nodes_of_the_run_counts_as_free(machine: Machine, tmp_path: Path) -> None:
    os.symlink("/proc/self/fd", machine.root / "proc/self/fd")
    for name in ("n0", "n1", "n2", "n3"):
        (tmp_path / "nodes" / name).mkdir(parents=True)
    (tmp_path / "nodes/n2/holder.pid").write_text("")  # about to be written
    (tmp_path / "nodes/n3/holder.pid").write_text("999999999\n")  # died
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        (tmp_path / "nodes/n1/holder.pid").write_text(f"{holder.pid}\n")
        os.symlink(f"/proc/{holder.pid}", machine.root / f"proc/{holder.pid}")
        found = snapshot_memory.measure_room(tmp_path / "nodes/n0", node_spec(host_nodes=2), machine.root)
    finally:
        holder.kill()
        holder.communicate()
    assert found.available_bytes == 1016 * M, "of 64 MiB only 16 were touched"
    assert (found.nproc, found.nodes, found.part_bytes, found.bytes) == (2, 2, 508 * M, 254 * M)


def want(rank: int, image_bytes: int = 64 * M, slots: int = 3) -> ArenaRequest:
    share = ((0, image_bytes // 4), (image_bytes // 2, image_bytes))
    return ArenaRequest(rank=rank, world=2, generation=1, layout="", image_bytes=image_bytes, slots=slots, share=share)


def budget(available_bytes: int, *, copies: int = 0) -> snapshot_memory.SnapshotBudget:
    return snapshot_memory.SnapshotBudget(
        lambda: MemoryRoom(available_bytes=available_bytes, cap="100%", nproc=2), copies=copies
    )


def test_a_budget_counts_what_it_gave() -> None:
    exact = 2 * arena_bytes(64 * M, 1) * 3
    for available, slots in ((exact, 3), (exact - 1, 2), (2 * exact // 3, 2), (2 * exact // 3 - 1, 0)):
        made = budget(available)
        given = [made.grant_slots(want(rank)).slots for rank in range(2)]
        assert given[0] == slots and given[1] >= slots
        assert sum(arena_bytes(64 * M, n) for n in given) <= available
    why = budget(exact // 3).grant_slots(want(0)).why
    assert why.startswith("snapshots do not fit into the memory of this node: 2 slots of 64.0 MiB for each of 2 ranks ")


def test_a_budget_counts_copies_for_another_node() -> None:
    exact = 2 * (arena_bytes(64 * M, 1) * 2 + arena_bytes(48 * M, 2))
    assert budget(exact, copies=1).grant_slots(want(0, slots=2)).slots == 2
    refused = budget(exact - 1, copies=1).grant_slots(want(0, slots=2))
    assert (refused.slots, refused.need_bytes, refused.room_bytes) == (0, exact, exact - 1)
    assert " 96.0 MiB " in refused.why and " 2 ranks " in refused.why


def test_a_budget_counts_two_copies() -> None:
    exact = 2 * (arena_bytes(64 * M, 1) * 2 + 2 * arena_bytes(48 * M, 2))
    for available, slots in ((exact, 2), (exact - 1, 0)):
        made = budget(available)
        made.on_aim(Aim(generation=1, peer="b", second="c"))
        assert made.grant_slots(want(0, slots=2)).slots == slots


def test_a_budget_after_the_agent_was_replaced() -> None:
    made = budget(arena_bytes(64 * M, 1) * 5)
    assert made.grant_slots(want(0)).slots == 2
    again = budget(arena_bytes(64 * M, 1) * 5)
    again.record_grant(want(0), 2)
    assert again.grant_slots(want(1)).slots == made.grant_slots(want(1)).slots == 3
